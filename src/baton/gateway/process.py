"""The gateway's process: its socket, its server, its end.

bind ─► serve (announced) ──SIGTERM──► drain ─► exit 0
                                         └──another signal──► exit at once
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING, Final

import uvicorn
import uvloop
from prometheus_client import disable_created_metrics

from baton.clock import MachineClock
from baton.errors import ConfigError
from baton.gateway.app import GatewayApp, Readiness
from baton.gateway.completions import Completions
from baton.gateway.debug import RequestHistory, RequestTraces, WorkerList
from baton.gateway.health_monitor import HealthMonitor
from baton.gateway.kv_events import KVEvents
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.request_context import BackgroundTasks, Fallbacks, Services
from baton.gateway.upstream import Upstream
from baton.gateway.workers import Workers
from baton.router.round_robin import RoundRobin
from baton.telemetry.process_status import Ready, StatusReporter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from baton.clock import Clock
    from baton.gateway.options import GatewayOptions

BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 75

log = logging.getLogger(__name__)


def run_gateway(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT. Blocks; belongs on the main thread.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series
    with (
        contextlib.closing(bind(options)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(options, listener))


def bind(options: GatewayOptions) -> socket.socket:
    """The listening socket.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        where = f"{options.host}:{options.port}"
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{where} is taken by another process; stop it or choose another --port"
            ) from exc
        raise ConfigError(f"cannot listen on {where}: {exc.strerror}") from exc
    listener.settimeout(0)
    return listener


@contextlib.asynccontextmanager
async def open_gateway(options: GatewayOptions, clock: Clock) -> AsyncGenerator[GatewayApp]:
    """The ASGI application with its probes and connections, for as long as the block runs."""
    metrics = GatewayMetrics()
    workers = Workers(options.workers, metrics)
    upstream = Upstream(options)
    health_monitor = HealthMonitor(workers, upstream, options)
    services = Services(
        options=options,
        clock=clock,
        metrics=metrics,
        workers=workers,
        health_monitor=health_monitor,
        upstream=upstream,
        placement=RoundRobin(options.mode),
        fallbacks=Fallbacks(metrics, clock),
        background_tasks=BackgroundTasks(),
    )
    records = RequestHistory(options.num_records)
    events = KVEvents(workers, metrics, clock)
    await upstream.open()
    health_monitor.start()
    events.start()
    try:
        traces = RequestTraces(records, workers, upstream)
        worker_list = WorkerList(workers, events)
        yield GatewayApp(
            Completions(services, records),
            workers,
            metrics,
            traces=traces,
            worker_list=worker_list,
            readiness=Readiness(workers, clock),
        )
    finally:
        await health_monitor.stop()
        await services.background_tasks.stop()
        await events.stop()
        await upstream.close()


async def _serve(options: GatewayOptions, listener: socket.socket) -> None:
    async with open_gateway(options, MachineClock()) as app:
        server = _Server(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                interface="asgi3",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(options.drain_timeout_s)),
            ),
            Ready(_url_of(listener, options)),
            StatusReporter(options.status_fd),
        )
        await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn, with an status line and with signals that end in exit code 0."""

    def __init__(
        self, config: uvicorn.Config, ready: Ready, status_reporter: StatusReporter
    ) -> None:
        super().__init__(config)
        self._ready, self._status_reporter = ready, status_reporter

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept, then report it."""
        await super().startup(sockets=sockets)
        self._status_reporter.report(self._ready)
        log.info("listening on %s", self._ready.url)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Take signals through the event loop, and do not raise them again at the end."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if self.should_exit:
            log.warning("a second signal: leaving at once")
            os._exit(128 + number)
        log.info("signal %s: no more requests, draining", signal.Signals(number).name)
        self.should_exit = True


def _url_of(listener: socket.socket, options: GatewayOptions) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{listener.getsockname()[1]}"
