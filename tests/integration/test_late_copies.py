"""Two handoff agents whose pages a device copies: each copy is held back until the test ends it."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from baton.auth.credentials import Credentials
from baton.errors import TransferError
from baton.handoff.interface import BlocksQuiescent, KVLanded, KVSent, SendFailed
from baton.telemetry.trace import Stamp
from tests.integration.handoff_nodes import (
    CLOCK,
    FIRST,
    ConvertedPages,
    Handoff,
    Node,
    Pages,
    make_handoff,
    node,
    staged_pages,
)
from tests.integration.test_handoff_staging import HEADS_FIRST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from baton.handoff.messages import TransferOp


@dataclass
class Position:
    """A `StreamPosition` that the device gets to when the test wants it."""

    is_reached: bool = True
    error: TransferError | None = None

    def is_done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_reached

    def wait(self) -> None:
        raise AssertionError("the agent waits for the device")


REACHED = Position()


@dataclass
class HeldCopy:
    """The position behind a copy: its pages move when it ends."""

    move: Callable[[], None]
    has_moved: bool = False
    error: TransferError | None = None

    def is_done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.has_moved

    def wait(self) -> None:
        raise AssertionError("the agent waits for a copy")


@dataclass
class Device:
    """A `Staging` around another one: what it is asked for waits for `end`."""

    staging: ConvertedPages
    begun: deque[HeldCopy] = field(default_factory=deque)
    positions: list[object] = field(default_factory=list)

    def gather(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        staged: NDArray[np.int64],
        after: object = None,
    ) -> HeldCopy:
        return self._begin(partial(self.staging.gather, layer, blocks, staged), after)

    def scatter(
        self,
        layer: int,
        staged: NDArray[np.int64],
        blocks: NDArray[np.int64],
        after: object = None,
    ) -> HeldCopy:
        return self._begin(partial(self.staging.scatter, layer, staged, blocks), after)

    def _begin(self, move: Callable[[], None], after: object) -> HeldCopy:
        copy = HeldCopy(move)
        self.positions.append(after)
        self.begun.append(copy)
        return copy

    def wait_for(self, num_copies: int) -> None:
        deadline = CLOCK.now() + 20.0
        while len(self.begun) < num_copies:
            assert CLOCK.now() < deadline, f"{len(self.begun)} copies were begun"
            threading.Event().wait(0.005)

    def end(self, num_copies: int) -> None:
        """As many end, in their order, as soon as they are begun."""
        for _ in range(num_copies):
            self.wait_for(1)
            copy = self.begun.popleft()
            copy.move()
            copy.has_moved = True


@contextmanager
def device_pages(num_staging_pages: int = 16) -> Iterator[tuple[Pages, Device]]:
    with staged_pages(HEADS_FIRST, num_staging_pages) as pages:
        (view,) = pages.views
        assert isinstance(view.staging, ConvertedPages)
        device = Device(view.staging)
        yield replace(pages, views=(replace(view, staging=device),)), device


@dataclass
class Pair:
    prefill: Node
    decode: Node
    sender: Device
    receiver: Device

    def begin(self, num_tokens: int = 101) -> Handoff:
        handoff = make_handoff(self.prefill, self.decode, num_tokens=num_tokens)
        handoff.receiving = replace(handoff.receiving, after=REACHED)
        handoff.start_receive()
        handoff.start_send()
        handoff.wait_until_granted()
        return handoff

    def compute(self, handoff: Handoff, *positions: Position) -> None:
        """Report all layers: the first ones at `positions`, the others where the device is."""
        ticket, stop = handoff.sending.ticket.id, handoff.sending.num_tokens
        for layer in range(HEADS_FIRST.num_layers):
            position = positions[layer] if layer < len(positions) else REACHED
            self.prefill.agent.layer_ready([(ticket, stop)], layer, position)


@contextmanager
def pair(op: TransferOp = "WRITE") -> Iterator[Pair]:
    key = Credentials.generate()
    with (
        device_pages() as (sent, sender),
        device_pages() as (received, receiver),
        node("p", kinds=("tcp",), key=key, pages=sent, op=op) as prefill,
        node("d", kinds=("tcp",), key=key, pages=received, op=op) as decode,
    ):
        prefill.scribble(3)
        yield Pair(prefill, decode, sender, receiver)


NUM_LAYERS = HEADS_FIRST.num_layers


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_pages_leave_and_land_when_their_copies_have_ended(op: TransferOp) -> None:
    with pair(op) as pages:
        handoff = pages.begin()
        pages.compute(handoff)
        handoff.prefill_done()
        pages.sender.wait_for(NUM_LAYERS)
        assert pages.decode.stays_silent(0.1)
        assert not handoff.sending.trace.num_bytes  # nothing was sent yet
        assert handoff.sending.trace.layers_ready == [0.0] * NUM_LAYERS  # it was launched only
        begun_at = CLOCK.now()
        pages.sender.end(NUM_LAYERS)
        pages.receiver.wait_for(NUM_LAYERS)
        assert pages.decode.stays_silent(0.1)
        pages.receiver.end(NUM_LAYERS)
        handoff.check_landed()
        assert set(map(id, pages.sender.positions + pages.receiver.positions)) == {id(REACHED)}
        ready, landed = handoff.sending.trace.layers_ready, handoff.receiving.trace.layers_landed
        assert len(ready) == len(landed) == NUM_LAYERS
        assert all(begun_at <= a <= b for a, b in zip(ready, landed, strict=True))


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = CLOCK.now() + 20.0
    while not happened():
        assert CLOCK.now() < deadline
        threading.Event().wait(0.005)


def test_other_handoffs_go_on_while_a_copy_is_held_back() -> None:
    """The agent's thread waits for none."""
    with pair() as pages:
        held = pages.begin(37)
        pages.compute(held)
        pages.sender.wait_for(NUM_LAYERS)
        declined = make_handoff(pages.prefill, pages.decode, num_tokens=37, seed=7)
        declined.start_send()
        pages.decode.agent.decline(declined.receiving.ticket, "it is cached here")
        (failed,) = pages.prefill.wait_for()
        assert isinstance(failed, SendFailed)
        held.prefill_done()
        pages.sender.end(NUM_LAYERS)
        pages.receiver.end(NUM_LAYERS)
        assert pages.decode.wait_for() == [KVLanded(held.sending.ticket.id, FIRST)]
        assert pages.prefill.wait_for() == [KVSent(held.sending.ticket.id)]
        held.check_bytes()


def test_pages_under_a_copy_are_not_given_back() -> None:
    with pair() as pages:
        handoff = pages.begin()
        ticket = handoff.sending.ticket.id
        pages.compute(handoff)
        pages.sender.end(1)
        pages.receiver.wait_for(1)
        pages.decode.agent.abort(ticket, "the client left")
        assert pages.decode.stays_silent()
        assert pages.prefill.stays_silent(0.1)
        (staging,) = (view.staging_pool for view in pages.decode.agent.loop._views)
        assert staging is not None
        assert staging.num_free < 16
        pages.receiver.end(len(pages.receiver.begun))
        assert pages.decode.wait_for() == [BlocksQuiescent(ticket)]
        pages.sender.end(NUM_LAYERS - 1)
        (failed,) = pages.prefill.wait_for()
        assert isinstance(failed, SendFailed)
        deadline = CLOCK.now() + 20.0
        while staging.num_free < 16:
            assert CLOCK.now() < deadline, "staging pages are kept"
            threading.Event().wait(0.005)


def test_a_copy_that_the_device_fails_ends_its_handoff_alone() -> None:
    with pair() as pages:
        handoff = pages.begin(37)
        pages.compute(handoff)
        pages.sender.wait_for(NUM_LAYERS)
        for copy in pages.sender.begun:
            copy.error = TransferError("an illegal address")
        pages.sender.begun.clear()
        (failed,) = pages.prefill.wait_for()
        assert isinstance(failed, SendFailed)
        assert "an illegal address" in str(failed.error)
        pages.decode.wait_for(2)
        again = pages.begin(37)
        pages.compute(again)
        again.prefill_done()
        pages.sender.end(NUM_LAYERS)
        pages.receiver.end(NUM_LAYERS)
        again.check_landed()


def test_prefill_is_done_when_the_device_has_computed_it() -> None:
    with pair() as pages:
        handoff = pages.begin()
        first, last = Position(is_reached=False), Position(is_reached=False)
        pages.compute(handoff, *[first] * (NUM_LAYERS - 1), last)
        handoff.prefill_done()
        pages.sender.wait_for(NUM_LAYERS)  # behind positions that the device has yet to get to
        assert pages.decode.stays_silent(0.1)
        stamps = handoff.sending.trace.stamps
        assert not stamps.keys() & {Stamp.FIRST_LAYER_READY, Stamp.PREFILL_DONE}
        begun_at = CLOCK.now()
        first.is_reached = True
        wait_for(lambda: Stamp.FIRST_LAYER_READY in stamps)
        assert Stamp.PREFILL_DONE not in stamps
        last.is_reached = True
        pages.sender.end(NUM_LAYERS)
        pages.receiver.end(NUM_LAYERS)
        handoff.check_landed()
        known = handoff.receiving.trace.peer_stamps
        assert begun_at <= known[Stamp.FIRST_LAYER_READY] <= known[Stamp.PREFILL_DONE]


def test_a_position_that_the_device_fails_is_not_awaited() -> None:
    with pair() as pages:
        handoff = pages.begin(37)
        pages.compute(handoff, *[Position(error=TransferError("a lost device"))] * NUM_LAYERS)
        handoff.prefill_done()
        pages.sender.end(NUM_LAYERS)  # the copies go on, which a real device would not
        pages.receiver.end(NUM_LAYERS)
        handoff.check_landed()
        assert Stamp.PREFILL_DONE not in handoff.sending.trace.stamps
