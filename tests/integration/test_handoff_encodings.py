"""Two real agents: KV is encoded where both have the same encoding and it is then there sooner."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from baton.auth.credentials import Credentials
from baton.encodings.interface import ENCODINGS
from baton.encodings.rates import EncodingRate, EncodingRates
from baton.errors import ConfigError
from baton.handoff import link_encodings
from baton.handoff.encoded_view import (
    LOSSY_TRAIT,
    StagingSize,
    encoding_of,
    make_encoded_view,
    open_handoff_encodings,
)
from baton.handoff.interface import KVFailed, KVLanded, KVSent
from baton.handoff.kv_views import KVView
from baton.handoff.peer_transports import LinkOptions
from baton.kv.copies import count_blocks
from baton.kv.layout import KVLayout, LayerLayout, TensorParallelShard
from baton.transfer.links.probes import ProbeBounds
from baton.transfer.region import allocate_host_region, release_region
from tests.integration.handoff_nodes import (
    CLOCK,
    FIRST,
    NUM_BLOCKS,
    ConvertedPages,
    Node,
    Pages,
    make_handoff,
    make_layout,
    node,
    plain_pages,
    staged_pages,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.handoff.messages import TransferOp
    from tests.integration.handoff_nodes import Handoff

TCP = ("tcp",)
NUM_TOKENS = 101
SIZE = StagingSize(1 << 20, 400)
LATENT = KVLayout.mla(3, 24, block_size=16, dtype="float32")
HEADS_FIRST = msgspec.structs.replace(make_layout(16), order="heads_first")


QUICK, SLOW = 1e-13, 1e-6
"""Seconds for a byte of an encoding: next to no link is slower than the one, or than the other."""
MOST_HANDOFFS = 40
MEASURED = LinkOptions("measured", ProbeBounds(0.05))


NUM_SCRATCH = 3
"""Pages: fewer than a prompt's blocks, so that it is encoded in parts."""


@contextmanager
def converted_pages(kind: str, layout: KVLayout) -> Iterator[Pages]:
    """As vLLM has them: pages of its own order, a raw view through staging, and an encoded one."""
    (encoding,) = open_handoff_encodings(kind, layout)
    with staged_pages(layout, NUM_BLOCKS) as pages:
        (raw,) = pages.views
        shapes = [(NUM_SCRATCH, layout.page_bytes(layer)) for layer in range(layout.num_layers)]
        region = allocate_host_region(shapes)
        assert isinstance(raw.staging, ConvertedPages)
        scratch = KVView(raw.layout, region, replace(raw.staging, region=region))
        size = replace(SIZE, num_blocks=NUM_BLOCKS)
        rates = EncodingRates(EncodingRate(QUICK), EncodingRate(QUICK))
        view = make_encoded_view(scratch, encoding, size, clock=CLOCK, rates=rates)
        try:
            yield replace(pages, views=(raw, view))
        finally:
            release_region(view.region)


@pytest.fixture(name="key")
def key_fixture() -> Credentials:
    return Credentials.generate()


@contextmanager
def encoded_pages(
    kinds: str, layout: KVLayout, size: StagingSize = SIZE, *, byte_s: float | None = QUICK
) -> Iterator[Pages]:
    """Pages that peers reach themselves, and before them encoded ones, of `kinds` "int8,fp8" both.

    `byte_s` is what encoding is said to take; None: it is measured. Use corrects it only where
    prompts are larger than those of these tests.
    """
    with plain_pages(layout) as plain, ExitStack() as regions:
        views = []
        for kind in kinds.split(","):
            for encoding in open_handoff_encodings(kind, layout):
                rates = (
                    EncodingRates(EncodingRate(byte_s), EncodingRate(byte_s)) if byte_s else None
                )
                view = make_encoded_view(plain.views[0], encoding, size, clock=CLOCK, rates=rates)
                regions.callback(release_region, view.region)
                views.append(view)
        yield replace(plain, views=(*views, *plain.views))


def fill(node_: Node, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for pages in node_.pages.own:
        numbers = rng.standard_normal(pages.size // 4).astype(np.float32)
        pages[:] = numbers.view(np.uint8).reshape(pages.shape)


def run(handoff: Handoff) -> None:
    handoff.start_receive()
    handoff.start_send()
    handoff.wait_until_granted()
    handoff.compute(70, 100, NUM_TOKENS)
    handoff.prefill_done()
    ticket = handoff.sending.ticket.id
    assert handoff.decode.wait_for() == [KVLanded(ticket, FIRST)]
    assert handoff.prefill.wait_for() == [KVSent(ticket)]


def run_until_chosen(
    prefill: Node, decode: Node, encoding: str | None = None, start_blocks: int = 0
) -> Handoff:
    """Hand over, raw as long as the link is not measured; the first whose encoding was chosen."""
    for _ in range(MOST_HANDOFFS):
        handoff = make_handoff(prefill, decode, start_blocks=start_blocks, num_cached=NUM_TOKENS)
        run(handoff)
        estimate = handoff.receiving.trace.encoding_estimate
        if estimate is not None and encoding in {None, estimate.chosen}:
            return handoff
        if not handoff.receiving.trace.encodings:
            handoff.check_bytes()
        threading.Event().wait(0.02)  # for what the prefill worker sends about its link
    raise AssertionError(f"not in {MOST_HANDOFFS} handoffs: {handoff.receiving.trace}")


def numbers_of(node_: Node, handoff: Handoff, side: str) -> np.ndarray:
    order = handoff.sending if side == "send" else handoff.receiving
    start, stop = handoff.receiving.start, handoff.receiving.num_tokens
    layers = range(node_.layout.num_layers)
    data = b"".join(node_.canonical(order.blocks, layer, start, stop) for layer in layers)
    return np.frombuffer(data, np.float32)


def ways() -> Iterator[object]:
    """By default each pair of two of these."""
    chosen = {
        ("WRITE", "int8", "gqa"), ("READ", "fp8", "gqa"),
        ("WRITE", "fp8", "heads first"), ("READ", "int8", "heads first"),
        ("WRITE", "fp8", "latent"), ("READ", "int8", "latent"),
    }  # fmt: skip
    layouts = {"gqa": make_layout(16), "heads first": HEADS_FIRST, "latent": LATENT}
    for way in itertools.product(("WRITE", "READ"), ("int8", "fp8"), layouts):
        op, kind, name = way
        marks = () if way in chosen else pytest.mark.every
        yield pytest.param(op, kind, layouts[name], id=f"{name}-{kind}-{op}", marks=marks)


@pytest.mark.parametrize(("op", "kind", "layout"), list(ways()))
def test_kv_is_encoded_once_the_link_is_measured(
    op: TransferOp, kind: str, layout: KVLayout, key: Credentials
) -> None:
    with (
        encoded_pages(kind, layout) as theirs,
        encoded_pages(kind, layout) as ours,
        node("p", kinds=TCP, key=key, links=MEASURED, pages=theirs) as prefill,
        node("d", kinds=TCP, key=key, links=MEASURED, pages=ours, op=op) as decode,
    ):
        fill(prefill)
        first = make_handoff(prefill, decode)
        run(first)
        first.check_bytes()
        assert first.receiving.trace.encodings == [], "nothing was measured"
        for start_blocks in (0, 2):
            before = [pages.copy() for pages in decode.pages.own]
            name = ENCODINGS.build(kind, {}).name
            handoff = run_until_chosen(prefill, decode, name, start_blocks)
            for order in (handoff.sending, handoff.receiving):
                assert order.trace.encodings == [f"handoff={name}"]
            estimate = handoff.receiving.trace.encoding_estimate
            assert estimate is not None
            assert (estimate.chosen, estimate.encoding) == (name, name)
            assert 0 < estimate.encoded_s < estimate.raw_s
            assert estimate.took_s is not None
            assert estimate.took_s > 0
            received = numbers_of(decode, handoff, "receive")
            sent = numbers_of(prefill, handoff, "send")
            assert 0 < np.abs(received - sent).max() < (0.02 if kind == "int8" else 0.3)
            num_tokens = NUM_TOKENS - handoff.receiving.start
            assert handoff.receiving.trace.num_bytes < 0.4 * num_tokens * layout.bytes_per_token
            others = np.setdiff1d(np.arange(NUM_BLOCKS), handoff.receiving.blocks.blocks)
            for own, old in zip(decode.pages.own, before, strict=True):
                assert np.array_equal(own[others], old[others])


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("converts", ["prefill", "decode", "both"])
def test_pages_of_an_order_of_their_own_are_encoded_by_parts(
    op: TransferOp, converts: str, key: Credentials
) -> None:
    """They are canonical once encoded, so the other worker need not have the same order."""
    own, plain = HEADS_FIRST, make_layout(16)
    sides = [
        converted_pages("int8", own) if converts in {side, "both"} else encoded_pages("int8", plain)
        for side in ("prefill", "decode")
    ]
    with (
        sides[0] as theirs,
        sides[1] as ours,
        node("p", kinds=TCP, key=key, links=MEASURED, pages=theirs) as prefill,
        node("d", kinds=TCP, key=key, links=MEASURED, pages=ours, op=op) as decode,
    ):
        fill(prefill)
        before = [pages.copy() for pages in decode.pages.own]
        handoff = run_until_chosen(prefill, decode, "int8/1")
        assert handoff.receiving.trace.encodings == ["handoff=int8/1"]
        assert len(handoff.sending.blocks.blocks) > 2 * NUM_SCRATCH
        received = numbers_of(decode, handoff, "receive")
        assert 0 < np.abs(received - numbers_of(prefill, handoff, "send")).max() < 0.02
        others = np.setdiff1d(np.arange(NUM_BLOCKS), handoff.receiving.blocks.blocks)
        for pages, old in zip(decode.pages.own, before, strict=True):
            assert np.array_equal(pages[others], old[others])


def check_all_go_raw(prefill: Node, decode: Node, num_handoffs: int = 4) -> None:
    """No encoding is considered, though there is time to learn of the link."""
    for _ in range(num_handoffs):
        handoff = make_handoff(prefill, decode)
        run(handoff)
        handoff.check_bytes()
        for order in (handoff.sending, handoff.receiving):
            assert order.trace.encodings == []
            assert order.trace.encoding_estimate is None
        threading.Event().wait(0.06)


@pytest.mark.parametrize(
    ("kinds", "block_sizes"),
    [(("int8", "raw"), (16, 16)), (("raw", "int8"), (16, 16)), (("int8", "fp8"), (16, 16)),
     (("int8", "int8"), (16, 24))],
)  # fmt: skip
def test_a_peer_without_the_same_encoding_gets_raw_kv(
    kinds: tuple[str, str], block_sizes: tuple[int, int], key: Credentials
) -> None:
    with (
        encoded_pages(kinds[0], make_layout(block_sizes[0])) as theirs,
        encoded_pages(kinds[1], make_layout(block_sizes[1])) as ours,
        node("p", kinds=TCP, key=key, links=MEASURED, pages=theirs) as prefill,
        node("d", kinds=TCP, key=key, links=MEASURED, pages=ours) as decode,
    ):
        fill(prefill)
        check_all_go_raw(prefill, decode)


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("slow_side", ["prefill", "decode"])
def test_kv_goes_raw_where_encoding_takes_longer_than_it_saves(
    op: TransferOp, slow_side: str, key: Credentials
) -> None:
    rates = [SLOW if side == slow_side else QUICK for side in ("prefill", "decode")]
    with (
        encoded_pages("int8", make_layout(16), byte_s=rates[0]) as theirs,
        encoded_pages("int8", make_layout(16), byte_s=rates[1]) as ours,
        node("p", kinds=TCP, key=key, links=MEASURED, pages=theirs) as prefill,
        node("d", kinds=TCP, key=key, links=MEASURED, pages=ours, op=op) as decode,
    ):
        fill(prefill)
        handoff = run_until_chosen(prefill, decode)
        handoff.check_bytes()
        assert handoff.receiving.trace.encodings == handoff.sending.trace.encodings == []
        estimate = handoff.receiving.trace.encoding_estimate
        assert estimate is not None
        assert estimate.chosen == "raw"
        assert 0 < estimate.raw_s < estimate.encoded_s


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("kinds", [TCP, ("shared",)])
def test_kv_goes_raw_where_prefill_hides_it(
    op: TransferOp, kinds: tuple[str, ...], key: Credentials
) -> None:
    """Also several times: a refused encoding gives back its pages, which are for one prompt."""
    layout = make_layout(16)
    size = StagingSize(SIZE.num_bytes, NUM_TOKENS)
    few = replace(size, num_bytes=count_blocks(NUM_TOKENS, 16) * encoded_block_bytes(layout))
    with (
        encoded_pages("int8", layout, few) as theirs,
        encoded_pages("int8", layout, few) as ours,
        node("p", kinds=kinds, key=key, links=MEASURED, pages=theirs) as prefill,
        node("d", kinds=kinds, key=key, links=MEASURED, pages=ours, op=op) as decode,
    ):
        fill(prefill)
        run(make_handoff(prefill, decode))  # raw: what a prompt takes is learned
        run_until_chosen(prefill, decode, "int8/1")
        for start_blocks in (0, 2, 0):
            handoff = make_handoff(prefill, decode, start_blocks=start_blocks)
            run(handoff)
            handoff.check_bytes()
            for order in (handoff.sending, handoff.receiving):
                estimate = order.trace.encoding_estimate
                assert estimate is not None
                assert (estimate.chosen, estimate.encoding) == ("raw", "int8/1")
                assert 0 < estimate.prefill_s < estimate.raw_s
                assert estimate.took_s is not None
                assert estimate.took_s > 0
                assert order.trace.encodings == []
        run_until_chosen(prefill, decode, "int8/1")


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_another_encoding_is_granted_where_the_prefill_worker_asks_for_it(
    op: TransferOp, key: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it asks for is set here: which of several is there first depends on the machine."""
    monkeypatch.setattr(link_encodings, "choose_arrival", lambda *_: "int8/1")
    layout = make_layout(16)
    with (
        encoded_pages("int8,int4_token", layout) as theirs,
        encoded_pages("int8,int4_token", layout) as ours,
        node("p", kinds=TCP, key=key, links=MEASURED, pages=theirs) as prefill,
        node("d", kinds=TCP, key=key, links=MEASURED, pages=ours, op=op) as decode,
    ):
        fill(prefill)
        for start_blocks in (0, 2, 0):
            handoff = run_until_chosen(prefill, decode, "int8/1", start_blocks)
            for order in (handoff.sending, handoff.receiving):
                estimate = order.trace.encoding_estimate
                assert estimate is not None
                assert (estimate.chosen, estimate.encoding) == ("int8/1", "int8/1")
                assert order.trace.encodings == ["handoff=int8/1"]
            sent = numbers_of(prefill, handoff, "send")
            difference = np.abs(numbers_of(decode, handoff, "receive") - sent)
            assert 0 < difference.max() < 0.02


def encoded_block_bytes(layout: KVLayout) -> int:
    with encoded_pages("int8", layout) as pages:
        return pages.views[0].layout.block_bytes


@pytest.mark.parametrize(
    ("held", "accepted", "is_refused"),
    [("int8/1", "", True), ("int8/1", "fp8/1", True), ("int8/1", "fp8/1,int8/1", False),
     ("", "int8/1", False)],
)  # fmt: skip
def test_kv_that_lost_something_is_kept_from_those_who_want_it_exact(
    held: str, accepted: str, *, is_refused: bool, key: Credentials
) -> None:
    traits = [{LOSSY_TRAIT: value} if value else {} for value in (held, accepted)]
    with (
        node("p", kinds=("shared",), key=key, traits=traits[0]) as prefill,
        node("d", kinds=("shared",), key=key, traits=traits[1]) as decode,
    ):
        fill(prefill)
        handoff = make_handoff(prefill, decode)
        if not is_refused:
            run(handoff)
            handoff.check_bytes()
            return
        handoff.start_receive()
        handoff.start_send()
        failed = decode.wait_for()[0]
        assert isinstance(failed, KVFailed)
        assert "int8/1" in str(failed.error)


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_memory_of_one_host_is_a_link_as_any_other(op: TransferOp, key: Credentials) -> None:
    kinds = ("shared", "tcp")
    with (
        encoded_pages("int8", make_layout(16)) as theirs,
        encoded_pages("int8", make_layout(16)) as ours,
        node("p", kinds=kinds, key=key, links=MEASURED, pages=theirs) as prefill,
        node("d", kinds=kinds, key=key, links=MEASURED, pages=ours, op=op) as decode,
    ):
        fill(prefill)
        handoff = run_until_chosen(prefill, decode, "int8/1")
        assert handoff.receiving.trace.transport == "shared"
        difference = numbers_of(decode, handoff, "receive") - numbers_of(prefill, handoff, "send")
        assert 0 < np.abs(difference).max() < 0.02


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_kv_that_did_not_arrive_is_not_noted_as_encoded(op: TransferOp, key: Credentials) -> None:
    layout = make_layout(16)
    with (
        encoded_pages("int8", layout) as theirs,
        encoded_pages("int8", layout) as ours,
        node("p", kinds=TCP, key=key, links=MEASURED, pages=theirs) as prefill,
        node("d", kinds=TCP, key=key, links=MEASURED, pages=ours, op=op) as decode,
    ):
        run_until_chosen(prefill, decode, "int8/1")
        handoff = make_handoff(prefill, decode, num_cached=NUM_TOKENS)
        handoff.start_receive()
        handoff.start_send()
        handoff.wait_until_granted()
        estimate = handoff.receiving.trace.encoding_estimate
        assert estimate is not None
        assert estimate.chosen == "int8/1"
        decode.agent.abort_from_peer(handoff.receiving.ticket.id, "its engine failed")
        assert isinstance(decode.wait_for()[0], KVFailed)
        assert handoff.receiving.trace.encodings == []


@pytest.mark.parametrize("small_side", ["prefill", "decode"])
def test_a_prompt_that_exceeds_the_encoded_pages_goes_raw(
    small_side: str, key: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    few = StagingSize(8 << 10, 400)
    sizes = [few if side == small_side else SIZE for side in ("prefill", "decode")]
    with (
        encoded_pages("int8", make_layout(16), sizes[0]) as theirs,
        encoded_pages("int8", make_layout(16), sizes[1]) as ours,
        node("p", kinds=TCP, key=key, links=MEASURED, pages=theirs) as prefill,
        node("d", kinds=TCP, key=key, links=MEASURED, pages=ours) as decode,
    ):
        assert "handoff.staging_bytes: 8192 holds" in caplog.text
        fill(prefill)
        check_all_go_raw(prefill, decode)
        run_until_chosen(prefill, decode, "int8/1", start_blocks=6)  # its last block has room


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("num_blocks", [5, 6])
def test_two_workers_that_send_to_each_other_never_wait_for_each_other(
    op: TransferOp, num_blocks: int, key: Credentials
) -> None:
    """Each has a half of the pages for what it sends; what needs more goes raw, beside others."""
    layout, num_pages, num_tokens = make_layout(16), 10, 16 * num_blocks
    few = replace(SIZE, num_bytes=num_pages * encoded_block_bytes(layout))
    with (
        encoded_pages("int8", layout, few) as theirs,
        encoded_pages("int8", layout, few) as ours,
        node("a", kinds=TCP, key=key, links=MEASURED, pages=theirs, op=op) as a,
        node("b", kinds=TCP, key=key, links=MEASURED, pages=ours, op=op) as b,
    ):
        run_until_chosen(a, b, "int8/1")
        run_until_chosen(b, a, "int8/1")
        handoffs = [
            make_handoff(*pair, num_tokens=num_tokens, num_cached=num_tokens)
            for pair in ((a, b), (b, a))
        ]
        for handoff in handoffs:
            handoff.start_receive()
        for handoff in handoffs:
            handoff.wait_until_granted()
        for handoff in handoffs:
            handoff.start_send()
            handoff.compute(num_tokens)
            handoff.prefill_done()
        for each in (a, b):
            assert {type(event) for event in each.wait_for(2)} == {KVLanded, KVSent}
        are_raw = [handoff.receiving.trace.encodings == [] for handoff in handoffs]
        assert any(are_raw) == (2 * num_blocks > num_pages)


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_the_quickest_of_several_encodings_is_chosen(op: TransferOp, key: Credentials) -> None:
    """With codecs that take no time it is the one of fewest bytes; a peer's own set bounds it."""
    layout = make_layout(16)
    with (
        encoded_pages("fp8,int4_token,int8", layout) as theirs,
        encoded_pages("int8,int4_token", layout) as ours,
        encoded_pages("int8", layout) as others,
        node("p", kinds=TCP, key=key, links=MEASURED, pages=theirs) as prefill,
        node("d", kinds=TCP, key=key, links=MEASURED, pages=ours, op=op) as decode,
        node("e", kinds=TCP, key=key, links=MEASURED, pages=others, op=op) as other,
    ):
        fill(prefill)
        handoff = run_until_chosen(prefill, decode, "int4_token/1")
        assert handoff.receiving.trace.encodings == ["handoff=int4_token/1"]
        sent = numbers_of(prefill, handoff, "send")
        assert 0 < np.abs(numbers_of(decode, handoff, "receive") - sent).max() < 0.5
        assert handoff.receiving.trace.num_bytes < 0.3 * NUM_TOKENS * layout.bytes_per_token
        run_until_chosen(prefill, other, "int8/1")


def test_both_settings_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"handoff\.error_budget: set one only"):
        open_handoff_encodings("int8", make_layout(16), 0.1)


@pytest.mark.parametrize("kind", ["int4", "zstd"])
def test_what_does_not_encode_each_token_by_itself_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f'handoff.encoding = "{kind}".*fp8, int8'):
        open_handoff_encodings(kind, make_layout(16))


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_budget_permits_the_same_encodings_to_all_workers_of_a_model(
    block_size: int, num_shards: int
) -> None:
    """As entries are named by them; at the error of `int4_token`, which each layout has its own."""
    shard = TensorParallelShard(0, num_shards)
    layer = LayerLayout.gqa(8, 128)
    layout = KVLayout((layer,) * 2, block_size, "bfloat16", "heads_first", shard)
    names = [each.name for each in open_handoff_encodings("raw", layout, 0.22)]
    assert names == ["int4_token/1", "int8/1"]


def test_views_of_other_layouts_are_never_taken_for_each_other() -> None:
    """As many bytes in a page, and still not the same numbers in it."""
    shard = msgspec.structs.replace
    layout = KVLayout.gqa(2, 4, 8, block_size=16, dtype="bfloat16")
    layouts = [
        layout,
        shard(layout, dtype="float16"),
        KVLayout.gqa(2, 4, 8, block_size=16, dtype="float32"),
        *(shard(layout, shard=type(layout.shard)(rank, 2)) for rank in (0, 1)),
    ]
    found = []
    for each in layouts:
        for kind in ("int8", "fp8"):
            with encoded_pages(kind, each) as pages:
                found.append(pages.views[0].layout)
    assert len({each.page_bytes(0) for each in found}) < len(found)
    assert len({each.arrangement for each in found}) == len(found)
    assert {encoding_of(each) for each in found} == {"int8/1", "fp8/1"}
    assert encoding_of(layout) == "raw"
