"""The gateway's process: its socket, its server, its end.

bind ─► serve (announced) ──SIGTERM──► drain ─► exit 0
                                         └──another signal──► exit at once (`ignore_relayed`)
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvicorn
import uvloop
from prometheus_client import disable_created_metrics

from baton.auth.ticket import TicketIssuer
from baton.clock import Clock, MachineClock
from baton.config.cluster_key import is_loopback
from baton.gateway.admission import Admission
from baton.gateway.alerts.monitor import AlertMonitor
from baton.gateway.alerts.sources import AlertSources
from baton.gateway.app import (
    Access,
    DebugPages,
    GatewayApp,
    ManagementApp,
    Readiness,
    RequestOrigin,
)
from baton.gateway.audit import AuditLog
from baton.gateway.clients import Clients
from baton.gateway.completions import Completions
from baton.gateway.dashboard.pages import open_dashboard
from baton.gateway.dashboard.snapshot import SnapshotPages
from baton.gateway.debug import LinkList, WorkerList
from baton.gateway.demand_page import DemandPage
from baton.gateway.health_monitor import HealthMonitor
from baton.gateway.kv_events import KVEvents
from baton.gateway.learned_costs import keep_costs
from baton.gateway.link_feed import LinkFeed
from baton.gateway.management_key import ManagementKey
from baton.gateway.members.listener import open_announcements
from baton.gateway.members.membership import Membership
from baton.gateway.metrics import GatewayMetrics, HealthCollector, RouterCollector
from baton.gateway.prefixes import Prefixes
from baton.gateway.process_group import ProcessGroup
from baton.gateway.queue_page import QueuePage
from baton.gateway.request_context import BackgroundTasks, Fallbacks, Services
from baton.gateway.request_history import RequestHistory
from baton.gateway.request_pages import open_request_pages
from baton.gateway.request_traces import RequestTraces
from baton.gateway.retries import Retries
from baton.gateway.route_explainer import RouteExplainer
from baton.gateway.running_streams import RunningStreams
from baton.gateway.silence_monitor import SilenceMonitor
from baton.gateway.stream_moves import StreamMoves
from baton.gateway.stream_record import RecordBudget
from baton.gateway.tail_sampling import make_head_sampler
from baton.gateway.transfer_feed import TransferFeed
from baton.gateway.transfer_page import TransferPage
from baton.gateway.upstream import Upstream
from baton.gateway.waiting import WaitingRequests
from baton.gateway.workers import Workers
from baton.net.http_limits import Connections, HttpLimits, allow_descriptors
from baton.net.http_server import (
    bind,
    count_refusals,
    end_signals,
    ignore_relayed,
    inherit,
    is_listening,
    make_server_config,
    serve_beside,
    start_listening,
    url_of,
)
from baton.net.tls import ServerTls
from baton.protocol.gateway_http import DASHBOARD_PATH
from baton.router.failover import RetryBudget
from baton.router.load import FleetLoad
from baton.router.room import FleetRoom
from baton.telemetry.process_status import Draining, Ready, StatusReporter

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Generator

    from baton.gateway.members.announced import AnnouncedWorkers
    from baton.gateway.options import GatewayOptions

M_MMAP_THRESHOLD: Final = -3
LARGE_BYTES: Final = 128 << 10
"""Parts of a body that are received at once have up to 256 KiB."""
YOUNG_OBJECTS: Final = 10_000
"""Made before the garbage collector looks at them: requests leave none to it, so it may wait."""
FIND_WORKERS_S: Final = 3.0
"""How long a gateway that replaces another may look for its workers before it accepts."""
LAST_REQUEST_S: Final = 1.0
"""How long a client may make one more request on a connection of a gateway that ends, if a launcher
has another one: a request that is on its way is answered."""
TICK_S: Final = 1.0
MANAGEMENT_LIMITS: Final = HttpLimits(max_connections=64, max_connections_per_address=64)

log = logging.getLogger(__name__)


def run_gateway(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT. Blocks; belongs on the main thread.

    Raises:
        ConfigError: the address cannot be listened on.
        MemberFailedError: of several processes, some ended and could not be replaced.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series
    _give_large_bodies_back()
    if options.processes > 1:
        ProcessGroup(options, MachineClock(), _run_server).run()
        return
    with contextlib.closing(_open_listener(options)) as listener:
        _run_server(options, listener)


def _open_listener(options: GatewayOptions) -> socket.socket:
    if options.listen_fds:
        return inherit(options.listen_fds[0])
    return bind(options.host, options.port)


def _run_server(options: GatewayOptions, listener: socket.socket) -> None:
    # One that replaces another has clients already, which could be served elsewhere.
    find_workers_s = FIND_WORKERS_S if is_listening(listener) else 0.0
    start_listening(listener)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options, listener, find_workers_s))


def _give_large_bodies_back() -> None:
    """Have the C library map large blocks one by one, so that their memory is free at once.

    By itself it keeps some, once large blocks were freed (mallopt(3), M_MMAP_THRESHOLD).
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


@contextlib.asynccontextmanager
async def open_gateway(options: GatewayOptions, clock: Clock) -> AsyncGenerator[GatewayApp]:
    """The ASGI application with its probes and connections, for as long as the block runs."""
    async with open_parts(options, clock) as (app, _):
        yield app


@contextlib.asynccontextmanager
async def open_parts(
    options: GatewayOptions, clock: Clock
) -> AsyncGenerator[tuple[GatewayApp, Services]]:
    """The same, and what it is made of."""
    metrics, load = GatewayMetrics(), FleetLoad()
    room = FleetRoom(load, options.max_running_per_worker)
    workers = Workers(
        options.addresses,
        metrics,
        options.health,
        on_load=(load.note_report, room.note_report),
        first_share=options.first_share,
    )
    waiting = WaitingRequests(workers, metrics, clock, options.wait_for_worker_s)
    admission = Admission(options, clock, metrics, waiting=waiting, load=load, room=room)
    metrics.registry.register(RouterCollector(load, workers))
    metrics.registry.register(HealthCollector(workers))
    upstream = Upstream(options)
    health_monitor = HealthMonitor(workers, upstream, options, clock)
    policy, keys_file = options.build_policy(), options.client_keys_file
    prefixes = (
        Prefixes(workers, options.tokenizers, clock, metrics.registry)
        if policy.uses_prefixes
        else None
    )
    services = Services(
        options=options,
        clock=clock,
        metrics=metrics,
        workers=workers,
        health_monitor=health_monitor,
        waiting=waiting,
        upstream=upstream,
        placement=policy,
        load=load,
        admission=admission,
        prefixes=prefixes,
        fallbacks=Fallbacks(metrics, clock),
        background_tasks=BackgroundTasks(),
        ticket_issuer=TicketIssuer(clock),
        retries=Retries(RetryBudget(options.retry_budget, clock.now()), metrics, clock),
        clients=Clients(Path(keys_file) if keys_file else None, clock),
        audit=AuditLog(Path(options.audit_log)) if options.audit_log else None,
        stream_records=RecordBudget(options.max_total_record_bytes),
        streams=RunningStreams(),
        head_sampler=make_head_sampler(options.trace.sample_share),
    )
    records = RequestHistory(options.trace.ring_size)
    events = KVEvents(workers, metrics, clock, upstream=upstream, prefixes=prefixes)
    services.background_tasks.run(StreamMoves(services, records).run())
    events.start()
    try:
        async with (
            keep_costs(options.costs_file, load),
            open_announcements(options, clock, metrics.registry) as announced,
            Membership(services, events, room, options.build_sources(clock, announced)),
            LinkFeed(workers, upstream, load, clock),
            _open_app(services, records, events, room) as app,
        ):
            _watch(announced, services)
            yield app, services
    finally:
        await services.background_tasks.stop()
        await events.stop()
        if prefixes is not None:
            prefixes.close()
        upstream.close()
        if services.audit is not None:
            services.audit.close()


@contextlib.asynccontextmanager
async def _open_app(
    services: Services, records: RequestHistory, events: KVEvents, room: FleetRoom
) -> AsyncGenerator[GatewayApp]:
    """The application, with what reads workers' reports for its pages."""
    options, clock, load = services.options, services.clock, services.load
    workers, upstream, metrics = services.workers, services.upstream, services.metrics
    completions, key_file = Completions(services, records), options.management_key_file
    key = ManagementKey.read(Path(key_file)) if key_file else None
    async with (
        TransferFeed(workers, upstream, clock) as transfers,
        AlertMonitor(
            options.alerts,
            AlertSources(
                options,
                workers,
                load,
                transfers,
                prefixes=services.prefixes,
                targets=metrics.targets,
            ),
            metrics.registry,
            clock,
        ) as alerts,
        open_request_pages(
            options.trace,
            records,
            RequestTraces(workers, upstream, load, clock, transfers=transfers),
            clock=clock,
            metrics=metrics.traces,
        ) as requests,
    ):
        pages = SnapshotPages(
            WorkerList(workers, events, load, clock),
            QueuePage(services.admission, room, load, workers=workers, clock=clock),
            LinkList(workers, load),
            TransferPage(transfers, clock),
            alerts,
        )
        async with open_dashboard(pages, services, records, completions) as dashboard:
            yield GatewayApp(
                completions,
                workers,
                metrics,
                debug=DebugPages(
                    requests,
                    pages.workers,
                    pages.queue,
                    RouteExplainer(services),
                    pages.links,
                    DemandPage(workers, load, services.admission, clock),
                    pages.transfers,
                    alerts,
                    dashboard,
                ),
                readiness=Readiness(workers, clock),
                access=Access(
                    RequestOrigin.of(options, options.host),
                    RequestOrigin.of(options, options.management_host),
                    services.clients,
                    is_managed_here=options.is_managed_here,
                    key=key,
                ),
            )


def _watch(announced: AnnouncedWorkers | None, services: Services) -> None:
    if announced is not None:
        announced.liveness = SilenceMonitor(services)


async def _serve(options: GatewayOptions, listener: socket.socket, find_workers_s: float) -> None:
    limits = HttpLimits(
        max_connections=options.max_connections,
        max_connections_per_address=options.max_connections_per_address,
        last_request_s=LAST_REQUEST_S if options.listen_fds else 0.0,
    )
    async with open_gateway(options, MachineClock()) as app:
        connections = Connections(
            allow_descriptors(limits),
            MachineClock(),
            count_refusals(app.metrics.registry, "baton_gateway"),
            _find_tls(options),
        )
        ready = Ready(url_of(listener, options.host, is_tls=connections.tls is not None))
        server = _Server(
            make_server_config(
                app, connections, drain_timeout_s=max(1, round(options.drain_timeout_s))
            ),
            ready,
            StatusReporter(options.status_fd),
            app,
        )
        async with managing(options, app):
            await app.find_workers(find_workers_s)
            if options.is_managed_here:
                log.info("dashboard: %s%s", ready.url, DASHBOARD_PATH)
            await server.serve(sockets=[listener])


def _find_tls(options: GatewayOptions) -> ServerTls | None:
    """For clients. Beyond loopback without it, prompts and API keys can be read on their way."""
    if options.tls_certificate and options.tls_key:
        return ServerTls(Path(options.tls_certificate), Path(options.tls_key), MachineClock())
    if not is_loopback(options.host):
        log.warning(
            "clients reach %s without encryption: give --tls-certificate and --tls-key, or have a "
            "proxy in front end TLS",
            options.host,
        )
    return None


def _open_management_listener(options: GatewayOptions) -> socket.socket:
    if options.management_fds:
        return inherit(options.management_fds[0])
    assert options.management_port is not None  # noqa: S101 (for mypy: the caller has checked)
    return bind(options.management_host, options.management_port)


@contextlib.asynccontextmanager
async def managing(options: GatewayOptions, app: GatewayApp) -> AsyncGenerator[None]:
    """The management listener, if there is one, for as long as the block runs."""
    if options.management_port is None:
        yield
        return
    refused = count_refusals(app.metrics.registry, "baton_management")
    connections = Connections(MANAGEMENT_LIMITS, MachineClock(), refused)
    listener = _open_management_listener(options)
    host = options.management_host
    async with serve_beside(ManagementApp(app), connections, listener, host) as url:
        log.info("management: %s, dashboard: %s%s", url, url, DASHBOARD_PATH)
        yield


class _Server(uvicorn.Server):
    """uvicorn, with an status line and with signals that end in exit code 0."""

    def __init__(
        self,
        config: uvicorn.Config,
        ready: Ready,
        status_reporter: StatusReporter,
        app: GatewayApp,
    ) -> None:
        super().__init__(config)
        self._ready, self._status_reporter, self._app = ready, status_reporter, app
        self._ending = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept, then report it."""
        await super().startup(sockets=sockets)
        # What is loaded lives until the end: a collection that looks at it stops all for 40 ms.
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        self._status_reporter.report(self._ready)
        log.info("listening on %s", self._ready.url)

    async def main_loop(self) -> None:
        """See `uvicorn.Server`, which looks ten times a second whether it is to end."""
        while not await self.on_tick(0):  # once a second, for the date in answers
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Take signals through the event loop, and do not raise them again at the end."""
        with end_signals(self._on_signal):
            yield

    def _on_signal(self, number: int) -> None:
        if self.should_exit:
            if ignore_relayed(number):
                return
            log.warning("a second signal: leaving at once")
            os._exit(128 + number)
        log.info("signal %s: no more requests, draining", signal.Signals(number).name)
        # Its launcher may know another timeout, as of before an upgrade.
        timeout_s = self.config.timeout_graceful_shutdown
        self._status_reporter.report(Draining(None if timeout_s is None else float(timeout_s)))
        self._app.end_streams()
        self.should_exit = True
        self._ending.set()
