"""Two real agents at two addresses: KV is encoded where both have the same encoding, else raw."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from baton.auth.credentials import Credentials
from baton.encodings.interface import ENCODINGS
from baton.errors import ConfigError
from baton.handoff.encoded_view import (
    LOSSY_TRAIT,
    StagingSize,
    encoding_of,
    make_encoded_view,
    open_handoff_encoding,
)
from baton.handoff.interface import KVFailed, KVLanded, KVSent
from baton.kv.layout import KVLayout
from baton.transfer.region import release_region
from tests.integration.handoff_nodes import (
    FIRST,
    NUM_BLOCKS,
    Node,
    Pages,
    make_handoff,
    make_layout,
    node,
    plain_pages,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.handoff.messages import TransferOp
    from baton.testing.network_namespaces import FarHost
    from tests.integration.handoff_nodes import Handoff

TCP = ("tcp",)
NUM_TOKENS = 101
SIZE = StagingSize(1 << 20, 400)
LATENT = KVLayout.mla(3, 24, block_size=16, dtype="float32")
HEADS_FIRST = msgspec.structs.replace(make_layout(16), order="heads_first")


@dataclass(frozen=True)
class Two:
    """Addresses of two hosts, as far as agents can know: both are this machine's."""

    prefill: str
    decode: str = "127.0.0.1"


@pytest.fixture(name="hosts")
def hosts_fixture(far_cable: FarHost) -> Two:
    return Two(far_cable.near_address)


@pytest.fixture(name="key")
def key_fixture() -> Credentials:
    return Credentials.generate()


@contextmanager
def encoded_pages(kind: str, layout: KVLayout, size: StagingSize = SIZE) -> Iterator[Pages]:
    """Pages that peers reach themselves, and encoded ones before them."""
    with plain_pages(layout) as plain:
        encoding = open_handoff_encoding(kind, layout)
        if encoding is None:
            yield plain
            return
        view = make_encoded_view(plain.views[0], encoding, size)
        try:
            yield replace(plain, views=(view, *plain.views))
        finally:
            release_region(view.region)


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


def numbers_of(node_: Node, handoff: Handoff, side: str) -> np.ndarray:
    order = handoff.sending if side == "send" else handoff.receiving
    start, stop = handoff.receiving.start, handoff.receiving.num_tokens
    layers = range(node_.layout.num_layers)
    data = b"".join(node_.canonical(order.blocks, layer, start, stop) for layer in layers)
    return np.frombuffer(data, np.float32)


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("layout", [make_layout(16), HEADS_FIRST, LATENT])
def test_kv_is_encoded_between_two_addresses(
    op: TransferOp, kind: str, layout: KVLayout, hosts: Two, key: Credentials
) -> None:
    with (
        encoded_pages(kind, layout) as theirs,
        encoded_pages(kind, layout) as ours,
        node("p", kinds=TCP, key=key, pages=theirs, host=hosts.prefill) as prefill,
        node("d", kinds=TCP, key=key, pages=ours, host=hosts.decode, op=op) as decode,
    ):
        fill(prefill)
        for start_blocks in (0, 2):
            before = [pages.copy() for pages in decode.pages.own]
            handoff = make_handoff(prefill, decode, start_blocks=start_blocks)
            run(handoff)
            name = ENCODINGS.build(kind, {}).name
            for order in (handoff.sending, handoff.receiving):
                assert order.trace.encodings == [f"handoff={name}"]
            received = numbers_of(decode, handoff, "receive")
            sent = numbers_of(prefill, handoff, "send")
            assert 0 < np.abs(received - sent).max() < (0.02 if kind == "int8" else 0.3)
            num_tokens = NUM_TOKENS - handoff.receiving.start
            assert handoff.receiving.trace.num_bytes < 0.4 * num_tokens * layout.bytes_per_token
            others = np.setdiff1d(np.arange(NUM_BLOCKS), handoff.receiving.blocks.blocks)
            for own, old in zip(decode.pages.own, before, strict=True):
                assert np.array_equal(own[others], old[others])


@pytest.mark.parametrize(
    ("kinds", "block_sizes"),
    [(("int8", "raw"), (16, 16)), (("raw", "int8"), (16, 16)), (("int8", "fp8"), (16, 16)),
     (("int8", "int8"), (16, 24))],
)  # fmt: skip
def test_a_peer_without_the_same_encoding_gets_raw_kv(
    kinds: tuple[str, str], block_sizes: tuple[int, int], hosts: Two, key: Credentials
) -> None:
    with (
        encoded_pages(kinds[0], make_layout(block_sizes[0])) as theirs,
        encoded_pages(kinds[1], make_layout(block_sizes[1])) as ours,
        node("p", kinds=TCP, key=key, pages=theirs, host=hosts.prefill) as prefill,
        node("d", kinds=TCP, key=key, pages=ours, host=hosts.decode) as decode,
    ):
        fill(prefill)
        handoff = make_handoff(prefill, decode)
        run(handoff)
        handoff.check_bytes()
        assert handoff.receiving.trace.encodings == handoff.sending.trace.encodings == []


@pytest.mark.parametrize("transports", [("shared", "tcp"), TCP])
def test_a_peer_on_this_host_gets_raw_kv(transports: tuple[str, ...], key: Credentials) -> None:
    with (
        encoded_pages("int8", make_layout(16)) as theirs,
        encoded_pages("int8", make_layout(16)) as ours,
        node("p", kinds=transports, key=key, pages=theirs) as prefill,
        node("d", kinds=transports, key=key, pages=ours) as decode,
    ):
        fill(prefill)
        handoff = make_handoff(prefill, decode)
        run(handoff)
        handoff.check_bytes()
        assert handoff.receiving.trace.encodings == []


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


def test_a_prompt_that_exceeds_the_encoded_pages_fails_at_once(
    hosts: Two, key: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    layout = make_layout(16)
    few = StagingSize(8 << 10, 400)
    with (
        encoded_pages("int8", layout, few) as theirs,
        encoded_pages("int8", layout, few) as ours,
        node("p", kinds=TCP, key=key, pages=theirs, host=hosts.prefill) as prefill,
        node("d", kinds=TCP, key=key, pages=ours, host=hosts.decode) as decode,
    ):
        assert "handoff.staging_bytes: 8192 holds" in caplog.text
        handoff = make_handoff(prefill, decode)
        handoff.start_receive()
        handoff.start_send()
        failed = decode.wait_for()[0]
        assert isinstance(failed, KVFailed)
        assert "staging pages" in str(failed.error)


@pytest.mark.parametrize("kind", ["int4", "zstd"])
def test_what_does_not_encode_each_token_by_itself_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f'handoff.encoding = "{kind}".*fp8, int8'):
        open_handoff_encoding(kind, make_layout(16))


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
    assert encoding_of(layout) is None
