"""Any transport, with faults: seeded, and counted when they happen, so that a test can prove it.

Faults of a write or a read (failed, late, or other bytes than were asked for) are made where it is
submitted, faults of a notification where it arrives: wrap the side whose misfortune is wanted. A
view that is struck fails, or shows a copy that was spoilt.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from baton.errors import TransferError
from baton.testing.corrupted_copies import (
    ByteRange,
    choose_byte_range,
    cut_short,
    flip_bit,
    swap_pages,
    try_zero,
)
from baton.transfer.interface import (
    Arrived,
    GrantQuiescent,
    PagedRegion,
    PageRead,
    PageWrite,
    ReadCompleted,
    ReadFailed,
    ReadGrant,
    RegionDescriptor,
    RemoteId,
    ScopesReads,
    TransferEvent,
    TransferId,
    Transport,
    WriteCompleted,
    WriteFailed,
    WriteGrant,
    as_admitter,
    as_reader,
    as_viewer,
    find_read_scopes,
)
from baton.transfer.region import (
    allocate_host_region,
    allocate_shared_region,
    release_region,
    view_pages,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from baton.ids import RegionHandle, TicketId
    from baton.kv.copies import PageCopies


class Fault(StrEnum):
    """What can be made to go wrong."""

    FAIL_SUBMIT = "fail_submit"  # WriteFailed or ReadFailed, and nothing is moved; no view
    FLIP_BIT = "flip_bit"  # one bit of one page arrives changed
    ZERO_PAGE = "zero_page"  # one page arrives as zeros
    SWAP_PAGES = "swap_pages"  # two pages arrive in each other's place
    TRUNCATE = "truncate"  # the end of what was asked for does not arrive
    DELAY_READ = "delay_read"  # nothing is read until `delay_polls` polls later
    DROP_NOTIFICATION = "drop_notification"
    DELAY_NOTIFICATION = "delay_notification"  # by `delay_polls` polls: others overtake it
    DUPLICATE_NOTIFICATION = "duplicate_notification"
    REORDER_NOTIFICATION = (
        "reorder_notification"  # after the next one, if one comes within `delay_polls`
    )
    HIDE_QUIESCENCE = "hide_quiescence"


_VIEW_FAULTS = (Fault.FAIL_SUBMIT, Fault.FLIP_BIT, Fault.ZERO_PAGE, Fault.SWAP_PAGES)
_WRITE_FAULTS = (*_VIEW_FAULTS, Fault.TRUNCATE)
_READ_FAULTS = (*_WRITE_FAULTS, Fault.DELAY_READ)
_NOTIFICATION_FAULTS = (
    Fault.DROP_NOTIFICATION,
    Fault.DELAY_NOTIFICATION,
    Fault.DUPLICATE_NOTIFICATION,
    Fault.REORDER_NOTIFICATION,
)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How often each fault strikes: a probability for each occasion, at most one fault each.

    After `max_faults` in all, everything goes well.
    """

    seed: int
    rates: Mapping[Fault, float]
    max_faults: int = 1 << 30
    delay_polls: int = 3


@dataclass(slots=True)
class _HeldNotification:
    event: Arrived
    fault: Fault
    num_polls_left: int


@dataclass(slots=True)
class _HeldRead:
    transfer: TransferId
    read: PageRead
    num_polls_left: int


@dataclass(frozen=True, slots=True)
class _PendingCorruption:
    """What will be wrong with a read once its pages are in place."""

    read: PageRead
    fault: Fault


@dataclass(slots=True)
class _Ids:
    """Transfers as the owner knows them, since some never reach the inner transport."""

    num_given: int = 0
    outer: dict[TransferId, TransferId] = field(default_factory=dict)

    def give(self, inner: TransferId | None = None) -> TransferId:
        self.num_given += 1
        given = TransferId(self.num_given)
        if inner is not None:
            self.outer[inner] = given
        return given


class FaultyTransport:  # noqa: PLR0904 - the contract
    """A `Transport` around another. `injected` counts what really went wrong.

    `readiness_fd` is None: the owner polls on a timer, for a held notification makes nothing
    readable.
    """

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        self.kind, self.capabilities = inner.kind, inner.capabilities
        self.readiness_fd: int | None = None
        self.injected: Counter[Fault] = Counter()
        self._inner, self._plan = inner, plan
        self._random = random.Random(plan.seed)  # noqa: S311 -- a seeded test, no secret
        self._regions: dict[RegionHandle, PagedRegion] = {}
        self._clones: list[PagedRegion] = []
        self._ids = _Ids()
        self._failed: list[WriteFailed | ReadFailed] = []
        self._held: list[_HeldNotification] = []
        self._held_reads: list[_HeldRead] = []
        self._pending_corruptions: dict[TransferId, _PendingCorruption] = {}

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        self._regions[region.handle] = region
        return self._inner.expose(region)

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        return self._inner.attach(descriptor)

    def detach(self, remote: RemoteId) -> None:
        self._inner.detach(remote)

    def open_grant(self, grant: WriteGrant) -> None:
        self._inner.open_grant(grant)

    def close_grant(self, grant: TicketId) -> None:
        self._held = [held for held in self._held if held.event.grant != grant]
        self._inner.close_grant(grant)

    def finish_grant(self, grant: TicketId) -> bool:
        self._held = [held for held in self._held if held.event.grant != grant]
        return self._inner.finish_grant(grant)

    def admit_writes(self, remote: RemoteId, grant: TicketId, pages: NDArray[np.int64]) -> None:
        admitter = as_admitter(self._inner)
        if admitter is not None:
            admitter.admit_writes(remote, grant, pages)

    def forget_grant(self, remote: RemoteId, grant: TicketId) -> None:
        admitter = as_admitter(self._inner)
        if admitter is not None:
            admitter.forget_grant(remote, grant)

    def admit_reads(self, grant: ReadGrant, arrays: range, pages: NDArray[np.int64]) -> None:
        self._scope.admit_reads(grant, arrays, pages)

    def close_read_grant(self, grant: TicketId) -> None:
        self._scope.close_read_grant(grant)

    @property
    def _scope(self) -> ScopesReads:
        return find_read_scopes([self._inner])[0]

    def submit(self, write: PageWrite) -> TransferId:
        match self._draw(_WRITE_FAULTS):
            case Fault.FAIL_SUBMIT:
                self.injected[Fault.FAIL_SUBMIT] += 1
                transfer = self._ids.give()
                self._failed.append(WriteFailed(transfer, TransferError("a fault on purpose")))
                return transfer
            case Fault.SWAP_PAGES | Fault.TRUNCATE as fault:
                write = msgspec.structs.replace(write, copies=self._misdirect(write.copies, fault))
            case Fault.FLIP_BIT | Fault.ZERO_PAGE as fault:
                write = self._corrupt_page(write, fault)
            case _:
                pass
        return self._ids.give(self._inner.submit(write))

    def read(self, read: PageRead) -> TransferId:
        match self._draw(_READ_FAULTS):
            case Fault.FAIL_SUBMIT:
                self.injected[Fault.FAIL_SUBMIT] += 1
                transfer = self._ids.give()
                self._failed.append(ReadFailed(transfer, TransferError("a fault on purpose")))
                return transfer
            case Fault.DELAY_READ:
                self.injected[Fault.DELAY_READ] += 1
                transfer = self._ids.give()
                self._held_reads.append(_HeldRead(transfer, read, self._plan.delay_polls))
                return transfer
            case Fault.SWAP_PAGES | Fault.TRUNCATE as fault:
                read = msgspec.structs.replace(read, copies=self._misdirect(read.copies, fault))
            case Fault.FLIP_BIT | Fault.ZERO_PAGE as fault:
                # The bytes change on their way: whoever looks at them early must see that, too.
                posted = as_reader(self._inner).read(msgspec.structs.replace(read, copied=None))
                transfer = self._ids.give(posted)
                self._pending_corruptions[transfer] = _PendingCorruption(read, fault)
                return transfer
            case _:
                pass
        return self._ids.give(as_reader(self._inner).read(read))

    def view(self, remote: RemoteId, array: int) -> NDArray[np.uint8]:
        seen = as_viewer(self._inner).view(remote, array)
        fault = self._draw(_VIEW_FAULTS)
        if fault is None:
            return seen
        if fault is Fault.FAIL_SUBMIT:
            self.injected[fault] += 1
            raise TransferError("a fault on purpose")
        spoilt = seen.copy()
        if fault is Fault.SWAP_PAGES:
            self.injected[fault] += 1
            spoilt = spoilt[np.roll(np.arange(len(spoilt)), 1)]
        else:
            page = self._random.randrange(len(spoilt))
            self._corrupt(spoilt, ByteRange(page, 0, spoilt.shape[1]), fault)
        spoilt.flags.writeable = False
        return spoilt

    def poll(self) -> list[TransferEvent]:
        self._begin_overdue_reads()
        events: list[TransferEvent] = [*self._failed]
        self._failed.clear()
        for event in self._inner.poll():
            match event:
                case WriteCompleted(transfer) | WriteFailed(transfer):
                    outer = self._ids.outer.pop(transfer)
                    events.append(msgspec.structs.replace(event, transfer=outer))
                case ReadCompleted(inner) | ReadFailed(inner):
                    transfer = self._ids.outer.pop(inner)
                    self._corrupt_read(transfer)
                    events.append(msgspec.structs.replace(event, transfer=transfer))
                case Arrived():
                    events += self._take_notification(event)
                case GrantQuiescent():
                    if self._draw((Fault.HIDE_QUIESCENCE,)) is None:
                        events.append(event)
                    else:
                        self.injected[Fault.HIDE_QUIESCENCE] += 1
                case _:
                    events.append(event)
        return events + self._release_overdue()

    def close(self) -> None:
        self._inner.close()
        self._failed.clear()
        self._held.clear()
        self._held_reads.clear()
        while self._clones:
            release_region(self._clones.pop())

    def _draw(self, faults: tuple[Fault, ...]) -> Fault | None:
        """Which of `faults` strikes now, at most one."""
        if self.injected.total() >= self._plan.max_faults:
            return None
        for fault in faults:
            if self._random.random() < self._plan.rates.get(fault, 0.0):
                return fault
        return None

    def _take_notification(self, event: Arrived) -> list[TransferEvent]:
        overtaken = [held for held in self._held if held.fault is Fault.REORDER_NOTIFICATION]
        fault = self._draw(_NOTIFICATION_FAULTS)
        match fault:
            case None:
                events: list[TransferEvent] = [event]
            case Fault.DROP_NOTIFICATION:
                events = []
            case Fault.DUPLICATE_NOTIFICATION:
                events = [event, event]
            case _:
                self._held.append(_HeldNotification(event, fault, self._plan.delay_polls))
                events = []
        if fault is not None and fault is not Fault.REORDER_NOTIFICATION:
            self.injected[fault] += 1
        if not events:
            return []
        for held in overtaken:
            self._held.remove(held)
            self.injected[Fault.REORDER_NOTIFICATION] += 1
            events.append(held.event)
        return events

    def _release_overdue(self) -> list[TransferEvent]:
        for held in self._held:
            held.num_polls_left -= 1
        overdue = [held for held in self._held if held.num_polls_left < 0]
        self._held = [held for held in self._held if held.num_polls_left >= 0]
        return [held.event for held in overdue]

    def _begin_overdue_reads(self) -> None:
        for held in self._held_reads:
            held.num_polls_left -= 1
        overdue = [held for held in self._held_reads if held.num_polls_left < 0]
        self._held_reads = [held for held in self._held_reads if held.num_polls_left >= 0]
        for held in overdue:
            try:
                self._ids.outer[as_reader(self._inner).read(held.read)] = held.transfer
            except TransferError as exc:  # the remote may be gone by now
                self._failed.append(ReadFailed(held.transfer, exc))

    def _misdirect(self, copies: PageCopies, fault: Fault) -> PageCopies:
        """The copies with two destinations exchanged, or without their end, if that is possible."""
        is_swap = fault is Fault.SWAP_PAGES
        wrong = swap_pages(copies, self._random) if is_swap else cut_short(copies)
        if wrong is None:
            return copies
        self.injected[fault] += 1
        return wrong

    def _corrupt_page(self, write: PageWrite, fault: Fault) -> PageWrite:
        """The write from a copy of its source in which one page is spoilt."""
        piece = choose_byte_range(write.copies, self._random, side=0)
        if piece is None:
            return write
        region = self._clone(write)
        layer = self._random.choice(write.copies.layers)
        self._corrupt(view_pages(region.memory, region.arrays[layer]), piece, fault)
        return msgspec.structs.replace(write, region=region.handle)

    def _corrupt_read(self, transfer: TransferId) -> None:
        """Make wrong what was read, before the owner is notified."""
        corruption = self._pending_corruptions.pop(transfer, None)
        if corruption is None:
            return
        read = corruption.read
        piece = choose_byte_range(read.copies, self._random, side=1)
        if piece is not None:
            region = self._regions[read.region]
            pages = view_pages(region.memory, region.arrays[read.copies.layer])
            self._corrupt(pages, piece, corruption.fault)

    def _corrupt(self, pages: NDArray[np.uint8], piece: ByteRange, fault: Fault) -> None:
        to_zeros = fault is Fault.ZERO_PAGE and try_zero(pages, piece)
        if not to_zeros:
            flip_bit(pages, piece, self._random)
        self.injected[Fault.ZERO_PAGE if to_zeros else Fault.FLIP_BIT] += 1

    def _clone(self, write: PageWrite) -> PagedRegion:
        """A region like the write's source, exposed, that holds the pages the write reads."""
        source = self._regions[write.region]
        shapes = [(array.num_pages, array.page_bytes) for array in source.arrays]
        allocate = allocate_shared_region if source.kind == "shared" else allocate_host_region
        clone = allocate(shapes)
        self._clones.append(clone)
        self._inner.expose(clone)
        for layer in write.copies.layers:
            pages = view_pages(clone.memory, clone.arrays[layer])
            original = view_pages(source.memory, source.arrays[layer])
            for group in write.copies.groups:
                pages[group.src_pages] = original[group.src_pages]
        return clone
