"""One run: a cluster put together from its schedule, turned until all is over and released."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import TicketIssuer, WorkerRef
from baton.ids import Epoch, WorkerId
from baton.sim.handoff.checker import Checker
from baton.sim.handoff.fabric import Fabric
from baton.sim.handoff.fault_injector import FaultInjector
from baton.sim.handoff.gateway import SimRequest
from baton.sim.handoff.network import Network
from baton.sim.handoff.plan import GATEWAY, Client, Host, Schedule
from baton.sim.handoff.process import SimProcess
from baton.sim.handoff.store import SimStore
from baton.sim.handoff.timeline import SkewedClock, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable

RequestFault: TypeAlias = Literal["request", "reply", "duplicate"]
CREDENTIALS: Final = Credentials.of(ClusterKey(b"the key of a simulated cluster, 32"))


class World:
    """Everything of one run. `live` is who answers at a worker's address now."""

    def __init__(self, schedule: Schedule, *, keeps_log: bool = False) -> None:
        self.schedule = schedule
        self.rng = Random(f"noise {schedule.seed}")  # noqa: S311 -- a seed's, not a secret
        self.credentials = CREDENTIALS
        self.timeline = Timeline(self.rng, keeps_log=keeps_log)
        self.network = Network(self.timeline)
        self.ticket_issuer = TicketIssuer(
            SkewedClock(self.timeline, 0.0, 1.0, 0.0), Epoch("9" * 32)
        )
        self.checker = Checker()
        self.fabric = Fabric(self.timeline, self.network, self.checker)
        self.checker.fabric = self.fabric
        store = schedule.store
        self.store = None if store is None else SimStore(store, self.timeline)
        self.live: dict[Host, SimProcess] = {}
        self.processes: list[SimProcess] = []
        self.requests: list[SimRequest] = []
        self._request_faults: dict[Host, RequestFault] = {}
        self._seen: dict[Host, WorkerRef] = {}
        self._num_incarnations = 0
        for plan in schedule.workers:
            self.start(plan.name)
        self.refresh_workers()
        for number, client in enumerate(schedule.clients):
            self.timeline.after(client.arrives_s, self._arrive(client, number))
        self.fault_injector = FaultInjector(self)

    @property
    def is_over(self) -> bool:
        """Whether every client has its answer, and every fault is over."""
        num_open = len(self.schedule.clients) - len(self.requests)
        is_answered = not num_open and all(r.outcome is not None for r in self.requests)
        return is_answered and self.fault_injector.is_over

    def next_incarnation(self) -> int:
        """The number of a new life, from 1 on."""
        self._num_incarnations += 1
        return self._num_incarnations

    def start(self, name: Host) -> SimProcess:
        """A new life of a worker, at its address."""
        plan = next(each for each in self.schedule.workers if each.name == name)
        process = SimProcess(self, plan)
        process.note(f"starts as {process.epoch[:6]}")
        self.live[name] = process
        self.processes.append(process)
        return process

    def pick_worker(self, side: str, avoid: frozenset[WorkerId]) -> WorkerRef | None:
        """A worker of one side, as the gateway knows it."""
        known = [ref for name, ref in self._seen.items() if name.startswith(side)]
        better = [ref for ref in known if ref.worker not in avoid]
        return self.rng.choice(better) if better else None

    def is_healthy(self, ref: WorkerRef) -> bool:
        """Whether the gateway's probes of a life of a worker are answered."""
        process = self.live[ref.worker]
        is_partitioned = any(
            self.network.partitioned_s(*way)
            for way in ((GATEWAY, ref.worker), (ref.worker, GATEWAY))
        )
        return process.epoch == ref.epoch and process.can_answer and not is_partitioned

    def refresh_workers(self) -> None:
        """The gateway learns which lives there are."""
        self._seen = {name: process.ref for name, process in self.live.items() if process.is_alive}

    def set_request_fault(self, worker: Host, fate: RequestFault) -> None:
        """The gateway's next call to a worker does not go as it should."""
        self._request_faults[worker] = fate

    def pop_request_fault(self, worker: Host) -> RequestFault | None:
        """What befalls a call that begins now."""
        return self._request_faults.pop(worker, None)

    def close(self) -> None:
        """The run is over."""
        for process in self.processes:
            process.close()

    def _arrive(self, client: Client, number: int) -> Callable[[], None]:
        return lambda: self.requests.append(SimRequest(self, client, number))
