"""Any transport, with faults: seeded, and counted when they happen, so that a test can prove it.

Faults of a write (failed, or other bytes than were asked for) are made where it is submitted,
faults of a notice where it arrives: wrap the side whose misfortune is wanted.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from baton.errors import TransferError
from baton.kv.copies import CopyGroup
from baton.transfer.interface import (
    Arrived,
    TransferId,
    WindowQuiescent,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.region import (
    allocate_host_region,
    allocate_shared_region,
    release_region,
    view_pages,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import RegionHandle, TicketId
    from baton.transfer.interface import (
        PagedRegion,
        PageWrite,
        RegionDescriptor,
        RemoteId,
        TransferEvent,
        Transport,
        Window,
    )


class Fault(StrEnum):
    """What can be made to go wrong."""

    FAIL_SUBMIT = "fail_submit"  # WriteFailed, and nothing is sent
    FLIP_BIT = "flip_bit"  # one bit of one page arrives changed
    ZERO_PAGE = "zero_page"  # one page arrives as zeros
    SWAP_PAGES = "swap_pages"  # two pages arrive in each other's place
    DROP_NOTICE = "drop_notice"
    DELAY_NOTICE = "delay_notice"  # by `delay_polls` polls: others overtake it
    DUPLICATE_NOTICE = "duplicate_notice"
    REORDER_NOTICE = "reorder_notice"  # after the next one, if one comes within `delay_polls`
    HIDE_QUIESCENCE = "hide_quiescence"


_WRITE_FAULTS = (Fault.FAIL_SUBMIT, Fault.FLIP_BIT, Fault.ZERO_PAGE, Fault.SWAP_PAGES)
_NOTICE_FAULTS = (
    Fault.DROP_NOTICE,
    Fault.DELAY_NOTICE,
    Fault.DUPLICATE_NOTICE,
    Fault.REORDER_NOTICE,
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
class _HeldNotice:
    event: Arrived
    fault: Fault
    num_polls_left: int


@dataclass(slots=True)
class _Ids:
    """Transfers as the owner knows them, since some never reach the inner transport."""

    num_given: int = 0
    outer: dict[TransferId, TransferId] = field(default_factory=dict)

    def give(self) -> TransferId:
        self.num_given += 1
        return TransferId(self.num_given)


class FaultyTransport:
    """A `Transport` around another. `injected` counts what really went wrong.

    `readiness_fd` is None: the owner polls on a timer, for a held notice makes nothing readable.
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
        self._failed: list[WriteFailed] = []
        self._held: list[_HeldNotice] = []

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        self._regions[region.handle] = region
        return self._inner.expose(region)

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        return self._inner.attach(descriptor)

    def detach(self, remote: RemoteId) -> None:
        self._inner.detach(remote)

    def open_window(self, window: Window) -> None:
        self._inner.open_window(window)

    def close_window(self, window: TicketId) -> None:
        self._held = [held for held in self._held if held.event.window != window]
        self._inner.close_window(window)

    def submit(self, write: PageWrite) -> TransferId:
        match self._draw(_WRITE_FAULTS):
            case Fault.FAIL_SUBMIT:
                self.injected[Fault.FAIL_SUBMIT] += 1
                transfer = self._ids.give()
                self._failed.append(WriteFailed(transfer, TransferError("a fault on purpose")))
                return transfer
            case Fault.SWAP_PAGES:
                write = self._swap_pages(write)
            case Fault.FLIP_BIT | Fault.ZERO_PAGE as fault:
                write = self._spoil_page(write, fault)
            case _:
                pass
        inner = self._inner.submit(write)
        transfer = self._ids.give()
        self._ids.outer[inner] = transfer
        return transfer

    def poll(self) -> list[TransferEvent]:
        events: list[TransferEvent] = [*self._failed]
        self._failed.clear()
        for event in self._inner.poll():
            match event:
                case WriteCompleted(transfer) | WriteFailed(transfer):
                    events.append(replace(event, transfer=self._ids.outer.pop(transfer)))
                case Arrived():
                    events += self._take_notice(event)
                case WindowQuiescent():
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

    def _take_notice(self, event: Arrived) -> list[TransferEvent]:
        overtaken = [held for held in self._held if held.fault is Fault.REORDER_NOTICE]
        fault = self._draw(_NOTICE_FAULTS)
        match fault:
            case None:
                events: list[TransferEvent] = [event]
            case Fault.DROP_NOTICE:
                events = []
            case Fault.DUPLICATE_NOTICE:
                events = [event, event]
            case _:
                self._held.append(_HeldNotice(event, fault, self._plan.delay_polls))
                events = []
        if fault is not None and fault is not Fault.REORDER_NOTICE:
            self.injected[fault] += 1
        if not events:
            return []
        for held in overtaken:
            self._held.remove(held)
            self.injected[Fault.REORDER_NOTICE] += 1
            events.append(held.event)
        return events

    def _release_overdue(self) -> list[TransferEvent]:
        for held in self._held:
            held.num_polls_left -= 1
        overdue = [held for held in self._held if held.num_polls_left < 0]
        self._held = [held for held in self._held if held.num_polls_left >= 0]
        return [held.event for held in overdue]

    def _swap_pages(self, write: PageWrite) -> PageWrite:
        """The write with two destinations exchanged, if some group has two."""
        groups = list(write.copies.groups)
        for index, group in enumerate(groups):
            if len(group.dst_pages) >= 2:
                one, other = self._random.sample(range(len(group.dst_pages)), 2)
                dst_pages = group.dst_pages.copy()
                dst_pages[[one, other]] = dst_pages[[other, one]]
                groups[index] = CopyGroup(group.src_pages, dst_pages, group.spans)
                self.injected[Fault.SWAP_PAGES] += 1
                return replace(write, copies=replace(write.copies, groups=tuple(groups)))
        return write

    def _spoil_page(self, write: PageWrite, fault: Fault) -> PageWrite:
        """The write from a copy of its source in which one page is spoilt."""
        groups = [group for group in write.copies.groups if group.num_bytes]
        if not groups:
            return write
        group = self._random.choice(groups)
        page = int(self._random.choice(group.src_pages))
        start, _, num_bytes = (int(value) for value in self._random.choice(group.spans))
        region, pages = self._clone(write)
        piece = pages[page, start : start + num_bytes]
        if fault is Fault.ZERO_PAGE and piece.any():
            piece[:] = 0
        else:
            fault = Fault.FLIP_BIT
            piece[self._random.randrange(num_bytes)] ^= 1 << self._random.randrange(8)
        self.injected[fault] += 1
        return replace(write, region=region.handle)

    def _clone(self, write: PageWrite) -> tuple[PagedRegion, NDArray[np.uint8]]:
        """A region like the write's source, exposed, that holds the pages the write reads."""
        source = self._regions[write.region]
        shapes = [(array.num_pages, array.page_bytes) for array in source.arrays]
        allocate = allocate_shared_region if source.kind == "shared" else allocate_host_region
        clone = allocate(shapes)
        self._clones.append(clone)
        self._inner.expose(clone)
        layer = write.copies.layer
        pages = view_pages(clone.memory, clone.arrays[layer])
        original = view_pages(source.memory, source.arrays[layer])
        for group in write.copies.groups:
            pages[group.src_pages] = original[group.src_pages]
        return clone, pages
