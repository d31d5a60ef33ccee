"""Carries out the faults of a schedule, and counts those that found something to break."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, assert_never

from baton.handoff.messages import (
    Available,
    Avoid,
    Declined,
    Failed,
    Finished,
    Grant,
    Lent,
    Missing,
    Recalled,
    Renew,
    Renewed,
    Rerouted,
    Returned,
    Reversed,
    Settled,
    Taken,
    Unlent,
)
from baton.sim.handoff import inside
from baton.sim.handoff.plan import (
    Break,
    Crash,
    Cut,
    FailTransfers,
    LoseCall,
    Part,
    Pause,
    RepeatCall,
    Replay,
    Rot,
    Slow,
    Spoil,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.sim.handoff.plan import Fault, Host
    from baton.sim.handoff.process import SimProcess
    from baton.sim.handoff.world import World

_REPLAYED = (
    Available
    | Avoid
    | Declined
    | Failed
    | Finished
    | Grant
    | Lent
    | Missing
    | Recalled
    | Renew
    | Renewed
    | Rerouted
    | Returned
    | Reversed
    | Settled
    | Taken
    | Unlent
)


class Striker:
    """Knows which faults are still to come, or to end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_open = 0
        for fault in world.schedule.faults:
            self._later(fault.at_s, partial(self._strike, fault))

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

    def _strike(self, fault: Fault) -> None:
        self._world.timeline.note("fault", str(fault))
        match fault:
            case Crash() | Pause() | Slow() | Replay():
                self._strike_worker(fault)
            case Cut() | Part():
                self._strike_network(fault)
            case Spoil() | Rot() | Break() | FailTransfers():
                self._strike_transfers(fault)
            case LoseCall(worker=worker, part=part):
                self._world.doom_call(worker, part)
            case RepeatCall(worker=worker):
                self._world.doom_call(worker, "twice")
            case _:
                assert_never(fault)

    def _strike_worker(self, fault: Crash | Pause | Slow | Replay) -> None:
        match fault:
            case Crash():
                self._crash(fault)
            case Pause():
                self._pause(fault)
            case Slow():
                self._slow(fault)
            case Replay():
                self._replay(fault)
            case _:
                assert_never(fault)

    def _strike_network(self, fault: Cut | Part) -> None:
        network = self._world.network
        match fault:
            case Cut(one=one, another=another, silently=silently, num_kept=num_kept):
                num_cut = network.cut(one, another, silently=silently, num_kept=num_kept)
                self._count("cut", num_cut)
            case Part():
                network.part(fault.one, fault.another, fault.for_s)
                if fault.both_ways:
                    network.part(fault.another, fault.one, fault.for_s)
                self._count("parted", 1)
                self._later(fault.for_s, _nothing)
            case _:
                assert_never(fault)

    def _strike_transfers(self, fault: Spoil | Rot | Break | FailTransfers) -> None:
        world, mishaps = self._world, self._world.fabric.mishaps
        match fault:
            case Spoil(hows=hows):
                mishaps.spoils += hows
            case Rot(hows=hows):
                if world.shelf is not None:
                    world.shelf.rots += hows
            case Break(worker=worker, kind=kind, for_s=for_s):
                mishaps.refuse(worker, kind, for_s)
                self._later(for_s, _nothing)
                for transport in world.live[worker].transports:
                    if transport.kind == kind:
                        transport.lose(None, "the connections broke")
            case FailTransfers(kind=kind, count=count):
                mishaps.fail_some(kind, count)
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

    def _replay(self, fault: Replay) -> None:
        """Lives that hold the cluster key say what they have no business to say."""
        world = self._world
        for process in world.processes:
            if process.name == fault.worker and process.is_alive:
                for _ in range(fault.count):
                    self._misspeak(process)

    def _misspeak(self, process: SimProcess) -> None:
        """Repeat what was said lately, or speak of a ticket that does not name this life."""
        checker, chance = self._world.checker, self._world.noise
        said = [h.message for h in checker.said[-12:] if isinstance(h.message, _REPLAYED)]
        strange = [
            ticket.id
            for ticket in list(checker.tickets.values())[-4:]
            if process.epoch not in {ticket.prefill.epoch, ticket.decode.epoch}
        ]
        if strange:
            ticket, kind = chance.choice(strange), chance.choice(self._world.schedule.kinds)
            said += [
                Failed(ticket, "forged"),
                Finished(ticket, None, kind, kind, {}),
                Taken(ticket, kind, kind),
                Rerouted(ticket, kind),
                Missing(ticket, kind, b""),
                Avoid(ticket, kind, "forged"),
                Renew(0.0, (ticket,)),
                Renewed(0.0, (ticket,)),
                Returned((ticket,)),
                Recalled((ticket,)),
                Settled((ticket,)),
                Unlent(ticket, "forged"),
                Lent(ticket, 0, b"\0\0\0\0"),
            ]
        peers = inside.peers_of(process.agent)
        if said and peers:
            self._count("replay", 1)
            inside.say(process.agent, chance.choice(peers), chance.choice(said))

    def _start(self, name: Host) -> None:
        world = self._world
        process = world.live[name]
        if not process.is_alive or process.is_paused:
            world.start(name)
            self._later(0.02 * world.noise.random(), world.look_again)

    def _count(self, what: str, num: int) -> None:
        self._world.fabric.mishaps.met[what] += num


def _nothing() -> None:
    """A fault is over by itself."""
