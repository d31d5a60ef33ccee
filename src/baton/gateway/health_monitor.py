"""Probes each worker: health, load, and now and then its identity.

A Baton worker is asked who it is at once, a vLLM server in three steps:

    /baton/v1/info ──200──► a Baton worker
          │404
    /v1/models (its model's name) ─► the discovery probe: a completion of one token, which Baton's
          connector answers with `baton_info` ─► its control server, asked for the same from then on

The probe costs the engine a step, so it is sent only to learn something new: who a server is, after
it came up or when its control server does not report it. That server only confirms: another
process may have taken its port.
"""

from __future__ import annotations

import asyncio
import json
import logging
from enum import Enum
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
from yarl import URL

from baton.errors import UNDECODABLE, BatonError, ProtocolError
from baton.gateway.errors import (
    UnusableWorkerError,
    UpstreamError,
    WorkerFailedError,
    WorkerLostError,
    WorkerUnreachableError,
)
from baton.gateway.upstream import read_error
from baton.gateway.workers import KV_ROLES, Down, Up, read_info, read_load, why_not_asked
from baton.protocol.worker_http import HEALTH_PATH, INFO_PATH, Role, WorkerInfo
from baton.router.health import EjectionCause, may_eject

if TYPE_CHECKING:
    from baton.auth.ticket import WorkerRef
    from baton.clock import Clock
    from baton.gateway.options import GatewayOptions
    from baton.gateway.upstream import Upstream
    from baton.gateway.workers import Worker, Workers
    from baton.ids import Epoch
    from baton.protocol.worker_http import WorkerLoad
    from baton.router.placement import Placement

PROBE_TIMEOUT_S: Final = 30.0
"""For one token: the first request of a vLLM server takes some seconds, and it may have others."""

COMPLETIONS: Final = "/v1/completions"

log = logging.getLogger(__name__)


class Incarnation(Enum):
    """What a vLLM server's control server reports about the known incarnation."""

    SAME = "same"
    ANOTHER = "another"
    UNKNOWN = "unknown"


class WorkerDiscovery:
    """Asks one worker who it is. Owner: the event loop's thread."""

    def __init__(self, worker: Worker, upstream: Upstream, timeout_s: float) -> None:
        self._worker, self._upstream, self._timeout_s = worker, upstream, timeout_s
        self._known_info: WorkerInfo | None = None
        self._unusable: str | None = None

    def forget_rejection(self) -> None:
        """It was away, and may come back as something that can be used."""
        self._unusable = None

    async def discover(self) -> WorkerInfo:
        """Learn who it is.

        Raises:
            UpstreamError: no answer.
            ProtocolError: an answer that the wire format does not allow.
            UnusableWorkerError: it is no worker of this cluster, and will not become one before
                somebody starts it again.
        """
        if self._unusable is not None:
            raise UnusableWorkerError(self._unusable)
        if self._known_info is not None and await self.check_incarnation() is Incarnation.SAME:
            return self._known_info
        status, body = await self._upstream.get(
            self._worker.url.with_path(INFO_PATH), self._timeout_s
        )
        match status:
            case HTTPStatus.OK:
                self._known_info = None
                return read_info(body)
            case HTTPStatus.NOT_FOUND:
                self._known_info = await self._discover_vllm()
                return self._known_info
            case HTTPStatus.UNAUTHORIZED:
                raise UpstreamError(_WRONG_KEY)
            case _:
                raise UpstreamError(f"{INFO_PATH} answered {status}: is this a Baton worker?")

    async def check_incarnation(self) -> Incarnation:
        """Whether a vLLM server is still in the life that we know; costs it nothing."""
        known = self._known_info
        if known is None:
            return Incarnation.UNKNOWN
        try:
            reply = await self._ask_control(known)
        except (UpstreamError, ProtocolError, UnusableWorkerError):
            return Incarnation.UNKNOWN
        is_same = (reply.worker, reply.epoch) == (known.worker, known.epoch)
        return Incarnation.SAME if is_same else Incarnation.ANOTHER

    async def _discover_vllm(self) -> WorkerInfo:
        try:
            info = await self._probe_vllm(await self._served_model())
            await self._check_control(info)
        except UnusableWorkerError as exc:
            self._unusable = str(exc)
            raise
        return info

    async def _served_model(self) -> str:
        status, body = await self._upstream.get(self._worker.url / "v1/models", self._timeout_s)
        match status:
            case HTTPStatus.OK:
                return _first_model(body)
            case HTTPStatus.UNAUTHORIZED:
                raise UnusableWorkerError(
                    "it asks for an API key that is not this cluster's; start it without "
                    "--api-key, or with the one that docs/vllm.md shows"
                )
            case _:
                raise UpstreamError(
                    f"neither {INFO_PATH} nor /v1/models exists there ({status}): "
                    "is this a Baton worker, or a vLLM server?"
                )

    async def _probe_vllm(self, model: str) -> WorkerInfo:
        url = self._worker.completion_urls[COMPLETIONS]
        probe = _DiscoveryProbe(model)
        status, body = await self._upstream.ask(url, msgspec.json.encode(probe), PROBE_TIMEOUT_S)
        if status != HTTPStatus.OK:
            raise UpstreamError(f"it answered {status} to the discovery probe: {read_error(body)}")
        try:
            reply = _discovery_reply_decoder.decode(body).kv_transfer_params
        except UNDECODABLE as exc:
            raise UnusableWorkerError(
                f"its answer to the discovery probe does not decode: {exc}"
            ) from exc
        if reply is None or reply.baton_info is None:
            raise UnusableWorkerError(
                "it runs without Baton's connector; if it is vLLM, start it with "
                f"--kv-transfer-config '{self._connector_config()}'"
            )
        if reply.baton_info.protocol != "vllm":
            raise UnusableWorkerError("its connector does not identify it as a vLLM server")
        return reply.baton_info

    def _connector_config(self) -> str:
        return json.dumps({
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "baton.engines.vllm",
            "kv_role": KV_ROLES[self._worker.address.role],
            "kv_load_failure_policy": "recompute",
        })

    async def _check_control(self, info: WorkerInfo) -> None:
        """Check now whether aborts can be sent to it, not when one is due."""
        if reason := why_not_asked(info, self._worker.url):
            raise UnusableWorkerError(reason)
        try:
            await self._ask_control(info)
        except (UpstreamError, ProtocolError) as exc:
            log.warning("%s does not receive aborts or answer for traces: %s", self._worker, exc)

    async def _ask_control(self, info: WorkerInfo) -> WorkerInfo:
        url = URL(info.control_urls[0]).with_path(INFO_PATH)
        status, body = await self._upstream.get(url, self._timeout_s)
        if status == HTTPStatus.UNAUTHORIZED:
            raise UnusableWorkerError(_WRONG_KEY)
        if status != HTTPStatus.OK:
            raise UpstreamError(f"{url} answered {status}")
        return read_info(body)


_WRONG_KEY: Final = (
    "it does not hold this cluster's key; give both processes the same BATON_CLUSTER_KEY"
)


class _InfoWanted(msgspec.Struct, frozen=True):
    baton_info: bool = True


class _DiscoveryProbe(msgspec.Struct, frozen=True):
    """The discovery probe."""

    model: str
    prompt: tuple[int, ...] = (0,)
    max_tokens: int = 1
    temperature: int = 0
    kv_transfer_params: _InfoWanted = _InfoWanted()


class _DiscoveryParams(msgspec.Struct, frozen=True):
    baton_info: WorkerInfo | None = None


class _DiscoveryReply(msgspec.Struct, frozen=True):
    kv_transfer_params: _DiscoveryParams | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


_discovery_reply_decoder = msgspec.json.Decoder(_DiscoveryReply)
_models_decoder = msgspec.json.Decoder(_Models)


def _first_model(body: bytes) -> str:
    """The served model's name; adapters come after it."""
    try:
        models = _models_decoder.decode(body).data
    except UNDECODABLE as exc:
        raise ProtocolError(f"its /v1/models does not decode: {exc}") from exc
    if not models:
        raise ProtocolError("its /v1/models is empty")
    return models[0].id


PROBES_WITHOUT: Final = 10
"""So many probes do not ask a control server that did not answer."""


class LoadReader:
    """Asks one worker. Owner: the event loop's thread."""

    def __init__(self, worker: Worker, upstream: Upstream, timeout_s: float) -> None:
        self._worker, self._upstream, self._timeout_s = worker, upstream, timeout_s
        self._num_to_skip = 0

    async def read(self, health: bytes) -> WorkerLoad | None:
        """The load in `health`, a healthy worker's answer; None if it reports none."""
        info = self._worker.info
        if info is None or info.protocol == "baton":
            return read_load(health)
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        # Whose address it is was checked before the worker came up.
        url = self._worker.control_urls[0].with_path(HEALTH_PATH)
        try:
            status, body = await self._upstream.get(url, self._timeout_s)
        except BatonError:
            self._num_to_skip = PROBES_WITHOUT
            return None
        return read_load(body) if status == HTTPStatus.OK else None


PROBES_PER_DISCOVERY: Final = 10


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
        self._loads = LoadReader(worker, upstream, options.probe_timeout_s)
        self._is_doubted = False
        self._num_probes = 0
        self._last_healthy_at = clock.now()
        self._wanted = asyncio.Event()
        self._refreshing = asyncio.Lock()

    async def run(self) -> None:
        """Probe until cancelled."""
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
            if not await self._is_healthy():
                self._workers.drain(self._worker)
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
        """It answered its probe; whether it may be used."""
        health = self._worker.health
        health.probe_ok(self._clock.now())
        self._workers.note_health(self._worker)
        return isinstance(self._worker.state, Up) or health.is_usable

    def _note_failure(self, error: BatonError, began_at: float) -> None:
        worker, now, reason = self._worker, self._clock.now(), str(error)
        if worker.info is None:
            self._workers.lose(worker, reason)
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
            self._settle(reason)
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

    def _settle(self, reason: str) -> None:
        """It is down by its probes, or if it was not up before they failed."""
        health = self._worker.health
        is_found_by_probes = health.cause not in {None, EjectionCause.FAILED}
        if is_found_by_probes or not isinstance(self._worker.state, Up):
            self._workers.lose(self._worker, reason)
        self._workers.note_health(self._worker)

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
        if is_another or isinstance(worker.state, Down):
            worker.health.recover(self._clock.now())
        self._workers.register(worker, found)
        self._workers.note_health(worker)

    async def _discover_if_due(self) -> None:
        is_doubted, self._is_doubted = self._is_doubted, False
        if (
            not isinstance(self._worker.state, Up)
            or not self._num_probes % PROBES_PER_DISCOVERY
            or (is_doubted and await self._discovery.check_incarnation() is Incarnation.ANOTHER)
        ):
            await self.discover()

    async def _is_healthy(self) -> bool:
        try:
            return await self._accepts_requests()
        except UpstreamError:
            self._discovery.forget_rejection()
            raise

    async def _accepts_requests(self) -> bool:
        status, body = await self._upstream.get(
            self._worker.url.with_path(HEALTH_PATH), self._timeout_s
        )
        match status:
            case HTTPStatus.OK:
                self._workers.note_load(self._worker, await self._loads.read(body))
                return True
            case HTTPStatus.SERVICE_UNAVAILABLE:
                info = self._worker.info
                if info is not None and info.protocol == "vllm" and not body:
                    raise UpstreamError("its engine died: /health answered 503")
                return False  # a Baton worker, or a vLLM server that Baton started, drains
            case _:
                raise UpstreamError(f"/health answered {status}: is this a Baton worker?")


def is_spare(worker: Worker, workers: Workers) -> bool:
    """Whether a worker may be ejected on a suspicion, because others can do its part.

    Without prefill workers decode computes prompts; without decode workers there is no answer.
    """
    info = worker.info
    if info is None or worker.address.role is Role.PREFILL:
        return True
    model = info.served_model_name
    return may_eject([w.health for w in workers.all if w is not worker and _decodes(w, model)])


def _decodes(worker: Worker, model: str) -> bool:
    """Whether a worker answers requests for a model, or would if it were not ejected."""
    match worker.state:
        case Up(info) | Down(info, _):
            return worker.address.role is not Role.PREFILL and info.served_model_name == model
        case _:
            return False


def is_own_fault(status: int) -> bool:
    """Whether an answer shows a fault of the worker: not of its request, and not a lack of room."""
    mild = {HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.SERVICE_UNAVAILABLE}
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and status not in mild


class HealthMonitor:
    """One prober for each worker."""

    def __init__(
        self, workers: Workers, upstream: Upstream, options: GatewayOptions, clock: Clock
    ) -> None:
        self._workers, self._clock = workers, clock
        self._probers = {w: Prober(w, workers, upstream, options, clock=clock) for w in workers.all}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to probe."""
        self._tasks = [asyncio.create_task(prober.run()) for prober in self._probers.values()]

    async def stop(self) -> None:
        """Stop probing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def report(self, worker: Worker | None, error: UpstreamError) -> None:
        """A request failed at this worker, and only a fault of its own counts.

        One that cannot be reached is down; one that broke off a single answer is asked how it is.
        """
        if worker is None:  # it is another one by now
            return
        if isinstance(error, WorkerUnreachableError | WorkerLostError):
            self._probers[worker].note_unanswered(error)
        elif isinstance(error, WorkerFailedError) and is_own_fault(error.answer.status):
            self.note_failed(worker, str(error))

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
                worker = self._workers.of(view)
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
        """A vLLM server did nothing with its ticket, maybe because it is in another life.

        It does not refuse a stale ticket as a Baton worker does: it computes without it.
        """
        self._probers[worker].doubt()

    async def refresh(self, stale: WorkerRef) -> None:
        """Learn the new epoch of a worker that refused a ticket for its life `stale`."""
        worker = self._workers.with_id(stale.worker)
        if worker is not None:
            await self._probers[worker].refresh(stale.epoch)
