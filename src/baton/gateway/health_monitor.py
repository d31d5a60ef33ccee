"""Probes each worker, and takes note of its requests: both show whether it can be relied on.

What follows from that is decided in `baton.router.health`.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UnsetType

from baton.clock import Clock, Instant
from baton.errors import UNDECODABLE, BatonError, ProtocolError
from baton.gateway.errors import (
    UnusableWorkerError,
    UpstreamError,
    WorkerFailedError,
    WorkerLostError,
    WorkerUnreachableError,
)
from baton.gateway.worker_discovery import IncarnationCheck, LoadReader, WorkerDiscovery
from baton.gateway.workers import NUM_AT_ONCE, Down, Preemption, Up, Worker, Workers
from baton.protocol.worker_http import HEALTH_PATH, MAX_REASON_CHARS, Health, Role
from baton.router.health import EjectionCause, may_eject

if TYPE_CHECKING:
    from baton.auth.ticket import WorkerRef
    from baton.gateway.options import GatewayOptions
    from baton.gateway.upstream import Upstream
    from baton.ids import Epoch
    from baton.router.placement import Placement

log = logging.getLogger(__name__)

PROBES_PER_DISCOVERY: Final = 10
_health_decoder = msgspec.json.Decoder(Health)


class Prober:
    """Keeps one worker's state true.

    A worker that is up is asked for its health, and now and then who it is (it may have restarted
    between two probes); any other is asked who it is. Owner: the event loop's thread.
    """

    def __init__(
        self,
        worker: Worker,
        workers: Workers,
        upstream: Upstream,
        options: GatewayOptions,
        *,
        clock: Clock,
    ) -> None:
        self._worker, self._workers, self._upstream = worker, workers, upstream
        self._clock = clock
        self._interval_s, self._timeout_s = options.probe_interval_s, options.probe_timeout_s
        self._abandon_after_s = options.abandon_after_s
        self._discovery = WorkerDiscovery(worker, upstream, options.probe_timeout_s)
        self._loads = LoadReader(worker, upstream, options.probe_timeout_s, clock)
        self._is_doubted = False
        self._num_probes = 0
        self._last_healthy_at = clock.now()
        self._wanted = asyncio.Event()
        self._refreshing = asyncio.Lock()

    async def run(self, begins_after_s: float) -> None:
        """Probe until cancelled."""
        await asyncio.sleep(begins_after_s)
        while True:
            try:
                await self.probe()
            except Exception:
                log.exception("probing %s failed; trying again", self._worker)
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wanted.wait()
            except TimeoutError:
                continue
            self._wanted.clear()

    def ask_now(self) -> None:
        """A request failed there."""
        self._wanted.set()

    def doubt(self) -> None:
        """A message to it had no effect: check, at the next probe, whether it restarted."""
        self._is_doubted = True

    async def refresh(self, stale: Epoch) -> None:
        """Learn the worker's new epoch, once for all requests that met the old one."""
        async with self._refreshing:
            if self._worker.info is None or self._worker.info.epoch == stale:
                try:
                    await self.discover()
                except UnusableWorkerError as exc:
                    self._workers.reject(self._worker, str(exc))
                except BatonError as exc:
                    self._lose(EjectionCause.UNWELL, str(exc))

    async def probe(self) -> None:
        """Ask once, and note the answer."""
        self._num_probes += 1
        began_at, num_reads = self._clock.now(), self._upstream.num_reads(self._worker.url)
        try:
            if (drain := await self._ask_drain()) is not None:
                self._workers.drain(self._worker, self._read_preemption(drain))
            elif self._note_healthy():
                await self._discover_if_due()
        except UnusableWorkerError as exc:
            self._workers.reject(self._worker, str(exc))
        except ProtocolError as exc:
            self._lose(EjectionCause.UNWELL, str(exc))
        except BatonError as exc:
            if self._upstream.num_reads(self._worker.url) != num_reads:
                self._worker.health.active_at = self._clock.now()
            self._note_failure(exc, began_at)
        else:
            self._last_healthy_at = self._clock.now()

    def _note_healthy(self) -> bool:
        """It answered its probe; whether it may be asked who it is.

        Requests that failed are no reason against that: only one that is up gets a trial request.
        """
        health = self._worker.health
        health.probe_ok(self._clock.now())
        self._workers.note_health(self._worker)
        is_up = isinstance(self._worker.state, Up)
        return is_up or health.is_usable or health.cause is EjectionCause.FAILED

    def _note_failure(self, error: BatonError, began_at: float) -> None:
        worker, now, reason = self._worker, self._clock.now(), str(error)
        if worker.info is None:
            self._note_unusable(error)
        else:
            match error:
                case WorkerUnreachableError(is_refused=True):
                    worker.health.lose(EjectionCause.GONE, now, reason)
                case WorkerUnreachableError(is_late=True):
                    if worker.health.active_at >= began_at:
                        self._last_healthy_at = now
                    may_eject = is_spare(worker, self._workers)
                    worker.health.probe_late(began_at, now, reason, may_eject=may_eject)
                case _:
                    worker.health.probe_failed(now, reason)
            self._settle(error)
        silent_s = now - self._last_healthy_at
        if silent_s >= self._abandon_after_s:
            self._abandon(f"not well for {silent_s:.0f} s: {reason}")

    def _abandon(self, reason: str) -> None:
        """A process that hangs keeps its connections: without this, clients would wait for it."""
        if isinstance(self._worker.state, Up):  # it was late, and could not be spared
            self._lose(EjectionCause.UNWELL, reason)
        self._worker.abandon(reason)

    def _lose(self, cause: EjectionCause, reason: str) -> None:
        """It is certainly not usable."""
        if self._worker.info is not None:
            self._worker.health.lose(cause, self._clock.now(), reason)
        self._workers.lose(self._worker, reason)
        self._workers.note_health(self._worker)

    def _settle(self, error: BatonError) -> None:
        """It is not usable by its probes, or if it was not up before they failed."""
        health = self._worker.health
        is_found_by_probes = health.cause not in {None, EjectionCause.FAILED}
        if is_found_by_probes or not isinstance(self._worker.state, Up):
            self._note_unusable(error)
        self._workers.note_health(self._worker)

    def _note_unusable(self, error: BatonError) -> None:
        """It is down; or what answers there is not of this cluster, which an operator must mend."""
        if isinstance(error, WorkerUnreachableError) and error.is_untrusted:
            self._workers.reject(self._worker, str(error))
        else:
            self._workers.lose(self._worker, str(error))

    def note_unanswered(self, error: UpstreamError) -> None:
        """A request found no connection, or its answer broke off."""
        worker, now, reason = self._worker, self._clock.now(), str(error)
        if isinstance(error, WorkerUnreachableError) and not error.is_late:
            self._lose(EjectionCause.GONE, reason)
        else:
            worker.health.suspect()
            worker.health.failed(now, reason, may_eject=is_spare(worker, self._workers))
            self._workers.note_health(worker)
        self._wanted.set()

    async def discover(self) -> None:
        """Ask the worker who it is.

        Raises:
            UpstreamError, ProtocolError, UnusableWorkerError: see `WorkerDiscovery.discover`.
        """
        worker, found = self._worker, await self._discovery.discover()
        before = worker.info
        is_another = before is not None and before.epoch != found.epoch
        has_failed = worker.health.cause is EjectionCause.FAILED
        if is_another or (isinstance(worker.state, Down) and not has_failed):
            worker.health.recover(self._clock.now())
        self._workers.register(worker, found, self._discovery.adapters)
        self._workers.note_health(worker)

    async def _discover_if_due(self) -> None:
        is_doubted, self._is_doubted = self._is_doubted, False
        if (
            not isinstance(self._worker.state, Up)
            or not self._num_probes % PROBES_PER_DISCOVERY
            or (
                is_doubted and await self._discovery.check_incarnation() is IncarnationCheck.ANOTHER
            )
        ):
            await self.discover()

    def _read_preemption(self, drain: Health) -> Preemption | None:
        if isinstance(drain.preempted_in_s, UnsetType):
            return None
        at = Instant(self._clock.now() + drain.preempted_in_s)
        return Preemption((drain.reason or "")[:MAX_REASON_CHARS], at)

    async def _ask_drain(self) -> Health | None:
        """Why it takes no requests; None: it does."""
        try:
            return await self._ask_health()
        except UpstreamError:
            self._discovery.forget_rejection()
            raise

    async def _ask_health(self) -> Health | None:
        sent_at = self._clock.now()
        status, body = await self._upstream.get(
            self._worker.url.with_path(HEALTH_PATH), self._timeout_s
        )
        match status:
            case HTTPStatus.OK:
                self._workers.note_report(self._worker, await self._loads.read(body, sent_at))
                return None
            case HTTPStatus.SERVICE_UNAVAILABLE:
                info = self._worker.info
                if info is not None and info.protocol == "vllm" and not body:
                    raise UpstreamError("its engine died: /health answered 503")
                return _read_health(body)  # a Baton worker, or a vLLM server that Baton started
            case _:
                raise UpstreamError(f"/health answered {status}: is this a Baton worker?")


def _read_health(body: bytes) -> Health:
    try:
        return _health_decoder.decode(body)
    except UNDECODABLE:
        return Health("draining")


def is_spare(worker: Worker, workers: Workers) -> bool:
    """Whether a worker may be ejected on a suspicion, because others can do its part.

    Without prefill workers decode computes prompts; without decode workers there is no answer.
    """
    info = worker.info
    if info is None or worker.address.role is Role.PREFILL:
        return True
    model = info.served_model_name
    return may_eject([w.health for w in workers.all if w is not worker and _decodes(w, model)])


def has_substitute(worker: Worker, workers: Workers) -> bool:
    """Whether requests of a worker that is certainly silent can go on without it."""
    info = worker.info
    if info is None or worker.address.role is Role.PREFILL:
        return True
    model = info.served_model_name
    return any(w.is_available and _decodes(w, model) for w in workers.all if w is not worker)


def _decodes(worker: Worker, model: str) -> bool:
    """Whether a worker answers requests for a model, or would if it were not ejected."""
    match worker.state:
        case Up(info) | Down(info, _):
            return worker.address.role is not Role.PREFILL and info.served_model_name == model
        case _:
            return False


def is_own_fault(status: int) -> bool:
    """Whether an answer shows a fault of the worker: not of its request, no lack of room, time."""
    mild = {
        HTTPStatus.NOT_IMPLEMENTED,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and status not in mild


class HealthMonitor:
    """One prober for each worker."""

    def __init__(
        self, workers: Workers, upstream: Upstream, options: GatewayOptions, clock: Clock
    ) -> None:
        self._workers, self._upstream, self._options = workers, upstream, options
        self._clock = clock
        self._probers: dict[Worker, Prober] = {}
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    def update(self) -> None:
        """Probe the workers that the registry has now, and no others.

        Many that are new are probed one after the other, over an interval: their handshakes all at
        once, and their probes from then on, would delay streams.
        """
        new = [worker for worker in self._workers.all if worker not in self._probers]
        apart_s = self._options.probe_interval_s / len(new) if len(new) > NUM_AT_ONCE else 0.0
        for at, worker in enumerate(new):
            prober = Prober(worker, self._workers, self._upstream, self._options, clock=self._clock)
            self._probers[worker] = prober
            self._tasks[worker] = asyncio.create_task(prober.run(at * apart_s))
        for worker in [worker for worker in self._probers if worker.is_gone]:
            del self._probers[worker]
            self._tasks.pop(worker).cancel()

    async def stop(self) -> None:
        """Stop probing."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def report(self, worker: Worker | None, error: UpstreamError) -> None:
        """A request failed at this worker, and only a fault of its own counts.

        One that cannot be reached is down; one that broke off a single answer is asked how it is.
        """
        prober = None if worker is None else self._probers.get(worker)
        if worker is None or prober is None:  # it is another one by now, or gone
            return
        if isinstance(error, WorkerUnreachableError | WorkerLostError):
            prober.note_unanswered(error)
        elif isinstance(error, WorkerFailedError) and is_own_fault(error.answer.status):
            self.note_failed(worker, str(error))

    def ask_now(self, worker: Worker) -> None:
        """Probe it now."""
        if (prober := self._probers.get(worker)) is not None:
            prober.ask_now()

    def note_failed(self, worker: Worker, reason: str) -> None:
        """It answered a request with an error that is its own fault."""
        may_eject = is_spare(worker, self._workers)
        worker.health.failed(self._clock.now(), reason, may_eject=may_eject)
        self._workers.note_health(worker)

    def note_answered(self, worker: Worker) -> None:
        """It answered a request as it should."""
        health = worker.health
        if health.num_failed_requests or health.cause is not None:
            health.answered(self._clock.now())
            self._workers.note_health(worker)

    def begin(self, placement: Placement) -> None:
        """A request was placed: it may be a worker's trial."""
        for view in (placement.decode, placement.prefill):
            if view is not None and view.half_open:
                worker = self._workers.with_id(view.id)
                if worker is not None:
                    worker.health.begin_trial(self._clock.now())
                    self._workers.note_health(worker)

    def end(self, placement: Placement) -> None:
        """That attempt is over."""
        for view in (placement.decode, placement.prefill):
            if view is not None and view.half_open:
                worker = self._workers.with_id(view.id)
                if worker is not None:
                    worker.health.end_trial()
                    self._workers.note_health(worker)

    def doubt(self, worker: Worker) -> None:
        """A vLLM server did nothing with its ticket, maybe because it is in another incarnation.

        It does not refuse a stale ticket as a Baton worker does: it computes without it.
        """
        if (prober := self._probers.get(worker)) is not None:
            prober.doubt()

    async def refresh(self, stale: WorkerRef) -> None:
        """Learn the new epoch of a worker that refused a ticket for its incarnation `stale`."""
        worker = self._workers.with_id(stale.worker)
        prober = None if worker is None else self._probers.get(worker)
        if prober is not None:
            await prober.refresh(stale.epoch)
