"""What carries bytes between the transports of all processes, and what spoils them on the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, assert_never

from baton.kv.copies import PageCopies, apply_copies
from baton.sim.handoff.transport import COPY_S, LATE_S, SimTransport, SimWrite, split_copies
from baton.transfer.interface import Arrived

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import RegionHandle, TicketId
    from baton.sim.handoff.checker import Checker
    from baton.sim.handoff.network import Network
    from baton.sim.handoff.process import SimProcess
    from baton.sim.handoff.timeline import Timeline

CorruptionKind: TypeAlias = Literal["flip", "zero", "swap", "truncate", "repeat"]
"""What befalls a transfer: its last page, or its notification, which comes twice."""


class TransferFaults:
    """Faults that wait for a transfer to strike. `injected` counts what took effect in a run."""

    def __init__(self, timeline: Timeline) -> None:
        self.injected: Counter[str] = Counter()
        self.corruptions: list[CorruptionKind] = []
        self._timeline = timeline
        self._num_repeated = 0
        self._failing: Counter[str] = Counter()
        self._blocked_until: dict[tuple[str, str], float] = {}

    def block_transport(self, host: str, kind: str, for_s: float) -> None:
        """From one host, a transport reaches no peer for a while."""
        self._blocked_until[host, kind] = self._timeline.now_s + for_s

    def is_blocked(self, host: str, kind: str) -> bool:
        """Whether it does just now."""
        is_refused = self._blocked_until.get((host, kind), 0.0) > self._timeline.now_s
        self.injected["refused"] += is_refused
        return is_refused

    def fail_next_transfers(self, kind: str, count: int) -> None:
        """The next transfers over a transport fail."""
        self._failing[kind] += count

    def pop_failure(self, kind: str) -> bool:
        """Whether one fails that is under way."""
        if not self._failing[kind]:
            return False
        self._failing[kind] -= 1
        self.injected["failed transfer"] += 1
        return True

    def pop_repeats(self) -> int:
        """How many times more a notification comes."""
        num_repeated, self._num_repeated = self._num_repeated, 0
        return num_repeated

    def corrupt(self, source: NDArray[np.uint8], copies: PageCopies) -> None:
        """Bytes, uint8 `[num_pages, page_bytes]`, may not arrive as they left."""
        if not self.corruptions or not copies.groups:
            return
        how, victim = self.corruptions.pop(), int(copies.groups[-1].src_pages[-1])
        self.injected[f"corrupted: {how}"] += 1
        match how:
            case "flip":
                source[victim] ^= 1
            case "zero":
                source[victim] = 0
            case "swap":
                source[victim] = source[(victim + 1) % len(source)].copy() ^ 3
            case "truncate":
                source[victim, source.shape[1] // 2 :] = 0
            case "repeat":
                self._num_repeated += 1
            case _:
                assert_never(how)


CATCH_UP_S: Final = 0.2
"""After a late store, what another transport is to bring takes that long."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A writer was asked to stop writing into a grant, and has not answered."""

    writer: SimTransport
    target: SimTransport
    grant: TicketId


class Fabric:
    """All transfers of a run. `landing` are writes of which something may still be stored."""

    def __init__(self, timeline: Timeline, network: Network, checker: Checker) -> None:
        self.exposed: dict[tuple[str, RegionHandle], SimTransport] = {}
        self.landing: dict[SimWrite, None] = {}
        self.transfer_faults = TransferFaults(timeline)
        self._links: dict[tuple[SimTransport, SimTransport], None] = {}
        self._stop_requests: dict[StopRequest, None] = {}
        self._late_s: dict[TicketId, float] = {}
        self._timeline, self._network, self._checker = timeline, network, checker

    def later(self, process: SimProcess, host: str, action: Callable[[], None]) -> None:
        """Have a process do something soon: when a message to or from a host has arrived."""
        at_s = self._network.arrival_s(process.name, host)
        self._timeline.at(at_s, lambda: process.when_running(action))

    def link(self, writer: SimTransport, target: SimTransport) -> None:
        """One transport attached a region of another."""
        self._links[writer, target] = None

    def writers_of(self, target: SimTransport) -> list[SimTransport]:
        """Who may be storing into the regions of a transport."""
        return [w for w, t in self._links if t is target and w.process.is_alive]

    def ask_to_stop(self, writer: SimTransport, target: SimTransport, grant: TicketId) -> None:
        """A message to a writer: it answers once it runs, or its death answers for it."""
        stop = StopRequest(writer, target, grant)
        self._stop_requests[stop] = None
        self.later(writer.process, target.process.name, lambda: self._stop(stop))

    def may_land(self, target: SimTransport, grant: TicketId) -> bool:
        """Whether something may still be stored through a grant."""
        return any(w.target is target and w.order.grant == grant for w in self.landing)

    def is_late(self, grant: TicketId) -> bool:
        """Whether what was reported as failed may be stored through a grant, or just was."""
        since_s = self._timeline.now_s - self._late_s.get(grant, -CATCH_UP_S)
        is_landing = any(w.has_failed and w.order.grant == grant for w in self.landing)
        return is_landing or since_s < CATCH_UP_S

    def split(self, copies: PageCopies) -> list[PageCopies]:
        """A write as it will be stored: each layer at once, or in two parts."""
        if self._timeline.rng.random() < 0.3:  # noqa: PLR2004 -- some are torn
            return [part for each in copies.split() for part in split_copies(each)]
        return list(copies.split())

    def carry(self, write: SimWrite) -> None:
        """Have a write leave."""
        self._soon(lambda: self._when_it_runs(write, lambda: self._depart(write)))

    def drop(self, write: SimWrite) -> None:
        """Nothing more of a write is stored."""
        if write in self.landing:
            del self.landing[write]
            write.target.settle(write.order.grant)

    def check_store(
        self,
        target: SimTransport,
        region: RegionHandle,
        copies: PageCopies,
        grant: TicketId | None,
    ) -> None:
        """Bytes are about to be stored: into pages that may change?"""
        self._checker.on_store(target.process, region, copies, grant)

    def check_read(self, reader: SimTransport, region: RegionHandle, copies: PageCopies) -> None:
        """Pages of a peer are being copied into pages of a region of the reader's."""
        self._checker.on_read(reader.process, region, copies)

    def killed(self, process: SimProcess) -> None:
        """A process is gone, and with it what it was storing; what was posted may still land."""
        for write in tuple(self.landing):
            if write.poster.process is process and not write.poster.capabilities.late_writes:
                self.drop(write)
            elif write.target.process is process:
                del self.landing[write]
        for stop in [each for each in self._stop_requests if each.writer.process is process]:
            self._answer(stop)
        for writer, target in tuple(self._links):
            if writer.process is process:
                del self._links[writer, target]
                for grant in tuple(target.grants):
                    target.on_stop_confirmed(writer, grant)
            elif target.process is process:
                del self._links[writer, target]
                lose_connections = partial(writer.lose_connections, process, "it died")
                self.later(writer.process, process.name, lose_connections)

    def _soon(self, action: Callable[[], None], extra_s: float = 0.0) -> None:
        low, high = COPY_S
        delay_s = low + (high - low) * self._timeline.rng.random() + extra_s
        self._timeline.after(delay_s, action)

    def _when_it_runs(self, write: SimWrite, action: Callable[[], None]) -> None:
        """Hardware goes on by itself; else the side that stores must run."""
        poster, target = write.poster, write.target
        if poster.traits.late_writes:
            action()
            return
        storing = target if poster.traits.receiver_stores and write.source is not None else poster
        storing.process.when_running(action)

    def _depart(self, write: SimWrite) -> None:
        """Read the source pages, if the write may be made."""
        poster, target, order = write.poster, write.target, write.order
        if write.has_failed or not poster.process.is_alive:
            return
        is_refused = order.grant in poster.stop_requested or not target.allows(write)
        if is_refused and not poster.traits.receiver_stores:
            poster.fail(write, "the grant is closed")
            return
        self._checker.on_source_read(write)
        layers = order.copies.layers
        write.source = {layer: poster.pages(order.region, layer).copy() for layer in layers}
        self.transfer_faults.corrupt(write.source[layers[-1]], order.copies)
        self.landing[write] = None
        if self.transfer_faults.pop_failure(poster.kind):
            poster.fail(write, "the transfer failed")
        self._go_on(write)

    def _go_on(self, write: SimWrite) -> None:
        extra_s = self._network.partitioned_s(write.poster.process.name, write.target.process.name)
        if write.has_failed and write.poster.traits.late_writes:
            extra_s += LATE_S * self._timeline.rng.random() ** 3
        self._soon(lambda: self._when_it_runs(write, lambda: self._store(write)), extra_s)

    def _store(self, write: SimWrite) -> None:
        """Store one part, then have the next one follow; at last the notification."""
        poster, target = write.poster, write.target
        if write not in self.landing or write.source is None:
            return
        if poster.traits.receiver_stores and not target.allows(write):
            self.drop(write)
            self.later(poster.process, target.process.name, lambda: poster.completed(write))
            return
        part = write.parts.pop(0)
        handle = write.remote.descriptor.handle
        self._note_late(write)
        self.check_store(target, handle, part, write.order.grant)
        apply_copies(part, write.source[part.layer], target.pages(handle, part.layer))
        if write.parts:
            self._go_on(write)
            return
        self.drop(write)
        if not write.has_failed or self._timeline.rng.random() < 0.5:  # noqa: PLR2004
            self._notify(write)
            for _ in range(self.transfer_faults.pop_repeats()):
                self._notify(write)

    def _note_late(self, write: SimWrite) -> None:
        if write.has_failed:
            self.transfer_faults.injected["late store"] += 1
            self._late_s[write.order.grant] = self._timeline.now_s

    def _notify(self, write: SimWrite) -> None:
        self._soon(lambda: write.target.process.when_running(lambda: self._arrive(write)))

    def _arrive(self, write: SimWrite) -> None:
        order, poster, target = write.order, write.poster, write.target
        opened = target.grants.get(order.grant)
        if opened is not None and not opened.is_closing:
            self.transfer_faults.injected["late notification"] += write.has_failed
            target.emit(Arrived(order.grant, order.notification))
        self.later(poster.process, target.process.name, lambda: poster.completed(write))

    def _stop(self, stop: StopRequest) -> None:
        if stop in self._stop_requests:
            stop.writer.on_stop_request(stop.grant)
            self._answer(stop)

    def _answer(self, stop: StopRequest) -> None:
        if self._stop_requests.pop(stop, 0) is None:
            writer, target, grant = stop.writer, stop.target, stop.grant
            self.later(
                target.process, writer.process.name, lambda: target.on_stop_confirmed(writer, grant)
            )
