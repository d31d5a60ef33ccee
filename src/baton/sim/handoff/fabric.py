"""What carries bytes between the transports of all processes, and what spoils them on the way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.kv.copies import apply_copies
from baton.sim.handoff.mishaps import Mishaps
from baton.sim.handoff.transport import COPY_S, LATE_S, split_copies
from baton.transfer.interface import Arrived

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.ids import RegionHandle, TicketId
    from baton.kv.copies import PageCopies
    from baton.sim.handoff.checker import Checker
    from baton.sim.handoff.network import Network
    from baton.sim.handoff.process import SimProcess
    from baton.sim.handoff.timeline import Timeline
    from baton.sim.handoff.transport import SimTransport, Write

CATCH_UP_S: Final = 0.2
"""After a late store, what another transport is to bring takes that long."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A writer was asked to stop writing into a window, and has not answered."""

    writer: SimTransport
    target: SimTransport
    window: TicketId


class Fabric:
    """All transfers of a run. `landing` are writes of which something may still be stored."""

    def __init__(self, timeline: Timeline, network: Network, checker: Checker) -> None:
        self.exposed: dict[tuple[str, RegionHandle], SimTransport] = {}
        self.landing: dict[Write, None] = {}
        self.mishaps = Mishaps(timeline)
        self._links: dict[tuple[SimTransport, SimTransport], None] = {}
        self._stops: dict[Stop, None] = {}
        self._late_s: dict[TicketId, float] = {}
        self._timeline, self._network, self._checker = timeline, network, checker

    def later(self, process: SimProcess, host: str, action: Callable[[], None]) -> None:
        """Have a process do something soon: when a message to or from a host has arrived."""
        at_s = self._network.arrival_s(process.name, host)
        self._timeline.at(at_s, lambda: process.when_awake(action))

    def link(self, writer: SimTransport, target: SimTransport) -> None:
        """One transport attached a region of another."""
        self._links[writer, target] = None

    def writers_of(self, target: SimTransport) -> list[SimTransport]:
        """Who may be storing into the regions of a transport."""
        return [w for w, t in self._links if t is target and w.process.is_alive]

    def ask_to_stop(self, writer: SimTransport, target: SimTransport, window: TicketId) -> None:
        """A message to a writer: it answers once it runs, or its death answers for it."""
        stop = Stop(writer, target, window)
        self._stops[stop] = None
        self.later(writer.process, target.process.name, lambda: self._stop(stop))

    def may_land(self, target: SimTransport, window: TicketId) -> bool:
        """Whether something may still be stored through a window."""
        return any(w.target is target and w.order.window == window for w in self.landing)

    def is_late(self, window: TicketId) -> bool:
        """Whether what was reported as failed may be stored through a window, or just was."""
        since_s = self._timeline.now_s - self._late_s.get(window, -CATCH_UP_S)
        is_landing = any(w.has_failed and w.order.window == window for w in self.landing)
        return is_landing or since_s < CATCH_UP_S

    def split(self, copies: PageCopies) -> list[PageCopies]:
        """A write as it will be stored: each layer at once, or in two parts."""
        if self._timeline.noise.random() < 0.3:  # noqa: PLR2004 -- some are torn
            return [part for each in copies.split() for part in split_copies(each)]
        return list(copies.split())

    def carry(self, write: Write) -> None:
        """Have a write leave."""
        self._soon(lambda: self._when_it_runs(write, lambda: self._depart(write)))

    def drop(self, write: Write) -> None:
        """Nothing more of a write is stored."""
        if write in self.landing:
            del self.landing[write]
            write.target.settle(write.order.window)

    def check_store(
        self,
        target: SimTransport,
        region: RegionHandle,
        copies: PageCopies,
        window: TicketId | None,
    ) -> None:
        """Bytes are about to be stored: into pages that may change?"""
        self._checker.stored(target.process, region, copies, window)

    def check_read(self, reader: SimTransport, region: RegionHandle, copies: PageCopies) -> None:
        """Pages of a peer are being copied into pages of a region of the reader's."""
        self._checker.read(reader.process, region, copies)

    def killed(self, process: SimProcess) -> None:
        """A process is gone, and with it what it was storing; what was posted may still land."""
        for write in tuple(self.landing):
            if write.poster.process is process and not write.poster.capabilities.posts:
                self.drop(write)
            elif write.target.process is process:
                del self.landing[write]
        for stop in [each for each in self._stops if each.writer.process is process]:
            self._answer(stop)
        for writer, target in tuple(self._links):
            if writer.process is process:
                del self._links[writer, target]
                for window in tuple(target.windows):
                    target.confirmed(writer, window)
            elif target.process is process:
                del self._links[writer, target]
                lose = partial(writer.lose, process, "it died")
                self.later(writer.process, process.name, lose)

    def _soon(self, action: Callable[[], None], extra_s: float = 0.0) -> None:
        low, high = COPY_S
        delay_s = low + (high - low) * self._timeline.noise.random() + extra_s
        self._timeline.after(delay_s, action)

    def _when_it_runs(self, write: Write, action: Callable[[], None]) -> None:
        """Hardware goes on by itself; else the side that stores must run."""
        poster, target = write.poster, write.target
        if poster.habits.posts:
            action()
            return
        storing = target if poster.habits.receiver_stores and write.source is not None else poster
        storing.process.when_awake(action)

    def _depart(self, write: Write) -> None:
        """Read the source pages, if the write may be made."""
        poster, target, order = write.poster, write.target, write.order
        if write.has_failed or not poster.process.is_alive:
            return
        is_refused = order.window in poster.told_to_stop or not target.admits(write)
        if is_refused and not poster.habits.receiver_stores:
            poster.fail(write, "the window is closed")
            return
        self._checker.left(write)
        layers = order.copies.layers
        write.source = {layer: poster.pages(order.region, layer).copy() for layer in layers}
        self.mishaps.spoil(write.source[layers[-1]], order.copies)
        self.landing[write] = None
        if self.mishaps.fails_next(poster.kind):
            poster.fail(write, "the transfer failed")
        self._go_on(write)

    def _go_on(self, write: Write) -> None:
        extra_s = self._network.parted_s(write.poster.process.name, write.target.process.name)
        if write.has_failed and write.poster.habits.posts:
            extra_s += LATE_S * self._timeline.noise.random() ** 3
        self._soon(lambda: self._when_it_runs(write, lambda: self._store(write)), extra_s)

    def _store(self, write: Write) -> None:
        """Store one part, then have the next one follow; at last the notice."""
        poster, target = write.poster, write.target
        if write not in self.landing or write.source is None:
            return
        if poster.habits.receiver_stores and not target.admits(write):
            self.drop(write)
            self.later(poster.process, target.process.name, lambda: poster.completed(write))
            return
        part = write.parts.pop(0)
        handle = write.remote.descriptor.handle
        self._note_late(write)
        self.check_store(target, handle, part, write.order.window)
        apply_copies(part, write.source[part.layer], target.pages(handle, part.layer))
        if write.parts:
            self._go_on(write)
            return
        self.drop(write)
        if not write.has_failed or self._timeline.noise.random() < 0.5:  # noqa: PLR2004
            self._notify(write)
            for _ in range(self.mishaps.take_repeats()):
                self._notify(write)

    def _note_late(self, write: Write) -> None:
        if write.has_failed:
            self.mishaps.met["late store"] += 1
            self._late_s[write.order.window] = self._timeline.now_s

    def _notify(self, write: Write) -> None:
        self._soon(lambda: write.target.process.when_awake(lambda: self._arrive(write)))

    def _arrive(self, write: Write) -> None:
        order, poster, target = write.order, write.poster, write.target
        opened = target.windows.get(order.window)
        if opened is not None and not opened.is_closing:
            self.mishaps.met["late notice"] += write.has_failed
            target.say(Arrived(order.window, order.notice))
        self.later(poster.process, target.process.name, lambda: poster.completed(write))

    def _stop(self, stop: Stop) -> None:
        if stop in self._stops:
            stop.writer.stops(stop.window)
            self._answer(stop)

    def _answer(self, stop: Stop) -> None:
        if self._stops.pop(stop, 0) is None:
            writer, target, window = stop.writer, stop.target, stop.window
            self.later(
                target.process, writer.process.name, lambda: target.confirmed(writer, window)
            )
