"""Which faces two workers use, and what a refusal says."""

from __future__ import annotations

import msgspec
import pytest

from baton.errors import LayoutMismatchError
from baton.handoff.messages import PROTOCOL_VERSION, Hello, KVViewDescriptor
from baton.handoff.peers import (
    MAX_REASON_CHARS,
    MAX_REASONS,
    ViewPair,
    choose_views,
    find_encoded_views,
    negotiate,
)
from baton.ids import Epoch, WorkerId
from baton.kv.layout import KVLayout

CANONICAL = KVLayout.gqa(2, 2, 8, block_size=16, dtype="float32")
HALF = msgspec.structs.replace(CANONICAL, dtype="float16")
VEC, AMX = (
    msgspec.structs.replace(CANONICAL, order="opaque", arrangement=name) for name in ("vec", "amx")
)
INT8, FP8, OF_HALF = (
    msgspec.structs.replace(CANONICAL, order="opaque", dtype="int8", arrangement=name)
    for name in ("encoded/int8/1/aa", "encoded/fp8/1/aa", "encoded/int8/1/bb")
)


def hello(worker: str, *layouts: KVLayout, fingerprint: str = "f" * 64, **traits: str) -> Hello:
    return Hello(
        version=PROTOCOL_VERSION,
        worker=WorkerId(worker),
        epoch=Epoch("e"),
        clock_domain="boot",
        fingerprint=fingerprint,
        views=tuple(KVViewDescriptor(layout, ()) for layout in layouts),
        traits=traits,
        preferred_op="WRITE",
        probe_buffers=(),
        lease_s=10.0,
    )


@pytest.mark.parametrize(
    ("dialer", "listener", "pair"),
    [
        ((CANONICAL,), (CANONICAL,), ViewPair(0, 0)),
        ((VEC, CANONICAL), (VEC, CANONICAL), ViewPair(0, 0)),
        ((VEC, CANONICAL), (AMX, CANONICAL), ViewPair(1, 1)),
        ((VEC, CANONICAL), (CANONICAL, VEC), ViewPair(0, 1)),
        ((CANONICAL, VEC), (VEC, CANONICAL), ViewPair(0, 1)),
        ((VEC,), (AMX,), None),
        ((HALF,), (CANONICAL,), None),
    ],
)
def test_the_first_pair_in_the_dialers_order(
    dialer: tuple[KVLayout, ...], listener: tuple[KVLayout, ...], pair: ViewPair | None
) -> None:
    assert choose_views(*(hello("w", *layouts).views for layouts in (dialer, listener))) == pair


def test_views_that_are_digested_in_different_ways_are_no_pair() -> None:
    dialer, on_gpu = hello("d", CANONICAL), hello("p", CANONICAL)
    views = tuple(msgspec.structs.replace(view, digest="sum128") for view in on_gpu.views)
    on_gpu = msgspec.structs.replace(on_gpu, views=views)
    with pytest.raises(LayoutMismatchError, match="sum128 of the source, xxh3 of the destination"):
        negotiate(dialer, on_gpu)
    assert negotiate(on_gpu, on_gpu) == ViewPair(0, 0)


@pytest.mark.parametrize(
    ("dialer", "listener", "pairs"),
    [
        ((INT8, CANONICAL), (INT8, CANONICAL), {"int8/1": ViewPair(0, 0)}),
        ((FP8, INT8, CANONICAL), (CANONICAL, INT8), {"int8/1": ViewPair(1, 1)}),
        ((INT8, CANONICAL), (FP8, CANONICAL), {}),
        ((INT8, CANONICAL), (OF_HALF, CANONICAL), {}),
        ((INT8, CANONICAL), (CANONICAL,), {}),
    ],
)
def test_encoded_views_are_beside_the_raw_ones(
    dialer: tuple[KVLayout, ...], listener: tuple[KVLayout, ...], pairs: dict[str, ViewPair]
) -> None:
    hellos = hello("d", *dialer), hello("p", *listener)
    raw = negotiate(*hellos)
    assert (dialer[raw.dialer], listener[raw.listener]) == (CANONICAL, CANONICAL)
    assert find_encoded_views(*hellos) == pairs


def test_encoded_views_alone_are_not_enough() -> None:
    with pytest.raises(LayoutMismatchError):
        negotiate(hello("d", INT8, HALF), hello("p", INT8, CANONICAL))


def test_traits_alone_refuse_nobody() -> None:
    pair = negotiate(
        hello("d", CANONICAL, engine="vllm"), hello("p", CANONICAL, engine="transformers")
    )
    assert pair == ViewPair(0, 0)


def test_another_model_is_explained_by_the_traits_that_differ() -> None:
    decode = hello("d", CANONICAL, fingerprint="a" * 64, model="m-1", dtype="bfloat16", isa="amx")
    prefill = hello("p", CANONICAL, fingerprint="b" * 64, model="m-2", dtype="bfloat16")
    with pytest.raises(LayoutMismatchError) as caught:
        negotiate(decode, prefill)
    model, isa, trait = caught.value.differences
    assert model == f"another model: fingerprint {'a' * 16}… on d, {'b' * 16}… on p"
    assert isa == "isa: amx on d, not given on p"
    assert trait == "model: m-1 on d, m-2 on p"


def test_faces_that_do_not_match_are_explained_pair_by_pair() -> None:
    with pytest.raises(LayoutMismatchError) as caught:
        negotiate(hello("d", VEC, HALF, isa="vec"), hello("p", CANONICAL, isa="amx"))
    reasons = caught.value.differences
    assert reasons[0].startswith("view 0 into view 0: page order")
    assert reasons[1] == (
        "view 0 into view 1: dtype: float32 at the source, float16 at the destination"
    )
    assert reasons[2] == "isa: vec on d, amx on p"


def test_another_protocol_is_refused_before_anything_is_compared() -> None:
    newer = msgspec.structs.replace(hello("p", HALF), version=PROTOCOL_VERSION + 1)
    with pytest.raises(LayoutMismatchError, match=f"{PROTOCOL_VERSION} on d, .* on p"):
        negotiate(hello("d", CANONICAL), newer)


def test_reasons_fit_their_message() -> None:
    views = [msgspec.structs.replace(VEC, arrangement=f"{n:x>128}") for n in range(8)]
    others = [msgspec.structs.replace(AMX, arrangement=f"{n:y>128}") for n in range(8)]
    traits = {f"{n:x>64}": "v" * 256 for n in range(32)}
    with pytest.raises(LayoutMismatchError) as caught:
        negotiate(hello("d" * 4000, *views, **traits), hello("p", *others))
    assert len(caught.value.differences) <= MAX_REASONS
    assert max(map(len, caught.value.differences)) <= MAX_REASON_CHARS
