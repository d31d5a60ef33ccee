"""The registry of workers: who is up, and since which epoch.

    Pending ──info──► Up ◄──► Draining
       │              │ ▲       │
       └─► Rejected   ▼ │info   │
                     Down ◄─────┘

Whatever changes a state goes through `Workers.change`, which logs it once, counts it and makes a
new `Fleet`.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from yarl import URL

from baton.errors import ModelNotFoundError
from baton.gateway.errors import NoWorkerError, WorkerLostError
from baton.gateway.request_context import Interruptible
from baton.gateway.worker_info import why_not_used, worker_view
from baton.router.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from baton.gateway.metrics import GatewayMetrics
    from baton.gateway.options import WorkerAddress
    from baton.ids import WorkerId
    from baton.protocol.worker_http import WorkerInfo, WorkerLoad
    from baton.router.fleet import WorkerView

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pending:
    """It has not identified itself yet; `reason` is why, as far as we know."""

    reason: str


@dataclass(frozen=True, slots=True)
class Up:
    """It answers."""

    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class Draining:
    """It finishes what it has, and takes no more."""

    info: WorkerInfo


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
    """One address on the operator's list."""

    def __init__(self, address: WorkerAddress) -> None:
        self.address = address
        self.url = URL(address.url).origin()
        self.completion_urls = {
            path: self.url.with_path(path) for path in ("/v1/chat/completions", "/v1/completions")
        }
        self.state: WorkerState = Pending("not asked yet")
        self.load: WorkerLoad | None = None
        self._cancel_scopes: set[Interruptible] = set()

    @contextmanager
    def cancel_scope(self) -> Generator[None]:
        """A stretch of one request that waits for this worker: `abandon` ends it."""
        with Interruptible() as scope:
            self._cancel_scopes.add(scope)
            try:
                yield
            finally:
                self._cancel_scopes.discard(scope)

    def abandon(self, reason: str) -> None:
        """Nothing more is expected of it: whoever waits for it gets a `WorkerLostError`."""
        for scope in self._cancel_scopes:
            scope.interrupt(WorkerLostError(f"{self} is given up: {reason}"))

    @property
    def info(self) -> WorkerInfo | None:
        """The last worker info that it reported."""
        match self.state:
            case Up(info) | Draining(info) | Down(info, _):
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


class Workers:
    """All workers on the operator's list. Owner: the event loop's thread."""

    def __init__(self, addresses: Iterable[WorkerAddress], metrics: GatewayMetrics) -> None:
        self.all = tuple(Worker(address) for address in addresses)
        self.fleet = Fleet()
        self._metrics = metrics
        self._by_id: dict[WorkerId, Worker] = {}
        for worker in self.all:
            metrics.worker_up(str(worker.url), worker.address.role, up=False)

    def of(self, view: WorkerView) -> Worker:
        """The worker behind a view of the current fleet."""
        return self._by_id[view.id]

    def with_id(self, worker: WorkerId) -> Worker | None:
        """The worker of that name, if there still is one."""
        return self._by_id.get(worker)

    def why_not_served(self, model: str) -> NoWorkerError | ModelNotFoundError:
        """The error for a client that names a model of which no worker has ever been seen."""
        if not self.fleet.models:
            waiting = ", ".join(str(worker) for worker in self.all)
            return NoWorkerError(f"no worker has come up yet; waiting for: {waiting}")
        served = ", ".join(repr(name) for name in sorted(self.fleet.models))
        return ModelNotFoundError(
            f"the model {model!r} is not served here; served: {served}", param="model"
        )

    def why_not_ready(self) -> str:
        """What is being waited for, one clause for each worker that is not up."""
        return "; ".join(
            f"{worker}: {_reason(worker.state)}"
            for worker in self.all
            if not isinstance(worker.state, Up)
        )

    def context_lengths(self) -> dict[str, int]:
        """For each served model, how many tokens the least of its workers has room for."""
        lengths: dict[str, int] = {}
        for worker in self.all:
            if isinstance(worker.state, Up):
                info = worker.state.info
                known = lengths.get(info.served_model_name, info.max_context_tokens)
                lengths[info.served_model_name] = min(known, info.max_context_tokens)
        return lengths

    def register(self, worker: Worker, info: WorkerInfo) -> None:
        """It identified itself: it is up, unless it cannot be used as listed."""
        reason = why_not_used(info, worker.address)
        namesake = self._by_id.get(info.worker, worker)
        if namesake is not worker:
            reason = f"{namesake.url} is called {info.worker} already; give each worker a name"
        if reason is not None:
            self.reject(worker, reason)
            return
        before = worker.info
        if before is not None and before.epoch != info.epoch:
            log.warning("%s began another life: epoch %s → %s", worker, before.epoch, info.epoch)
        self.change(worker, Up(info))

    def lose(self, worker: Worker, reason: str) -> None:
        """It did not answer."""
        info = worker.info
        self.change(worker, Pending(reason) if info is None else Down(info, reason))

    def reject(self, worker: Worker, reason: str) -> None:
        """It answered, and cannot be used."""
        self.change(worker, Rejected(reason))

    def drain(self, worker: Worker) -> None:
        """It reported that it takes no more requests."""
        if worker.info is not None:
            self.change(worker, Draining(worker.info))

    def note_load(self, worker: Worker, load: WorkerLoad | None) -> None:
        """It reported its load."""
        if worker.load != load:
            worker.load = load
            self._make_fleet()

    def change(self, worker: Worker, state: WorkerState) -> None:
        """Set the state; update fleet and metrics if it changed."""
        before, worker.state = worker.state, state
        if before == state:
            return
        _log_change(worker, before, state)
        self._by_id = {w.info.worker: w for w in self.all if w.info is not None}
        self._make_fleet()
        self._metrics.worker_up(str(worker.url), worker.address.role, up=isinstance(state, Up))
        if isinstance(state, Up):
            self._metrics.preregister(state.info.served_model_name)

    def _make_fleet(self) -> None:
        self.fleet = Fleet.of(
            worker_view(w.info, w.address.role, available=isinstance(w.state, Up), load=w.load)
            for w in self.all
            if w.info is not None
        )


def _reason(state: WorkerState) -> str:
    match state:
        case Pending(reason) | Down(_, reason) | Rejected(reason):
            return reason
        case Draining():
            return "draining"
        case Up():
            return "up"
        case _:
            assert_never(state)


def _log_change(worker: Worker, before: WorkerState, state: WorkerState) -> None:
    same_kind = type(before) is type(state)
    match state:
        case Up():
            if not same_kind:
                log.info("%s is up at %s", worker, worker.url)
        case Draining():
            log.info("%s is draining", worker)
        case Down(_, reason):
            if not same_kind:
                log.warning("%s is down: %s", worker, reason)
        case Pending(reason):
            log.info("waiting for the %s worker at %s: %s", worker.address.role, worker.url, reason)
        case Rejected(reason):
            log.error("the worker at %s is not used: %s", worker.url, reason)
        case _:
            assert_never(state)
