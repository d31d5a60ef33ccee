"""The registry of workers: who is up, and since which epoch.

    Pending ──info──► Up ◄──► Draining
       │              │ ▲       │
       └─► Rejected   ▼ │info   │
                     Down ◄─────┘

One that is up may be ejected nevertheless: `Worker.health`.

Whatever changes a state goes through `Workers.change`, which logs it once, counts it and makes a
new `Fleet`. Which workers there are changes by `Workers.set_members`; one that left is draining
until `Workers.remove`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never, get_args

from msgspec import UNSET
from yarl import URL

from baton.auth.ticket import HandoffMode, WorkerRef
from baton.errors import ModelNotFoundError
from baton.gateway.errors import NoWorkerError, WorkerLostError
from baton.gateway.interruptible import Interruptible
from baton.gateway.members.member_set import CONFIGURED
from baton.gateway.options import WorkerAddress
from baton.gateway.worker_info import why_not_used
from baton.protocol.worker_http import MAX_REASON_CHARS, Role
from baton.router.fleet import Fleet, WorkerView
from baton.router.health import (
    DEFAULT_HEALTH,
    EjectionCause,
    HealthOptions,
    HealthState,
    WorkerHealth,
)
from baton.router.topology import complete
from baton.telemetry.clock_offset import ClockOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from baton.clock import Instant
    from baton.gateway.members.member_set import Listing
    from baton.gateway.metrics import GatewayMetrics
    from baton.ids import Epoch, WorkerId
    from baton.protocol.worker_http import Health, WorkerInfo, WorkerLoad

KNOWN_MODES: Final[frozenset[HandoffMode]] = frozenset(get_args(HandoffMode))
OnLoad: TypeAlias = "Callable[[WorkerId, str, WorkerLoad | None], None]"

LEFT: Final = "no source lists it any more"
NUM_AT_ONCE: Final = 16
REPORTS_EVERY_S: Final = 0.1
"""Of fleets of more workers: so often what is new of them is taken up, but for those that fail."""


def worker_view(worker: Worker, info: WorkerInfo) -> WorkerView:
    """What placement uses of a worker, in the role that the operator gave it."""
    is_up, health = isinstance(worker.state, Up), worker.health
    return WorkerView(
        ref=WorkerRef(info.worker, info.epoch, info.handoff_address, info.rank_addresses),
        role=worker.address.role,
        model=info.served_model_name,
        fingerprint=info.fingerprint,
        transports=frozenset(info.transports),
        available=worker.is_available,
        protocol=info.protocol,
        modes=KNOWN_MODES & frozenset(info.modes),
        load=worker.load,
        tokenizer=info.tokenizer,
        half_open=is_up and health.takes_trial,
        ejected=is_up and not worker.is_available,
        slow_start=health.slow_start,
        resumes_streams=info.protocol == "baton" or info.resumes_streams,
        takes_prefixes=info.protocol == "baton" or info.takes_prefixes,
        takes_unsigned_tickets=info.takes_unsigned_tickets and worker.url.scheme == "https",
        topology=complete(info.topology, worker.address.topology),
        max_step_tokens=info.max_step_tokens,
        num_landing_layers=info.num_landing_layers,
        adapters=worker.adapters,
        why_no_handoffs=worker.why_no_handoffs,
        max_context_tokens=info.max_context_tokens,
        checkpoint=info.model,
    )


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pending:
    """It has not identified itself yet; `reason` is why, as far as we know."""

    reason: str


NOT_ASKED: Final = Pending("not asked yet")
"""Until the first probe has ended."""


@dataclass(frozen=True, slots=True)
class Up:
    """It answers."""

    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class Preemption:
    """Its machine is taken at `at`, as far as it knows."""

    reason: str
    at: Instant


@dataclass(frozen=True, slots=True)
class Draining:
    """It finishes what it has, and takes no more."""

    info: WorkerInfo
    preemption: Preemption | None = None


@dataclass(frozen=True, slots=True)
class Down:
    """It did not answer."""

    info: WorkerInfo
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """It answers, but cannot be used as the operator listed it."""

    reason: str


WorkerState: TypeAlias = Pending | Up | Draining | Down | Rejected


class Worker:
    """One address that the operator or a source lists.

    `sources` list it, none once it has left; `why_withdrawn` is why it gets nothing new, and its
    streams move. `preempted`: the notice of one incarnation, which holds if it does not answer in
    between. `has_drained`: it has reported that it takes no more, and was not up since.
    `is_gone`: it is no longer in the registry; requests may still end there.
    """

    def __init__(
        self,
        address: WorkerAddress,
        health: HealthOptions,
        sources: tuple[str, ...] = (CONFIGURED,),
    ) -> None:
        self.address, self.health, self.sources = address, WorkerHealth(health), sources
        self.why_withdrawn: str | None = None
        self.preempted: tuple[Epoch, Preemption] | None = None
        self.has_drained = False
        self.is_gone = False
        self.noted_health: tuple[HealthState, bool] = (HealthState.HEALTHY, False)
        self.url = address.origin
        self.completion_urls = {
            path: self.url.with_path(path) for path in ("/v1/chat/completions", "/v1/completions")
        }
        self.state: WorkerState = NOT_ASKED
        self.load: WorkerLoad | None = None
        self.adapters: frozenset[str] = frozenset()
        self.why_no_handoffs: str | None = None
        self.clock = ClockOffset()
        self._cancel_scopes: set[Interruptible] = set()
        self._view: tuple[tuple[object, ...], WorkerView] | None = None

    def cancel_scope(self) -> Interruptible:
        """A stretch of one request that waits for this worker: `abandon` ends it."""
        return Interruptible(self._cancel_scopes)

    def abandon(self, reason: str) -> None:
        """Nothing more is expected of it: whoever waits for it gets a `WorkerLostError`."""
        for scope in tuple(self._cancel_scopes):
            scope.interrupt(WorkerLostError(f"{self} is given up: {reason}"))

    @property
    def is_waited_for(self) -> bool:
        """Whether some request waits for it, or gets its answer."""
        return bool(self._cancel_scopes)

    @property
    def multiplexes_streams(self) -> bool:
        """Whether it can send its streams over one connection."""
        return self.info is not None and self.info.multiplexes_streams

    @property
    def is_available(self) -> bool:
        """Whether requests may be placed on it."""
        is_relied_on = self.health.is_usable or self.health.takes_trial
        return isinstance(self.state, Up) and is_relied_on

    @property
    def has_ended(self) -> bool:
        """Whether it is certain that its process is gone: silence alone proves nothing."""
        is_gone = self.health.cause is EjectionCause.GONE or self.has_drained
        return is_gone and isinstance(self.state, Down)

    def view(self, info: WorkerInfo) -> WorkerView:
        """What placement uses of it: the same object while nothing has changed."""
        health = self.health
        made_of = (
            self.state,
            self.load,
            self.address,
            self.is_available,
            health.takes_trial,
            health.slow_start,
            self.adapters,
            self.why_no_handoffs,
        )
        if self._view is None or made_of != self._view[0]:
            self._view = made_of, worker_view(self, info)
        return self._view[1]

    @property
    def standing(self) -> str:
        """Its state in one word; while it is up, its health's."""
        return self.health.state if isinstance(self.state, Up) else _name_of(self.state)

    @property
    def info(self) -> WorkerInfo | None:
        """The last worker info that it reported."""
        match self.state:
            case Up(info) | Draining(info, _) | Down(info, _):
                return info
            case Pending() | Rejected():
                return None

    @property
    def control_urls(self) -> tuple[URL, ...]:
        """Where aborts and trace queries are sent: itself, or each rank of vLLM's."""
        if self.info is None or self.info.protocol == "baton":
            return (self.url,)
        return tuple(URL(url) for url in self.info.control_urls)

    @property
    def name(self) -> str:
        """How people call it."""
        return self.info.worker if self.info else str(self.url)

    def __str__(self) -> str:
        return f"{self.address.role} worker {self.name}"


def find_not_asked(workers: Iterable[Worker]) -> list[Worker]:
    """Those that may answer, and of which nothing is known yet: the first probe is under way."""
    return [w for w in workers if w.state is NOT_ASKED and w.address.role is not Role.PREFILL]


class Workers:
    """All workers that the operator or a source lists, and those that leave.

    `explain_sources` gives a readable line for each source that lists none, or cannot be read.
    Owner: the event loop's thread.
    """

    def __init__(
        self,
        addresses: Iterable[WorkerAddress],
        metrics: GatewayMetrics,
        health: HealthOptions = DEFAULT_HEALTH,
        *,
        on_load: Sequence[OnLoad] = (),
        first_share: float = 0.0,
    ) -> None:
        """`on_load` are called with each report: a worker's name, its model, its load.

        `first_share`: see `Fleet.beginning_at`.
        """
        self._health, self._first_share = health, first_share
        self.all = tuple(Worker(address, health) for address in addresses)
        self.fleet = Fleet()
        self.explain_sources: Callable[[], list[str]] = list
        self.on_change: Callable[[Fleet], None] = _ignore
        self._metrics, self._on_load = metrics, on_load
        self._by_id: dict[WorkerId, Worker] = {}
        self._soon: asyncio.TimerHandle | None = None
        for worker in self.all:
            metrics.worker_up(str(worker.url), worker.address.role, up=False)

    def of(self, view: WorkerView) -> Worker:
        """The worker behind a view of the current fleet; KeyError if it has left since."""
        return self._by_id[view.id]

    def with_id(self, worker: WorkerId) -> Worker | None:
        """The worker of that name, if there still is one."""
        return self._by_id.get(worker)

    def why_not_served(self, model: str) -> NoWorkerError | ModelNotFoundError:
        """The error for a client that names a model of which no worker has ever been seen."""
        if not self.fleet.models:
            waiting = ", ".join([*map(str, self.all), *self.explain_sources()])
            return NoWorkerError(f"no worker has come up yet; waiting for: {waiting}")
        if not_asked := find_not_asked(self.all):
            waiting = ", ".join(map(str, not_asked))
            return NoWorkerError(
                f"no worker of the model {model!r} is known yet; asking: {waiting}"
            )
        served = ", ".join(map(repr, [*sorted(self.fleet.models), *sorted(self.fleet.adapters)]))
        return ModelNotFoundError(
            f"the model {model!r} is not served here; served: {served}", param="model"
        )

    def why_not_ready(self) -> str:
        """What is being waited for, one clause for each worker that is not up."""
        absent = (
            f"{worker}: {_reason(worker.state)}"
            for worker in self.all
            if not isinstance(worker.state, Up)
        )
        return "; ".join([*absent, *self.explain_sources()]) or "no source lists a worker"

    def context_lengths(self) -> dict[str, int]:
        """For each served model, how many tokens the least of its workers has room for."""
        lengths: dict[str, int] = {}
        for worker in self.all:
            if isinstance(worker.state, Up):
                info = worker.state.info
                known = lengths.get(info.served_model_name, info.max_context_tokens)
                lengths[info.served_model_name] = min(known, info.max_context_tokens)
        return lengths

    def register(
        self, worker: Worker, info: WorkerInfo, adapters: frozenset[str] = frozenset()
    ) -> None:
        """It identified itself: it is up, unless it cannot be used as listed."""
        reason = why_not_used(info, worker.address)
        namesake = self._by_id.get(info.worker, worker)
        if namesake is not worker and not namesake.sources:  # it was started again elsewhere
            self.remove([namesake])
        elif namesake is not worker and namesake.has_ended:  # and is not off all lists yet
            self.change(namesake, Pending(f"{worker.url} is called {info.worker} now"))
        elif namesake is not worker:
            reason = f"{namesake.url} is called {info.worker} already; give each worker a name"
        if reason is not None:
            self.reject(worker, reason)
            return
        before = worker.info
        if before is not None and before.epoch != info.epoch:
            log.warning("%s has started again: epoch %s → %s", worker, before.epoch, info.epoch)
        if before is None or before.epoch != info.epoch:
            worker.why_no_handoffs = None
        has_other_adapters = worker.adapters != adapters
        if has_other_adapters:
            # One object for all workers that have the same: each new fleet compares them.
            alike = (each.adapters for each in self.all if each.adapters == adapters)
            worker.adapters = next(alike, adapters)
        worker.has_drained = False
        self.change(worker, Up(info) if worker.why_withdrawn is None else Draining(info))
        if has_other_adapters:
            log.info("%s has the adapters: %s", worker, ", ".join(sorted(adapters)) or "none")
            self._make_fleet()

    def lose(self, worker: Worker, reason: str) -> None:
        """It did not answer."""
        info = worker.info
        self.change(worker, Pending(reason) if info is None else Down(info, reason))

    def reject(self, worker: Worker, reason: str) -> None:
        """It answered, and cannot be used."""
        self.change(worker, Rejected(reason))

    def drain(self, worker: Worker, preemption: Preemption | None = None) -> None:
        """It reported that it takes no more requests, and whether its machine is taken.

        The first such report counts: each later one differs by what rounding leaves.
        """
        if worker.info is None:
            return
        epoch, known = worker.info.epoch, worker.preempted
        worker.has_drained = True
        if preemption is not None and (known is None or known[0] != epoch):
            self._metrics.preempted_workers.inc()
            known = worker.preempted = epoch, preemption
        notice = known[1] if known is not None and known[0] == epoch else None
        self.change(worker, Draining(worker.info, notice))

    def note_health(self, *workers: Worker) -> None:
        """What is thought of them may have changed: note that, if so; one fleet is made of all."""
        changed = [worker for worker in workers if self._has_changed_health(worker)]
        if changed:
            self._make_fleet()

    def _has_changed_health(self, worker: Worker) -> bool:
        health = worker.health
        noted = (health.state, health.takes_trial)
        before, worker.noted_health = worker.noted_health, noted
        if before == noted:
            return False
        is_new = before[0] is not health.state
        if health.cause is not None and health.state is HealthState.EJECTED and is_new:
            self._metrics.ejections[health.cause].inc()
        if isinstance(worker.state, Up):
            _log_health(worker)
        self._note_available(worker)
        return True

    def note_report(self, worker: Worker, health: Health | None) -> None:
        """It reported its load, or that it does not; None: nothing is known of either."""
        if worker.is_gone:
            return
        load, has_changed = None, False
        if health is not None:
            load, before = health.load, worker.why_no_handoffs
            reason = health.why_no_handoffs
            worker.why_no_handoffs = None if reason is UNSET else reason[:MAX_REASON_CHARS]
            has_changed = worker.why_no_handoffs != before
        if worker.info is not None:
            for listener in self._on_load:
                listener(worker.info.worker, worker.info.served_model_name, load)
        if worker.load != load or has_changed:
            worker.load = load
            self._make_fleet_soon()

    def change(self, worker: Worker, state: WorkerState) -> None:
        """Set the state; update fleet and metrics if it changed."""
        before = worker.info
        if not self._set_state(worker, state):
            return
        if before is not None and self._by_id.get(before.worker) is worker:
            del self._by_id[before.worker]
        if worker.info is not None:
            self._by_id[worker.info.worker] = worker
        has_other_name = before is not None and self._by_id.get(before.worker) is not worker
        if isinstance(state, Up) and not has_other_name:
            self._make_fleet_soon()
        else:  # nothing is to be placed at what is not there
            self._make_fleet()

    def set_members(self, listings: Mapping[URL, Listing]) -> None:
        """These workers are listed now, and no others; one fleet is made of all changes.

        New ones are pending. Those that are not listed any more get nothing new, until `remove`.
        """
        for worker in self.all:
            self._relist(worker, listings.get(worker.url))
        known = {worker.url for worker in self.all}
        added = []
        for url, listing in listings.items():
            if url not in known:
                address = WorkerAddress(str(url), listing.role, topology=listing.topology)
                worker = Worker(address, self._health, listing.sources)
                worker.why_withdrawn = listing.why_withdrawn
                self._note_available(worker)
                log.info("a new %s worker: %s (%s)", listing.role, url, ", ".join(listing.sources))
                added.append(worker)
        self.all = (*self.all, *added)
        self._index()

    def remove(self, workers: Iterable[Worker]) -> None:
        """They are known no longer; what still ends there has nothing to do with the fleet."""
        for worker in workers:
            if not worker.is_gone:
                worker.is_gone = True
                self._metrics.forget_worker(str(worker.url), worker.address.role)
                log.info("%s at %s is forgotten", worker, worker.url)
        self.all = tuple(worker for worker in self.all if not worker.is_gone)
        self._index()

    def _relist(self, worker: Worker, listing: Listing | None) -> None:
        before = worker.why_withdrawn
        worker.sources = () if listing is None else listing.sources
        worker.why_withdrawn = LEFT if listing is None else listing.why_withdrawn
        if before != worker.why_withdrawn:
            log.info("%s at %s: %s", worker, worker.url, worker.why_withdrawn or "used again")
        # One that is not up is asked who it is by its next probe.
        if isinstance(worker.state, Up) and worker.why_withdrawn is not None:
            self._set_state(worker, Draining(worker.state.info))
        if listing is None:
            return
        role, url = worker.address.role, worker.address.url
        worker.address = WorkerAddress(url, listing.role, topology=listing.topology)
        if listing.role is not role:
            self._metrics.forget_worker(str(worker.url), role)
            self._note_available(worker)
            if worker.info is not None and (reason := why_not_used(worker.info, worker.address)):
                self._set_state(worker, Rejected(reason))

    def _set_state(self, worker: Worker, state: WorkerState) -> bool:
        """Whether it is another one than before; then log and count it."""
        before = worker.state
        if worker.is_gone or before == state:
            return False
        worker.state = state
        _log_change(worker, before, state)
        self._note_available(worker)
        if isinstance(state, Up):
            self._metrics.preregister(state.info.served_model_name)
        return True

    def _index(self) -> None:
        self._by_id = {w.info.worker: w for w in self.all if w.info is not None}
        self._make_fleet()

    def _note_available(self, worker: Worker) -> None:
        if worker.is_gone:
            return
        self._metrics.worker_up(str(worker.url), worker.address.role, up=worker.is_available)

    def _make_fleet_soon(self) -> None:
        """Of many workers, which come up together and report once a second, not for each anew."""
        if len(self.all) <= NUM_AT_ONCE:
            self._make_fleet()
        elif self._soon is None:
            loop = asyncio.get_running_loop()
            self._soon = loop.call_later(REPORTS_EVERY_S, self._make_fleet)

    def _make_fleet(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        fleet = Fleet.of(
            (w.view(w.info) for w in self.all if w.info is not None),
            tuple(
                f"the {w} {'has not come up' if isinstance(w.state, Pending) else 'is not used'}: "
                f"{_reason(w.state)}"
                for w in self.all
                if w.address.role is Role.PREFILL and w.info is None
            ),
        )
        self.fleet = fleet.beginning_at(self._first_share) if self._first_share else fleet
        self.on_change(self.fleet)


def _ignore(fleet: Fleet) -> None:
    """Of a change of the fleet for which nothing waits."""
    del fleet


def _name_of(state: WorkerState) -> str:
    return type(state).__name__.lower()


def _reason(state: WorkerState) -> str:
    match state:
        case Pending(reason) | Down(_, reason) | Rejected(reason):
            return reason
        case Draining(_, preemption):
            return "draining" if preemption is None else f"draining: {preemption.reason}"
        case Up():
            return "up"
        case _:
            assert_never(state)


def _log_health(worker: Worker) -> None:
    health = worker.health
    match health.state:
        case HealthState.EJECTED:
            log.warning("%s is ejected: %s", worker, health.reason)
        case HealthState.SUSPECTED:
            log.info("%s is suspected: nothing is received from it", worker)
        case HealthState.HALF_OPEN if health.takes_trial:
            log.info("%s gets one trial request", worker)
        case HealthState.RECOVERING:
            log.info("%s is back, with a share of the requests that grows", worker)
        case _:
            pass


def _log_change(worker: Worker, before: WorkerState, state: WorkerState) -> None:
    same_kind = type(before) is type(state)
    match state:
        case Up():
            if not same_kind:
                log.info("%s is up at %s", worker, worker.url)
        case Draining(_, preemption):
            if preemption is None:
                log.info("%s is draining", worker)
            else:
                log.warning("%s is draining: %s", worker, preemption.reason)
        case Down(_, reason):
            if not same_kind:
                log.warning("%s is down: %s", worker, reason)
        case Pending(reason):
            log.info("waiting for the %s worker at %s: %s", worker.address.role, worker.url, reason)
        case Rejected(reason):
            known = f" ({before.info.worker})" if isinstance(before, Up | Draining | Down) else ""
            log.error("the worker at %s%s is not used: %s", worker.url, known, reason)
        case _:
            assert_never(state)
