"""Carries out the faults of a schedule, and counts those that found something to break."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, assert_never

from baton.handoff.messages import (
    Available,
    BlocksExported,
    Declined,
    ExcludeTransport,
    ExportRefused,
    Failed,
    FallbackToWrite,
    Finished,
    Grant,
    LeaseRenewed,
    Release,
    ReleaseAck,
    RenewLease,
    RetransmitRequest,
    Revoke,
    TransferAck,
    TransportFailed,
)
from baton.sim.handoff import internals
from baton.sim.handoff.plan import (
    BreakTransport,
    CorruptEntries,
    CorruptTransfers,
    Crash,
    CutConnections,
    DropRequest,
    DuplicateRequest,
    FailTransfers,
    Partition,
    Pause,
    ReplayMessages,
    Slow,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.sim.handoff.plan import Fault, Host
    from baton.sim.handoff.process import SimProcess
    from baton.sim.handoff.world import World

_REPLAYED = (
    Available
    | ExcludeTransport
    | Declined
    | Failed
    | Finished
    | Grant
    | BlocksExported
    | RetransmitRequest
    | Revoke
    | RenewLease
    | LeaseRenewed
    | TransportFailed
    | Release
    | FallbackToWrite
    | ReleaseAck
    | TransferAck
    | ExportRefused
)


class FaultInjector:
    """Knows which faults are still to come, or to end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_open = 0
        for fault in world.schedule.faults:
            self._later(fault.at_s, partial(self._inject, fault))

    @property
    def is_over(self) -> bool:
        """Whether nothing is to come, and nothing is to end."""
        return self._num_open == 0

    def _later(self, delay_s: float, action: Callable[[], object]) -> None:
        self._num_open += 1

        def act() -> None:
            self._num_open -= 1
            action()

        self._world.timeline.after(delay_s, act)

    def _inject(self, fault: Fault) -> None:
        self._world.timeline.note("fault", str(fault))
        match fault:
            case Crash() | Pause() | Slow() | ReplayMessages():
                self._inject_worker(fault)
            case CutConnections() | Partition():
                self._inject_network(fault)
            case CorruptTransfers() | CorruptEntries() | BreakTransport() | FailTransfers():
                self._inject_transfers(fault)
            case DropRequest(worker=worker, part=part):
                self._world.set_request_fault(worker, part)
            case DuplicateRequest(worker=worker):
                self._world.set_request_fault(worker, "duplicate")
            case _:
                assert_never(fault)

    def _inject_worker(self, fault: Crash | Pause | Slow | ReplayMessages) -> None:
        match fault:
            case Crash():
                self._crash(fault)
            case Pause():
                self._pause(fault)
            case Slow():
                self._slow(fault)
            case ReplayMessages():
                self._replay(fault)
            case _:
                assert_never(fault)

    def _inject_network(self, fault: CutConnections | Partition) -> None:
        network = self._world.network
        match fault:
            case CutConnections(one=one, another=another, silently=silently, num_kept=num_kept):
                num_cut = network.cut(one, another, silently=silently, num_kept=num_kept)
                self._count("cut", num_cut)
            case Partition():
                network.partition(fault.one, fault.another, fault.for_s)
                if fault.both_ways:
                    network.partition(fault.another, fault.one, fault.for_s)
                self._count("parted", 1)
                self._later(fault.for_s, _nothing)
            case _:
                assert_never(fault)

    def _inject_transfers(
        self, fault: CorruptTransfers | CorruptEntries | BreakTransport | FailTransfers
    ) -> None:
        world, transfer_faults = self._world, self._world.fabric.transfer_faults
        match fault:
            case CorruptTransfers(effects=effects):
                transfer_faults.corruptions += effects
            case CorruptEntries(effects=effects):
                if world.store is not None:
                    world.store.entry_faults += effects
            case BreakTransport(worker=worker, kind=kind, for_s=for_s):
                transfer_faults.block_transport(worker, kind, for_s)
                self._later(for_s, _nothing)
                for transport in world.live[worker].transports:
                    if transport.kind == kind:
                        transport.lose_connections(None, "the connections broke")
            case FailTransfers(kind=kind, count=count):
                transfer_faults.fail_next_transfers(kind, count)
            case _:
                assert_never(fault)

    def _crash(self, fault: Crash) -> None:
        world = self._world
        process = world.live[fault.worker]
        if process.is_alive:
            self._count("crash", 1)
            process.kill(silently=fault.silently)
            if fault.back_after_s is not None:
                self._later(fault.back_after_s, lambda: self._start(fault.worker))

    def _pause(self, fault: Pause) -> None:
        process = self._world.live[fault.worker]
        if process.is_alive and not process.is_paused:
            self._count("pause", 1)
            process.pause()
            self._later(fault.for_s, process.resume)
            if fault.replaced:
                self._start(fault.worker)

    def _slow(self, fault: Slow) -> None:
        world = self._world
        process = world.live[fault.worker]
        process.slow_factor = fault.factor
        process.slow_until_s = world.timeline.now_s + fault.for_s
        for other in world.live:
            world.network.slow_down(fault.worker, other, fault.for_s, fault.factor)
        self._later(fault.for_s, _nothing)

    def _replay(self, fault: ReplayMessages) -> None:
        """Incarnations that hold the cluster key send messages that they may not send."""
        world = self._world
        for process in world.processes:
            if process.name == fault.worker and process.is_alive:
                for _ in range(fault.count):
                    self._send_forged(process)

    def _send_forged(self, process: SimProcess) -> None:
        """Replay recent messages, or name a ticket that does not name this incarnation."""
        checker, rng = self._world.checker, self._world.rng
        replayed = [h.message for h in checker.messages[-12:] if isinstance(h.message, _REPLAYED)]
        foreign = [
            ticket.id
            for ticket in list(checker.tickets.values())[-4:]
            if process.epoch not in {ticket.prefill.epoch, ticket.decode.epoch}
        ]
        if foreign:
            ticket, kind = rng.choice(foreign), rng.choice(self._world.schedule.kinds)
            replayed += [
                Failed(ticket, "forged"),
                Finished(ticket, None, kind, kind, {}),
                TransferAck(ticket, kind, kind),
                TransportFailed(ticket, kind),
                RetransmitRequest(ticket, kind, b""),
                ExcludeTransport(ticket, kind, "forged"),
                RenewLease(0.0, (ticket,)),
                LeaseRenewed(0.0, (ticket,)),
                Release((ticket,)),
                Revoke((ticket,)),
                ReleaseAck((ticket,)),
                ExportRefused(ticket, "forged"),
                BlocksExported(ticket, 0, b"\0\0\0\0"),
            ]
        peers = internals.peers_of(process.agent)
        if replayed and peers:
            self._count("replay", 1)
            internals.send(process.agent, rng.choice(peers), rng.choice(replayed))

    def _start(self, name: Host) -> None:
        world = self._world
        process = world.live[name]
        if not process.is_alive or process.is_paused:
            world.start(name)
            self._later(0.02 * world.rng.random(), world.refresh_workers)

    def _count(self, what: str, num: int) -> None:
        self._world.fabric.transfer_faults.injected[what] += num


def _nothing() -> None:
    """A fault is over by itself."""
