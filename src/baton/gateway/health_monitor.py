"""Probes each worker: health, load, and now and then its identity."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.errors import BatonError, ProtocolError
from baton.gateway.errors import (
    UnusableWorkerError,
    UpstreamError,
    WorkerLostError,
    WorkerUnreachableError,
)
from baton.gateway.worker_discovery import Incarnation, WorkerDiscovery
from baton.gateway.worker_info import read_load
from baton.gateway.workers import Up
from baton.protocol.worker_http import HEALTH_PATH

if TYPE_CHECKING:
    from baton.auth.ticket import WorkerRef
    from baton.gateway.options import GatewayOptions
    from baton.gateway.upstream import Upstream
    from baton.gateway.workers import Worker, Workers
    from baton.ids import Epoch
    from baton.protocol.worker_http import WorkerLoad


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


NUM_FAILURES_TO_LOSE: Final = 2
PROBES_PER_DISCOVERY: Final = 10

log = logging.getLogger(__name__)


class Prober:
    """Keeps one worker's state true.

    A worker that is up is asked for its health, and now and then who it is (it may have restarted
    between two probes); any other is asked who it is. Owner: the event loop's thread.
    """

    def __init__(
        self, worker: Worker, workers: Workers, upstream: Upstream, options: GatewayOptions
    ) -> None:
        self._worker, self._workers, self._upstream = worker, workers, upstream
        self._interval_s, self._timeout_s = options.probe_interval_s, options.probe_timeout_s
        self._abandon_after_s = options.abandon_after_s
        self._discovery = WorkerDiscovery(worker, upstream, options.probe_timeout_s)
        self._loads = LoadReader(worker, upstream, options.probe_timeout_s)
        self._is_doubted = False
        self._num_failures = 0
        self._num_probes = 0
        self._last_healthy_at = asyncio.get_running_loop().time()
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

    def suspect(self) -> None:
        """A request failed there: ask now, and believe one failure more."""
        self._num_failures += 1
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
                    self._workers.lose(self._worker, str(exc))

    async def probe(self) -> None:
        """Ask once, and note the answer."""
        self._num_probes += 1
        try:
            if await self._is_healthy():
                await self._discover_if_due()
            else:
                self._workers.drain(self._worker)
        except UnusableWorkerError as exc:
            self._workers.reject(self._worker, str(exc))
        except ProtocolError as exc:
            self._workers.lose(self._worker, str(exc))
        except BatonError as exc:
            self._num_failures += 1
            if not isinstance(self._worker.state, Up) or self._num_failures >= NUM_FAILURES_TO_LOSE:
                self._workers.lose(self._worker, str(exc))
            self._abandon_if_due(str(exc))
        else:
            self._num_failures = 0
            self._last_healthy_at = asyncio.get_running_loop().time()

    def _abandon_if_due(self, reason: str) -> None:
        """A process that hangs keeps its connections: without this, clients would wait for it."""
        silent_s = asyncio.get_running_loop().time() - self._last_healthy_at
        if silent_s >= self._abandon_after_s:
            self._worker.abandon(f"not well for {silent_s:.0f} s: {reason}")

    async def discover(self) -> None:
        """Ask the worker who it is.

        Raises:
            UpstreamError, ProtocolError, UnusableWorkerError: see `WorkerDiscovery.discover`.
        """
        self._workers.register(self._worker, await self._discovery.discover())

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


class HealthMonitor:
    """One prober for each worker."""

    def __init__(self, workers: Workers, upstream: Upstream, options: GatewayOptions) -> None:
        self._workers = workers
        self._probers = {w: Prober(w, workers, upstream, options) for w in workers.all}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to probe."""
        self._tasks = [asyncio.create_task(prober.run()) for prober in self._probers.values()]

    async def stop(self) -> None:
        """Stop probing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def report(self, worker: Worker, error: UpstreamError) -> None:
        """A request failed at this worker.

        One that cannot be reached is down; one that broke off a single answer is asked how it is.
        """
        if isinstance(error, WorkerUnreachableError):
            self._workers.lose(worker, str(error))
        if isinstance(error, WorkerUnreachableError | WorkerLostError):
            self._probers[worker].suspect()

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
