"""Prefill's half of one handoff."""

from __future__ import annotations

import math
from enum import StrEnum
from operator import gt
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import HandoffError, ProtocolError
from baton.handoff.interface import KVSent, SendFailed
from baton.handoff.messages import MAX_REASON_CHARS, Failed, TransportFailed
from baton.handoff.session.actions import (
    AnnounceReadable,
    Emit,
    ExportBlocks,
    GatherPages,
    SendAction,
    SendFinished,
    SendMessage,
    WriteLayers,
    extend,
)
from baton.handoff.session.lease import LAPSED_REASON, LEASE_STAGE, Lease
from baton.handoff.token_ranges import LayerTokenRange, intersect, subtract, unpack_ranges
from baton.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.clock import Instant
    from baton.handoff.interface import SampledToken, SendOrder
    from baton.handoff.messages import FallbackToWrite, Grant, RetransmitRequest
    from baton.handoff.session.actions import TransferHandle
    from baton.ids import TicketId


class SendPhase(StrEnum):
    """Where a handoff stands on the prefill worker."""

    OFFERED = "offered"
    SENDING = "sending"
    DRAINING = "draining"
    ENDING = "ending"
    ENDED = "ended"


_CLOSED: Final = frozenset({SendPhase.ENDING, SendPhase.ENDED})
_MOVING: Final = frozenset({SendPhase.SENDING, SendPhase.DRAINING})


class LayersWritten(Record, frozen=True):
    """Tokens `[start, stop)` of some layers, which one write carries."""

    layers: range
    start: int
    stop: int


class CarriedWrites:
    """A session's writes by the transport that carries them, and the transports that failed it.

    `excluded` are those that failed: whatever becomes of them, the session is done with them. One
    that carried something is *draining* while writes over it are under way, then *requested* until
    the peer has reported what is missing of what it carried.
    """

    def __init__(self) -> None:
        self.excluded: set[str] = set()
        self._under_way: set[TransferHandle] = set()
        self._carried: dict[str, list[LayersWritten]] = {}
        self._draining: set[str] = set()
        self._requested: set[str] = set()

    @property
    def are_under_way(self) -> bool:
        """Whether a write holds its source pages."""
        return bool(self._under_way)

    def submitted(self, handle: TransferHandle, written: LayersWritten) -> None:
        """A transport carries these."""
        self._under_way.add(handle)
        self._carried.setdefault(handle.transport, []).append(written)

    def ended(self, handle: TransferHandle) -> None:
        """A write is done with its source pages, or failed."""
        self._under_way.discard(handle)

    def exclude(self, transport: str) -> None:
        """A transport failed."""
        self.excluded.add(transport)
        if transport in self._carried:
            self._draining.add(transport)

    def take_drained(self, transport: str) -> bool:
        """Whether a failed transport has no write under way any more: true once."""
        if transport not in self._draining:
            return False
        if any(handle.transport == transport for handle in self._under_way):
            return False
        self._draining.discard(transport)
        self._requested.add(transport)
        return True

    def take_reported(self, transport: str) -> list[LayerTokenRange]:
        """The peer reports what is missing: what a drained transport carried; nothing but once."""
        if transport not in self._requested:
            return []
        self._requested.discard(transport)
        return [
            LayerTokenRange(layer, written.start, written.stop)
            for written in self._carried.pop(transport)
            for layer in written.layers
        ]

    def check_invariants(self) -> None:
        """Raise AssertionError where the books disagree."""
        failed = self._draining | self._requested
        if self._draining & self._requested or not failed <= self.excluded:
            raise AssertionError("a transport is left that did not fail")


class SendSession:  # noqa: PLR0904 -- a method for each event (ADR 0005)
    """Prefill's half of one handoff. `start` of what is sent comes with the grant.

    What is missing of what a failed transport carried is sent again: see `CarriedWrites`. `lease`
    bounds how long it waits for the peer once all is computed.

    Of a layer, in tokens: computed up to `_ready`; where pages are gathered, that was asked for up
    to `_asked` (`GatherPages`), and is done up to `_gathered`; given to transports up to `_sent`. A
    page is gathered once, so that it does not change under a write.
    """

    def __init__(
        self, order: SendOrder, *, num_layers: int, deadline: Instant, lease_s: float = math.inf
    ) -> None:
        self.order = order
        self.ticket: TicketId = order.ticket.id
        self.deadline = deadline
        self.lease = Lease(lease_s)
        self.phase = SendPhase.OFFERED
        self.grant: Grant | None = None
        # Lists: for so few numbers numpy's calls cost more than what they do.
        self._ready = [order.num_ready_tokens] * num_layers
        self._asked = [0] * num_layers
        self._gathered = [0] * num_layers
        self._sent = [0] * num_layers
        self._num_sent_ranges = 0
        self._is_gathered = False
        self._num_gathering = 0
        self._writes = CarriedWrites()
        self._to_retransmit: list[LayerTokenRange] = []
        self._is_acked = False
        self._page_tokens = 1
        self._finish: SendFinished | None = None
        self._finish_rides_on: str | None = None
        self._error: HandoffError | None = None

    @property
    def excluded(self) -> set[str]:
        """Transports that failed it: nothing is sent over them any more."""
        return self._writes.excluded

    @property
    def ready_tokens(self) -> Sequence[int]:
        """Of each layer, how many of the first tokens are computed."""
        return self._ready

    @property
    def is_written(self) -> bool:
        """Whether this side writes, as it was asked to."""
        return self.grant is not None and self.grant.op == "WRITE"

    @property
    def is_exported(self) -> bool:
        """Whether nothing is copied: the peer attends over this side's blocks in place."""
        return self.grant is not None and self.grant.op == "NONE"

    @property
    def over(self) -> bool:
        """Whether nothing can happen any more."""
        return self.phase is SendPhase.ENDED

    def granted(self, grant: Grant) -> list[SendAction]:
        """The decode worker asks for KV: `begin` follows, once the way is clear."""
        if self.phase is not SendPhase.OFFERED or self.grant is not None:
            return []
        if grant.prompt_hash != self.order.prompt_hash or grant.num_tokens != self.order.num_tokens:
            return self.fail(
                f"the two workers see different prompts: {self.order.num_tokens} tokens here, "
                f"{grant.num_tokens} there, or another model, LoRA adapter or tenant",
                stage="grant",
            )
        self.grant = grant
        self._sent = [grant.start] * len(self._sent)
        self._asked = self._sent.copy()
        return []

    def begin(self, page_tokens: int, *, is_gathered: bool = False) -> list[SendAction]:
        """Transport and staging are there: send what is ready already.

        KV moves in multiples of `page_tokens`, as they lie in the sequence, and at last the rest.
        With `is_gathered`, what is ready is not in the view's pages before `GatherPages` is done.
        """
        if self.phase is not SendPhase.OFFERED or self.grant is None:
            return []
        self._page_tokens, self._is_gathered = page_tokens, is_gathered
        self.phase = SendPhase.SENDING
        advance = self._gather_ready if is_gathered else self._submit_ready
        return advance(range(len(self._ready)))

    def layers_ready(self, layers: Sequence[int], stop: int) -> list[SendAction]:
        """KV of tokens `[0, stop)` of these layers is in place."""
        ready = self._ready
        for layer in layers:
            ready[layer] = max(ready[layer], stop)
        if self.phase is not SendPhase.SENDING:
            return []
        advance = self._gather_ready if self._is_gathered else self._submit_ready
        return advance(layers)

    def gathering(self) -> None:
        """A `GatherPages`, or a part of it, has begun."""
        self._num_gathering += 1

    def gathered(self, layers: Sequence[int], stop: int) -> list[SendAction]:
        """It is done: tokens of these layers up to `stop` are in the view's pages.

        Or it failed: then `fail` came before.
        """
        self._num_gathering -= 1
        for layer in layers:
            self._gathered[layer] = stop
        if self.phase is not SendPhase.SENDING:
            return self._settle()
        return self._submit_ready(layers)

    def resume(self) -> list[SendAction]:
        """There is a route again: submit what could not be."""
        if self.phase not in _MOVING:
            return []
        again = _join(WriteLayers, self._to_retransmit)
        if self.phase is SendPhase.SENDING:
            again += self._submit_ready(range(len(self._ready)))
        return again

    def finish(self, first_token: SampledToken | None) -> list[SendAction]:
        """The engine is done with this prompt."""
        self._finish = SendFinished(first_token)
        return self._drain() if self.phase is SendPhase.SENDING else []

    def ends_with(self, write: WriteLayers) -> SendFinished | None:
        """What may ride on a write, if that is the last one: then no `Finished` follows."""
        if self.phase is not SendPhase.SENDING or self._finish is None or self.excluded:
            return None
        sent, num_tokens = self._sent, self.order.num_tokens
        others = sent[: write.layer] + sent[write.layer + write.num_layers :]
        return self._finish if min(others, default=write.stop) >= num_tokens <= write.stop else None

    def submitted(
        self, handle: TransferHandle, written: LayersWritten, *, is_last: bool = False
    ) -> list[SendAction]:
        """A `WriteLayers`, or a part of it, was handed to a transport.

        `is_last`: Finished rides on it (`ends_with`).
        """
        if is_last:
            self._finish_rides_on = handle.transport
        self._writes.submitted(handle, written)
        self._num_sent_ranges += len(written.layers)
        sent, start, stop = self._sent, written.start, written.stop
        for layer in written.layers:
            if start < sent[layer]:
                again = LayerTokenRange(layer, start, stop)
                self._to_retransmit = subtract(self._to_retransmit, again)
            else:
                sent[layer] = stop
        return self._drain()

    def announced(self, layers: range, stop: int) -> list[SendAction]:
        """An `AnnounceReadable`, or its part up to `stop` of these layers, was sent."""
        self._sent[layers.start : layers.stop] = [stop] * len(layers)
        self._num_sent_ranges += len(layers)
        return self._drain()

    def acked(self) -> list[SendAction]:
        """The peer has all that it asked for, and verified it."""
        if self.phase is not SendPhase.DRAINING:
            return self.fail("the peer took what was not all sent to it", stage=str(self.phase))
        self._is_acked = True
        return self._settle()

    def ended(self, handle: TransferHandle) -> list[SendAction]:
        """A write is done with its source pages, or failed: then `reroute` or `fail` came before.

        In either case nothing of it will be stored by this side any more.
        """
        self._writes.ended(handle)
        return [*self._try_report_failure(handle.transport), *self._settle()]

    def fail_over(self, transport: str) -> list[SendAction]:
        """A transport failed, and there is another: what it may have lost is sent again.

        Not at once: first its writes must have ended and its end at the peer be closed. The peer
        then reports what has not landed (`retransmit`): nothing lands twice.
        """
        if self.phase not in _MOVING or self._is_read or transport in self.excluded:
            return []
        self._writes.exclude(transport)
        actions = self._try_report_failure(transport)
        if transport == self._finish_rides_on and self._finish is not None:
            self._finish_rides_on = None  # it may be lost: once more, over the link
            return [self._finish, *actions]
        return actions

    def retransmit(self, message: RetransmitRequest) -> list[SendAction]:
        """The peer has fenced a transport that failed, and reports what it lacks.

        Raises:
            ProtocolError: its ranges are invalid.
        """
        token_ranges = self._unpack_missing(message.ranges)
        if self.phase not in _MOVING:
            return []
        carried = self._writes.take_reported(message.transport)
        return self._retransmit(token_ranges, carried) if carried else []

    def fall_back_to_write(self, message: FallbackToWrite) -> list[SendAction]:
        """The peer can read no more: from now on this side writes, into the pages that it names.

        Raises:
            ProtocolError: its ranges are invalid, or the blocks are being exported to it.
        """
        token_ranges = self._unpack_missing(message.ranges)
        if self.phase in _CLOSED or self.grant is None or self.is_written:
            return []
        if self.is_exported and self.phase is not SendPhase.OFFERED:
            raise ProtocolError("the peer asks for writes of blocks that are being exported to it")
        self.grant = msgspec.structs.replace(
            self.grant, op="WRITE", first_block=message.first_block, blocks=message.blocks
        )
        self.excluded.update(message.transports)
        start = self.grant.start
        announced = [LayerTokenRange(n, start, stop) for n, stop in enumerate(self._sent)]
        return self._retransmit(token_ranges, [each for each in announced if each.stop > start])

    def fail(self, reason: str, *, stage: str) -> list[SendAction]:
        """End early and send Failed to the peer."""
        if self.phase in _CLOSED:
            return []
        failed = Failed(self.ticket, reason[:MAX_REASON_CHARS])
        return [SendMessage(failed), *self.peer_failed(reason, stage=stage)]

    def peer_failed(self, reason: str, *, stage: str) -> list[SendAction]:
        """End early because the peer sent Failed, or is gone."""
        if self.phase in _CLOSED:
            return []
        self.phase = SendPhase.ENDING
        self._error = HandoffError(reason, stage=stage, peer=self.order.ticket.decode.worker)
        return self._settle()

    def wait_until(self, instant: Instant) -> None:
        """There is a reason to wait for longer: for as long as the request may take, at most."""
        self.deadline = extend(self.deadline, instant, self.order.deadline)

    def renew(self, now: Instant) -> bool:
        """The peer wants it still; whether it is there for it."""
        return self.phase not in _CLOSED and self.lease.renew(now)

    def expire(self, now: Instant) -> list[SendAction]:
        """Fail if the deadline has passed, or the lease was not renewed."""
        if self.lease.is_over(now):
            return self.fail(LAPSED_REASON, stage=LEASE_STAGE)
        if now < self.deadline:
            return []
        what = "still sending"
        if self.grant is None:
            what = "no grant came from the decode worker"
        elif self.phase is SendPhase.OFFERED:
            what = "it waited for staging pages, or for a transport"
        return self.fail(f"the deadline passed: {what}", stage=str(self.phase))

    def _gather_ready(self, layers: Sequence[int]) -> list[SendAction]:
        """What was computed first comes into the view's pages."""
        due = self._find_due(layers, self._asked, self._ready)
        for layer, _, stop in due:
            self._asked[layer] = stop
        return _join(GatherPages, due) or self._drain()

    def _submit_ready(self, layers: Sequence[int]) -> list[SendAction]:
        if self.grant is None or self.grant.op == "NONE":
            return self._drain()
        send = AnnounceReadable if self.grant.op == "READ" else WriteLayers
        placed = self._gathered if self._is_gathered else self._ready
        return _join(send, self._find_due(layers, self._sent, placed)) or self._drain()

    def _find_due(
        self, layers: Sequence[int], done: Sequence[int], ready: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """`(layer, start, stop)` of the tokens between the two, whole pages or up to the end."""
        due: list[tuple[int, int, int]] = []
        for layer in layers:
            start, stop = done[layer], ready[layer]
            if stop < self.order.num_tokens:  # a page is sent once: when it is full, or the last
                stop -= stop % self._page_tokens
            if stop > start:
                due.append((layer, start, stop))
        return due

    @property
    def _is_read(self) -> bool:
        """Whether the peer reads: then the source pages are held until it sends `TransferAck`."""
        return self.grant is not None and self.grant.op == "READ"

    def _drain(self) -> list[SendAction]:
        """Once all is submitted and the token is known, send Finished."""
        if self.phase is not SendPhase.SENDING or self._finish is None:
            return []
        if self.is_exported:
            return self._export(self._finish)
        if min(self._sent) < self.order.num_tokens:
            return []
        self.phase = SendPhase.DRAINING
        finished = [] if self._finish_rides_on is not None else [self._finish]
        return [*finished, *self._settle()]

    def _export(self, finish: SendFinished) -> list[SendAction]:
        """Export once all is in place. `ExportTable` tracks the exported blocks from then on."""
        if self.grant is None or min(self._ready) < self.order.num_tokens:
            return []
        self.phase = SendPhase.ENDED
        return [ExportBlocks(self.grant.start, finish.first_token)]

    def _unpack_missing(self, packed: bytes) -> list[LayerTokenRange]:
        """What the peer lacks.

        Of each layer that is at most one range more than were sent. A peer that names others would
        have this side make a write for each, all in one step.

        Raises:
            ProtocolError: the ranges are invalid, or too many.
        """
        missing = unpack_ranges(packed)
        if len(missing) > len(self._sent) + self._num_sent_ranges:
            raise ProtocolError(
                f"{len(missing)} ranges are missing of {self._num_sent_ranges} that were sent"
            )
        return missing

    def _retransmit(
        self, missing: list[LayerTokenRange], sent: list[LayerTokenRange]
    ) -> list[SendAction]:
        """Send again what was sent and is missing."""
        to_retransmit = intersect(missing, sent)
        self._to_retransmit += to_retransmit
        return _join(WriteLayers, to_retransmit) or self._settle()

    def _try_report_failure(self, transport: str) -> list[SendAction]:
        """Once no write is under way over it: the peer may close its end."""
        if self.phase not in _MOVING or not self._writes.take_drained(transport):
            return []
        return [SendMessage(TransportFailed(self.ticket, transport))]

    def _settle(self) -> list[SendAction]:
        """End, once no copy or write holds the source pages, and the peer needs them no more."""
        is_settled = self.phase is SendPhase.ENDING or (not self.over and self._is_acked)
        if not is_settled or self._num_gathering or self._writes.are_under_way:
            return []
        return self._over()

    def check_invariants(self) -> None:
        """Raise AssertionError where the books of what was sent disagree."""
        if any(stop > self._sent[layer] for layer, _, stop in self._to_retransmit):
            raise AssertionError("it is to be sent again, and was never sent")
        self._writes.check_invariants()
        if self.over and (self._writes.are_under_way or self._num_gathering):
            raise AssertionError("it is over, and a write or a copy holds its source pages")
        if self._is_gathered and any(map(gt, self._sent, self._asked)):
            raise AssertionError("pages were sent that were not gathered")

    def _over(self) -> list[SendAction]:
        self.phase = SendPhase.ENDED
        if self._error is not None:
            return [Emit(SendFailed(self.ticket, self._error))]
        return [Emit(KVSent(self.ticket))]


def _join(
    send: type[GatherPages | WriteLayers | AnnounceReadable],
    token_ranges: Iterable[tuple[int, int, int]],
) -> list[SendAction]:
    """An action for each run of layers that follow each other with the same tokens."""
    runs: list[list[int]] = []
    for layer, start, stop in token_ranges:
        if runs and runs[-1] == [layer - runs[-1][3], start, stop, runs[-1][3]]:
            runs[-1][3] += 1
        else:
            runs.append([layer, start, stop, 1])
    return [send(*run) for run in runs]
