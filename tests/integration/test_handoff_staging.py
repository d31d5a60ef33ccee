"""Two real agents, where a worker shows its pages through staging memory."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from baton.auth.credentials import Credentials
from baton.clock import Instant
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, KVSent, SendFailed
from baton.handoff.kv_views import KVView
from baton.kv.copies import BlockTable
from tests.integration.handoff_nodes import (
    CLOCK,
    FIRST,
    NUM_LAYERS,
    ConvertedPages,
    Handoff,
    Node,
    Pages,
    make_handoff,
    make_layout,
    node,
    plain_pages,
    staged_pages,
)
from tests.integration.held_reads import HeldReadsFactory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from baton.handoff.messages import TransferOp

SHARED = ("shared",)
HEADS_FIRST = msgspec.structs.replace(make_layout(16), order="heads_first")
OPS: tuple[TransferOp, ...] = ("WRITE", "READ")


@pytest.fixture(name="key")
def key_fixture() -> Credentials:
    return Credentials.generate()


def pages_of(kind: str, num_staging_pages: int = 12) -> AbstractContextManager[Pages]:
    if kind == "staged":
        return staged_pages(HEADS_FIRST, num_staging_pages)
    return plain_pages(make_layout(24))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kinds", [("staged", "plain"), ("plain", "staged"), ("staged", "staged")])
@pytest.mark.parametrize(("start_blocks", "num_ready"), [(0, 0), (2, 57)])
def test_kv_goes_through_staging_between_two_orders(
    op: TransferOp, kinds: tuple[str, str], start_blocks: int, num_ready: int, key: Credentials
) -> None:
    with (
        pages_of(kinds[0]) as theirs,
        pages_of(kinds[1]) as ours,
        node("p", kinds=SHARED, key=key, pages=theirs) as prefill,
        node("d", kinds=SHARED, key=key, pages=ours, op=op) as decode,
    ):
        for seed in range(3):  # each finds the pages that the one before has left
            prefill.scribble(seed)
            handoff = make_handoff(
                prefill, decode, start_blocks=start_blocks, num_ready=num_ready, seed=seed
            )
            handoff.start_receive()
            handoff.start_send()
            handoff.wait_until_granted()
            handoff.compute(70, 100, 101)
            handoff.prefill_done()
            handoff.check_landed()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kinds", [("staged", "plain"), ("plain", "staged")])
def test_handoffs_wait_their_turn_for_staging_pages(
    op: TransferOp, kinds: tuple[str, str], key: Credentials
) -> None:
    """Three blocks each and four pages: one at a time."""
    with (
        pages_of(kinds[0], 4) as theirs,
        pages_of(kinds[1], 4) as ours,
        node("p", kinds=SHARED, key=key, pages=theirs) as prefill,
        node("d", kinds=SHARED, key=key, pages=ours, op=op) as decode,
    ):
        prefill.scribble(1)
        handoffs = [separate_handoff(prefill, decode, number) for number in range(6)]
        for handoff in handoffs:
            handoff.start_receive()
            handoff.start_send()
            handoff.compute(48)
            handoff.prefill_done()
        landed = decode.wait_for(6)
        assert landed == [KVLanded(handoff.sending.ticket.id, FIRST) for handoff in handoffs]
        assert {type(event) for event in prefill.wait_for(6)} == {KVSent}
        for handoff in handoffs:
            handoff.check_bytes()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kinds", [("staged", "plain"), ("plain", "staged")])
def test_one_that_ends_while_it_waits_leaves_its_place(
    op: TransferOp, kinds: tuple[str, str], key: Credentials
) -> None:
    with (
        pages_of(kinds[0], 4) as theirs,
        pages_of(kinds[1], 4) as ours,
        node("p", kinds=SHARED, key=key, pages=theirs) as prefill,
        node("d", kinds=SHARED, key=key, pages=ours, op=op) as decode,
    ):
        prefill.scribble(1)
        first, second, third = (separate_handoff(prefill, decode, number) for number in range(3))
        soon = Instant(CLOCK.now() + 0.3)
        second.receiving = replace(second.receiving, deadline=soon)
        for handoff in (first, second, third):
            handoff.start_receive()
            handoff.start_send()
        failed, quiescent = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert quiescent == BlocksQuiescent(second.sending.ticket.id)
        prefill.agent.abort(second.sending.ticket.id, "its other half failed")
        assert isinstance(prefill.wait_for()[0], SendFailed)
        for handoff in (first, third):
            handoff.compute(48)
            handoff.prefill_done()
        assert decode.wait_for(2) == [
            KVLanded(handoff.sending.ticket.id, FIRST) for handoff in (first, third)
        ]
        for handoff in (first, third):
            handoff.check_bytes()


@pytest.mark.parametrize("kinds", [("staged", "plain"), ("plain", "staged")])
def test_one_that_could_never_fit_fails_at_once(kinds: tuple[str, str], key: Credentials) -> None:
    with (
        pages_of(kinds[0], 4) as theirs,
        pages_of(kinds[1], 4) as ours,
        node("p", kinds=SHARED, key=key, pages=theirs) as prefill,
        node("d", kinds=SHARED, key=key, pages=ours) as decode,
    ):
        handoff = make_handoff(prefill, decode)
        handoff.start_send()
        handoff.start_receive()
        failed, quiescent = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert quiescent == BlocksQuiescent(handoff.sending.ticket.id)
        assert "needs 7 staging pages where there are 4" in str(failed.error)


def test_the_engines_blocks_are_quiet_before_the_staging_pages_are(key: Credentials) -> None:
    holder = HeldReadsFactory()
    with (
        pages_of("plain") as theirs,
        pages_of("staged", 4) as ours,
        node("p", kinds=SHARED, key=key, pages=theirs) as prefill,
        node("d", kinds=SHARED, key=key, pages=ours, op="READ", wrap=holder) as decode,
    ):
        prefill.scribble(1)
        first, second = (separate_handoff(prefill, decode, number) for number in range(2))
        for handoff in (first, second):
            handoff.start_send()
            handoff.compute(48)
            handoff.prefill_done()
        first.start_receive()
        holder.made[0].wait_until_held(3)
        decode.agent.abort_from_peer(first.sending.ticket.id, "its other half failed")
        assert [type(event) for event in decode.wait_for(2)] == [KVFailed, BlocksQuiescent]
        second.start_receive()
        assert decode.stays_silent()  # a read may still land in the pages that it waits for
        holder.made[0].let_go()
        assert decode.wait_for() == [KVLanded(second.sending.ticket.id, FIRST)]
        second.check_bytes()


def test_an_order_that_starts_inside_a_staged_block_fails(key: Credentials) -> None:
    with (
        pages_of("plain") as theirs,
        pages_of("staged") as ours,
        node("p", kinds=SHARED, key=key, pages=theirs) as prefill,
        node("d", kinds=SHARED, key=key, pages=ours) as decode,
    ):
        handoff = make_handoff(prefill, decode)
        handoff.receiving = replace(handoff.receiving, start=5)
        handoff.start_receive()
        failed = decode.wait_for(2)[0]
        assert isinstance(failed, KVFailed)
        assert "not the first" in str(failed.error)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("arrangement", "is_staged"), [("vec/LBHNC", False), ("amx/LBHNC", True)])
def test_equal_engines_exchange_opaque_pages_and_others_canonical_ones(
    arrangement: str, is_staged: bool, op: TransferOp, key: Credentials
) -> None:
    with (
        two_faced_pages("vec/LBHNC") as theirs,
        two_faced_pages(arrangement) as ours,
        node("p", kinds=SHARED, key=key, pages=theirs) as prefill,
        node("d", kinds=SHARED, key=key, pages=ours, op=op) as decode,
    ):
        prefill.scribble(1)
        handoff = make_handoff(prefill, decode, start_blocks=1, num_ready=30)
        handoff.start_receive()
        handoff.start_send()
        handoff.compute(57, 101)
        handoff.prefill_done()
        handoff.check_landed()
        assert [staging_was_used(pages) for pages in (theirs, ours)] == [is_staged, is_staged]


@pytest.mark.parametrize("op", OPS)
def test_faces_that_match_need_not_be_in_the_same_place(op: TransferOp, key: Credentials) -> None:
    with (
        plain_pages(make_layout(16)) as theirs,
        two_faced_pages("vec/LBHNC") as ours,
        node("p", kinds=SHARED, key=key, pages=theirs) as prefill,
        node("d", kinds=SHARED, key=key, pages=ours, op=op) as decode,
    ):
        prefill.scribble(1)
        handoff = make_handoff(prefill, decode, num_ready=101)
        handoff.start_receive()
        handoff.start_send()
        handoff.prefill_done()
        handoff.check_landed()
        assert staging_was_used(ours)


@pytest.mark.parametrize("op", OPS)
def test_an_opaque_page_is_sent_once(op: TransferOp, key: Credentials) -> None:
    """Of 101 tokens in blocks of 16: 7 pages a layer, however many steps there were."""
    with (
        two_faced_pages("vec/LBHNC") as theirs,
        two_faced_pages("vec/LBHNC") as ours,
        node("p", kinds=SHARED, key=key, pages=theirs) as prefill,
        node("d", kinds=SHARED, key=key, pages=ours, op=op) as decode,
    ):
        prefill.scribble(1)
        handoff = make_handoff(prefill, decode)
        handoff.start_receive()
        handoff.start_send()
        handoff.wait_until_granted()
        handoff.compute(*range(3, 101, 7), 101)
        handoff.prefill_done()
        handoff.check_landed()
        assert handoff.sending.trace.num_pages == 7 * NUM_LAYERS


@contextmanager
def two_faced_pages(arrangement: str) -> Iterator[Pages]:
    """What an engine with pages of its own kind shows: those, and canonical ones by staging."""
    opaque = msgspec.structs.replace(HEADS_FIRST, order="opaque", arrangement=arrangement)
    with plain_pages(HEADS_FIRST) as own, staged_pages(HEADS_FIRST, 12) as staged:
        view = staged.views[0]
        staging = ConvertedPages(HEADS_FIRST, own.own, view.layout, view.region)
        views = (KVView(opaque, own.views[0].region), KVView(view.layout, view.region, staging))
        yield Pages(HEADS_FIRST, own.own, views)


def staging_was_used(pages: Pages) -> bool:
    return any(pages.views[1].region.memory)


def separate_handoff(prefill: Node, decode: Node, number: int) -> Handoff:
    """Three blocks of 16, or two of 24, that no other handoff has."""
    handoff = make_handoff(prefill, decode, num_tokens=48, seed=number)
    num_blocks = -(-48 // decode.layout.block_size)
    own = np.arange(num_blocks, dtype=np.int64) + num_blocks * number
    handoff.receiving = replace(handoff.receiving, blocks=BlockTable(0, own))
    return handoff
