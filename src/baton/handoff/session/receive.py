"""Decode's half of one handoff."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, assert_never

import msgspec
import numpy as np

from baton.encodings.interface import RAW
from baton.errors import HandoffError, ProtocolError
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded
from baton.handoff.messages import (
    MAX_REASON_CHARS,
    Declined,
    ExcludeTransport,
    Failed,
    FallbackToWrite,
    Grant,
    RetransmitRequest,
    pack_blocks,
)
from baton.handoff.session.actions import (
    CloseWriteGrant,
    Emit,
    Fence,
    ImportBlocks,
    OpenWriteGrant,
    ReadPages,
    ReceiveAction,
    SendMessage,
    SendTransferAck,
    extend,
)
from baton.handoff.session.lease import LEASE_STAGE, LeaseHolder
from baton.handoff.token_ranges import Coverage, pack_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.clock import Instant
    from baton.handoff.interface import ReceiveOrder
    from baton.handoff.messages import (
        Available,
        BlocksExported,
        Finished,
        Notification,
        TransportFailed,
    )
    from baton.handoff.session.actions import TransferHandle, TransferPlan
    from baton.ids import TicketId

MAX_NOTE_CHARS: Final = 500
_NO_BLOCKS: Final = np.empty(0, dtype=np.int64)


class ReceivePhase(StrEnum):
    """Where a handoff stands on the decode worker."""

    WAITING = "waiting"
    GRANTED = "granted"
    LANDED = "landed"
    ENDING = "ending"
    ENDED = "ended"


_CLOSED: Final = frozenset({ReceivePhase.LANDED, ReceivePhase.ENDING, ReceivePhase.ENDED})


class ReceiveSession:  # noqa: PLR0904 -- a method for each event (ADR 0005)
    """Decode's half of one handoff. `plan` are None while it waits for them."""

    def __init__(
        self, order: ReceiveOrder, *, sealed_ticket: str, num_layers: int, deadline: Instant
    ) -> None:
        self.order = order
        self.ticket: TicketId = order.ticket.id
        self.deadline = deadline
        self.phase = ReceivePhase.WAITING
        self.plan: TransferPlan | None = None
        self.lease_holder = LeaseHolder()
        self.coverage = self._make_coverage(num_layers)
        self._requested: Coverage | None = None
        self._sealed_ticket = sealed_ticket
        self.num_layers = num_layers
        self._finished: Finished | None = None
        # What may land in the pages: the peer's writes, under a write grant, or our own reads.
        self._grant_is_open = False
        self._reads: set[TransferHandle] = set()
        self._num_scattering = 0
        self._has_blocks = True  # until `BlocksQuiescent`, after a failure
        self._fencing: set[str] = set()
        self._fenced: set[str] = set()
        self._excluded: set[str] = set()
        self._fell_back = False
        self._is_encoding_refused = False
        self._is_exported = self._has_landed = False
        self._imported: tuple[int, ...] = ()

    @property
    def over(self) -> bool:
        """Whether nothing can happen any more."""
        return self.phase is ReceivePhase.ENDED

    @property
    def may_hold_export(self) -> bool:
        """Whether the peer may have exported blocks that were not imported: release them."""
        asked = self.plan is not None and self.plan.op == "NONE"
        return asked and not self._has_landed

    def begin(self, plan: TransferPlan) -> list[ReceiveAction]:
        """The peer is connected: ask it for the KV that this worker lacks."""
        if self.phase is not ReceivePhase.WAITING:
            return []
        self.phase = ReceivePhase.GRANTED
        self.plan = plan
        match plan.op:
            case "WRITE":
                self._grant_is_open = True
                return [OpenWriteGrant(), SendMessage(self._make_grant(plan))]
            case "READ" | "NONE":
                return [SendMessage(self._make_grant(plan))]
            case _:
                assert_never(plan.op)

    def expects(self, notification: Notification) -> bool:
        """Whether a notification is for a handoff that still waits for it.

        Raises:
            ProtocolError: it claims tokens that are not expected, or landed already.
        """
        if self.phase is not ReceivePhase.GRANTED:
            return False
        self.coverage.check(
            notification.layer, notification.start, notification.stop, notification.num_layers
        )
        return True

    def available(self, message: Available) -> list[ReceiveAction]:
        """The peer announces where tokens can be read.

        Raises:
            ProtocolError: tokens that are not expected, or were announced before; or
                this worker does not read.
        """
        if self.phase is not ReceivePhase.GRANTED or self.plan is None:
            return []
        if self._fell_back:
            return []  # it crossed our message
        if self.plan.op != "READ":
            raise ProtocolError("tokens are available to a worker that does not read them")
        if self._requested is None:
            self._requested = self._make_coverage(self.num_layers)
        self._requested.add(message.layer, message.start, message.stop, message.num_layers)
        return [ReadPages(message)]

    def exported(self, message: BlocksExported) -> list[ReceiveAction]:
        """The peer exports the blocks that hold the KV.

        Raises:
            ProtocolError: it was not asked to, or did so before.
        """
        if self.phase is not ReceivePhase.GRANTED or self.plan is None:
            return []
        if self.plan.op != "NONE" or self._is_exported:
            raise ProtocolError("blocks are exported to a worker that did not ask for them")
        self._is_exported = True
        return [ImportBlocks(message)]

    def imported(self, blocks: tuple[int, ...]) -> list[ReceiveAction]:
        """The exported blocks were checked: all KV is in these and in what was copied."""
        if self.phase is not ReceivePhase.GRANTED:
            return []
        self._imported = blocks
        self.coverage.add(0, self.order.start, self.order.num_tokens, self.num_layers)
        return self._complete()

    def export_refused(self, reason: str) -> list[ReceiveAction]:
        """The peer refuses the export: ask it to write instead."""
        if self.phase is not ReceivePhase.GRANTED or self.plan is None or self._is_exported:
            return []
        if self.plan.op != "NONE":
            return []
        self.order.trace.reroutes.append(f"reference: {reason}"[:MAX_NOTE_CHARS])
        return self.fall_back_to_write(())

    def encoding_refused(self, wanted: str) -> list[ReceiveAction]:
        """The peer is to send KV in `wanted`: this waits for another plan (`begin`).

        At once, or after `grant_quiescent`.

        Raises:
            ProtocolError: nothing is granted, KV is raw already, some of it has come, or the plan
                has no costs of `wanted`.
        """
        if self.phase is ReceivePhase.WAITING:
            raise ProtocolError("an encoding is refused where nothing is granted")
        if self.phase is not ReceivePhase.GRANTED or self.plan is None:
            return []
        has_begun = self._requested is not None or self._finished is not None
        has_begun |= bool(self._fencing or self._fenced or self._excluded or self._fell_back)
        is_possible = self.plan.encoding != RAW and not self._is_encoding_refused
        if not is_possible or has_begun or not self.coverage.is_empty:
            raise ProtocolError("an encoding is refused where KV is raw, or has come in it already")
        costs = self.plan.costs
        offered = {RAW} if costs is None else {RAW, *costs.decode_byte_s}
        if wanted not in offered - {self.plan.encoding}:
            raise ProtocolError(f"the encoding {wanted}, which was not offered, is asked for")
        self._is_encoding_refused = True
        if self._grant_is_open:
            return [CloseWriteGrant()]  # it claims that it wrote nothing: nothing rests on that
        self._await_plan()
        return []

    def _await_plan(self) -> None:
        self.phase, self.plan, self._is_encoding_refused = ReceivePhase.WAITING, None, False

    def reading(self, handle: TransferHandle) -> None:
        """A `ReadPages` was handed to the transport."""
        self._reads.add(handle)

    def read_ended(self, handle: TransferHandle) -> list[ReceiveAction]:
        """A read touches no page any more, whether it succeeded or not."""
        self._reads.discard(handle)
        return self._settle()

    def check_lease(self, now: Instant) -> list[ReceiveAction]:
        """A read has ended: fail if its source may not have been held until then."""
        if self.lease_holder.holds(now):
            return []
        return self.fail("a read ended after the lease of its source", stage=LEASE_STAGE)

    def landed(self, notification: Notification) -> list[ReceiveAction]:
        """Tokens are in place and their digests are right: count them."""
        if self.phase is not ReceivePhase.GRANTED:
            return []
        self.coverage.add(
            notification.layer, notification.start, notification.stop, notification.num_layers
        )
        return self._complete()

    def scattering(self) -> None:
        """A copy from the view's pages to the engine's blocks has begun; `scattered` follows."""
        self._num_scattering += 1

    def scattered(self) -> list[ReceiveAction]:
        """Such a copy is done. Or it failed: then `fail` came before."""
        self._num_scattering -= 1
        if self.phase is ReceivePhase.GRANTED:
            return self._complete()
        return [*self._give_back_staged(), *self._settle()]

    def transport_failed(self, message: TransportFailed) -> list[ReceiveAction]:
        """A transport failed at the peer, which has no write over it outstanding.

        Raises:
            ProtocolError: it was reported before, or the op is not WRITE.
        """
        if self.phase is not ReceivePhase.GRANTED:
            return []  # the peer was sent the outcome
        if not self._grant_is_open or message.transport in self._fencing | self._fenced:
            raise ProtocolError(f"{message.transport} was not written over, or left before")
        self._fencing.add(message.transport)
        return [Fence(message.transport)]

    def fenced(self, transport: str) -> list[ReceiveAction]:
        """Nothing can land over a failed transport any more: request the missing ranges."""
        if transport not in self._fencing:
            return []
        self._fencing.discard(transport)
        self._fenced.add(transport)
        if self.phase is not ReceivePhase.GRANTED:
            return []
        gaps = pack_ranges(self.coverage.gaps())
        return [SendMessage(RetransmitRequest(self.ticket, transport, gaps)), *self._complete()]

    def exclude(self, transport: str, reason: str) -> list[ReceiveAction]:
        """What a transport brought is wrong, and there is another: the peer is to leave it."""
        known = self._excluded | self._fencing | self._fenced
        if self.phase is not ReceivePhase.GRANTED or transport in known:
            return []
        self._excluded.add(transport)
        return [SendMessage(ExcludeTransport(self.ticket, transport, reason))]

    def fall_back_to_write(self, failed: Iterable[str]) -> list[ReceiveAction]:
        """Nothing is, or can be, read any more: the peer is to write the rest."""
        if self.phase is not ReceivePhase.GRANTED or self.plan is None or self._reads:
            return []
        if self.plan.op == "WRITE":
            return []
        self.plan = msgspec.structs.replace(self.plan, op="WRITE")
        self._fell_back = self._grant_is_open = True
        pages = self.plan.pages
        ranges = pack_ranges(self.coverage.gaps())
        blocks = pack_blocks(pages.blocks)
        message = FallbackToWrite(self.ticket, tuple(sorted(failed)), pages.first, blocks, ranges)
        return [OpenWriteGrant(), SendMessage(message)]

    def finished(self, message: Finished) -> list[ReceiveAction]:
        """The peer sent Finished: nothing will follow."""
        if self.phase is not ReceivePhase.GRANTED or self._finished is not None:
            return []
        self._finished = message
        return self._complete()

    def grant_quiescent(self) -> list[ReceiveAction]:
        """Nothing can land under the closed write grant any more."""
        if self.phase is ReceivePhase.GRANTED:
            if self._is_encoding_refused:
                self._grant_is_open = False
                self._await_plan()
            return []
        self._grant_is_open = False
        return self._settle()

    def fail(self, reason: str, *, stage: str) -> list[ReceiveAction]:
        """End without KV: the engine will recompute."""
        error = HandoffError(reason, stage=stage, peer=self.order.ticket.prefill.worker)
        return self._end(reason, [Emit(KVFailed(self.ticket, error))])

    def abort(self, reason: str) -> list[ReceiveAction]:
        """End because the engine lost interest."""
        return self._end(reason, [])

    def wait_until(self, instant: Instant) -> None:
        """The peer's engine works on it: wait for longer, but not beyond the request's deadline.

        Once the peer has sent Finished, there is nothing left to compute.
        """
        if self._finished is None and self.phase not in _CLOSED:
            self.deadline = extend(self.deadline, instant, self.order.deadline)

    def expire(self, now: Instant) -> list[ReceiveAction]:
        """Fail if the deadline has passed."""
        if now < self.deadline or self.phase in _CLOSED:
            return []
        missing = self.coverage.num_missing
        reason = f"the deadline passed with {missing} layer-tokens still missing"
        if self.phase is ReceivePhase.WAITING:
            reason += ": it waited for the prefill worker's link, or for staging pages"
        return self.fail(reason, stage=str(self.phase))

    def check_invariants(self) -> None:
        """Raise AssertionError where counts or phases disagree."""
        self.coverage.check_invariants()
        if self._requested is not None:
            self._requested.check_invariants()
        if self.over and (self._reads or self._grant_is_open or self._num_scattering):
            raise AssertionError("it is over, and something may still land in its pages")
        if self._fencing & self._fenced:
            raise AssertionError("a transport is being fenced that was")

    def _make_coverage(self, num_layers: int) -> Coverage:
        order = self.order
        return Coverage(num_layers=num_layers, start=order.start, stop=order.num_tokens)

    def _make_grant(self, plan: TransferPlan) -> Grant:
        order = self.order
        blocks = plan.pages.blocks if plan.op == "WRITE" else _NO_BLOCKS
        return Grant(
            id=self.ticket,
            ticket=self._sealed_ticket,
            prompt_hash=order.prompt_hash,
            start=order.start,
            num_tokens=order.num_tokens,
            first_block=plan.pages.first,
            blocks=pack_blocks(blocks),
            op=plan.op,
            no_digest_transports=plan.no_digest_transports,
            plain_digests=plan.plain_digests,
            encoding=plan.encoding,
            costs=plan.costs,
        )

    def _complete(self) -> list[ReceiveAction]:
        if self._finished is None or not self.coverage.complete or self._fencing:
            return []
        if self._num_scattering:
            return []
        landed = Emit(KVLanded(self.ticket, self._finished.first_token, imported=self._imported))
        self._has_landed = True
        if self._is_exported:
            self.phase = ReceivePhase.ENDED
            return [landed]
        if self._grant_is_open:
            self.phase = ReceivePhase.LANDED
            is_done = self._writer_is_done
            return [landed, SendTransferAck(is_done), CloseWriteGrant(is_done)]
        self.phase = ReceivePhase.ENDED  # all that was read is counted, so no read is left
        return [landed, SendTransferAck()]

    def _end(self, reason: str, events: list[ReceiveAction]) -> list[ReceiveAction]:
        match self.phase:
            case ReceivePhase.WAITING:
                self.phase = ReceivePhase.ENDED
                # Nothing was granted, but the peer may hold its KV for us already.
                declined = SendMessage(Declined(self._sealed_ticket, reason[:MAX_REASON_CHARS]))
                return [declined, *events, *self._give_back()]
            case ReceivePhase.GRANTED:
                self.phase = ReceivePhase.ENDING
                actions = [SendMessage(Failed(self.ticket, reason[:MAX_REASON_CHARS])), *events]
                actions += self._give_back_staged()
                is_closing = self._is_encoding_refused  # already
                must_close = self._grant_is_open and not is_closing
                actions += [CloseWriteGrant()] if must_close else self._settle()
                return actions
            case _:
                return []

    def _give_back(self) -> list[ReceiveAction]:
        """It failed, and nothing is stored into the engine's blocks any more: once."""
        if not self._has_blocks:
            return []
        self._has_blocks = False
        return [Emit(BlocksQuiescent(self.ticket))]

    def _give_back_staged(self) -> list[ReceiveAction]:
        """The peer does not reach blocks of a staged view: only copies of this side do."""
        is_apart = self.plan is not None and self.plan.staged
        is_ending = self.phase is ReceivePhase.ENDING
        return self._give_back() if is_apart and is_ending and not self._num_scattering else []

    @property
    def _writer_is_done(self) -> bool:
        """Once all is here. Else a write that failed at the peer may be on its way still."""
        return not (self._fenced or self._excluded or self._fell_back)

    def _settle(self) -> list[ReceiveAction]:
        """Once it was closed and no hand is in the pages: over."""
        if self._reads or self._grant_is_open or self._num_scattering:
            return []
        match self.phase:
            case ReceivePhase.LANDED:
                self.phase = ReceivePhase.ENDED
                return []
            case ReceivePhase.ENDING:
                self.phase = ReceivePhase.ENDED
                return self._give_back()
            case _:
                return []
