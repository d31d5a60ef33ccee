"""The worker process: socket, cores, engine, agent, signals, drain; it ends with its parent."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import select
import signal
import threading
from contextlib import asynccontextmanager, closing, contextmanager
from typing import TYPE_CHECKING, Final

import uvloop
from prometheus_client import disable_created_metrics

from baton.clock import Clock, MachineClock
from baton.config.cluster_key import is_loopback
from baton.config.numa import bind_worker
from baton.engines.interface import ENGINES, Engine, EngineContext
from baton.errors import ConfigError, EngineError
from baton.handoff.dispatcher import HandoffDispatcher, open_handoffs
from baton.handoff.encoded_view import StagingSize, make_encoded_views, open_handoff_encodings
from baton.handoff.kv_views import KVView
from baton.handoff.options import AgentOptions, check_device_memory
from baton.handoff.peer_transports import LinkOptions
from baton.handoff.pool_mode.store_access import list_lossy, open_store_access, report_to
from baton.handoff.verify import VerificationPolicy
from baton.ids import Epoch, new_epoch
from baton.net.http_server import (
    SilentServer,
    bind,
    end_signals,
    ignore_relayed,
    make_server_config,
    start_listening,
    url_of,
)
from baton.net.preemption import PreemptionWatch
from baton.net.probes import serve_probes
from baton.net.tls import ClusterTls
from baton.protocol.announcements import Announcement
from baton.protocol.worker_http import Role
from baton.store.interface import PeerAccess
from baton.telemetry.process_status import Loading, Ready, StatusReporter
from baton.transfer.devices.extents import choose_allocation
from baton.transfer.interface import Transport, TransportContext, build_transports, choose_memory
from baton.transfer.links.probes import ProbeBounds
from baton.worker.announcer import Announcer, SupersededError
from baton.worker.fence import MembershipFence, Standing
from baton.worker.options import ProcessOptions, WorkerOptions
from baton.worker.worker import Worker, build_worker

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Generator, Sequence

    from baton.encodings.interface import KVEncoding

logger = logging.getLogger(__name__)

GRACE_S: Final = 5.0


def exit_with_process(parent_pid: int) -> None:
    """Watch a process from a thread of its own: at its end, SIGTERM here, soon again (leave now).

    The process need not be the parent. A thread, since loading a model blocks all else.

    Raises:
        ConfigError: there is no such process.
    """
    try:
        fd = os.pidfd_open(parent_pid)
    except OSError as exc:
        raise ConfigError(
            f"this worker should end with process {parent_pid}, which cannot be watched: "
            f"{exc.strerror}"
        ) from exc
    threading.Thread(target=_watch, args=(fd, parent_pid), name="parent-watch", daemon=True).start()


def _watch(fd: int, parent_pid: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    poller.poll()
    os.close(fd)
    logger.warning("process %d has ended, and this worker ends with it", parent_pid)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_S)
    os.kill(os.getpid(), signal.SIGINT)  # another SIGTERM could be a launcher's


FLUSH_TIMEOUT_S: Final = 5
"""After drain: how long uvicorn waits for the last bytes of answers to leave."""
STOP_TIMEOUT_S: Final = 10.0
ENGINE_WATCH_S: Final = 0.5


def run_worker(options: ProcessOptions) -> None:
    """Serve until SIGTERM or SIGINT. Blocks; belongs on the main thread.

    Raises:
        ConfigError: the port is taken, a core does not exist, or the model cannot be served.
        EngineError: the engine's thread ended by itself.
        SupersededError: another epoch has this worker's name.
    """
    if options.parent_pid is not None:
        exit_with_process(options.parent_pid)
    bind_worker(options)
    # One more series for each counter and histogram, which nothing here reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    status_reporter = StatusReporter(options.status_fd)
    with closing(bind(options.host, options.port)) as listener:
        url = url_of(listener, options.host, is_tls=options.tls != "off")
        what = f"model {options.model_path} with engine {options.engine}"
        status_reporter.report(Loading(url, what))
        clock = MachineClock()
        watch = PreemptionWatch(options.preemption, options.worker, clock, status_reporter)
        watch.start()
        with _outside_garbage_collection():
            worker, epoch = _load(options, clock, watch)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            life = ProcessLife(options, worker, epoch, status_reporter, watch=watch)
            runner.run(life.run(listener))


class ProcessLife:
    """From start to end of a loaded worker. Owned by the event loop's thread."""

    def __init__(
        self,
        options: ProcessOptions,
        worker: Worker,
        epoch: Epoch,
        status_reporter: StatusReporter,
        *,
        watch: PreemptionWatch,
    ) -> None:
        self._options, self._worker = options, worker
        self._epoch, self._status_reporter, self._watch = epoch, status_reporter, watch
        self._server = SilentServer(
            make_server_config(worker.app, worker.connections, drain_timeout_s=FLUSH_TIMEOUT_S)
        )
        self._ending: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def run(self, listener: socket.socket) -> None:
        """Serve until a signal, until the engine ends by itself, or until it is superseded.

        Raises:
            EngineError: the engine ended.
            SupersededError: another epoch has this worker's name.
        """
        try:
            await self._worker.start()
            start_listening(listener)
            with end_signals(self._on_signal):
                watching = asyncio.create_task(self._watch_engine())
                host, port = self._options.host, self._options.probe_port
                async with serve_probes(host, port, self._is_ready):
                    self._report_ready(listener)
                    async with self._announcing(listener):
                        await self._server.serve(sockets=[listener])
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            if self._failure is not None:
                raise self._failure
            if not self._worker.engine.is_alive():
                raise EngineError("the engine's thread ended by itself; the log has the reason")
        finally:
            await self._worker.stop(STOP_TIMEOUT_S)

    async def _is_ready(self) -> bool:
        return self._worker.find_health().status == "ok"

    def _report_ready(self, listener: socket.socket) -> None:
        options, handoffs = self._options, self._worker.handoffs
        url = url_of(listener, options.host, is_tls=options.tls != "off")
        address = "" if handoffs is None else handoffs.address
        self._status_reporter.report(Ready(url, options.worker, self._epoch, options.role, address))
        logger.info("%s answers at %s, hands over at %s", options.worker, url, address)

    @asynccontextmanager
    async def _announcing(self, listener: socket.socket) -> AsyncGenerator[None]:
        """The worker is announced to gateways, if it is to be, for as long as the block runs."""
        announcer = self._make_announcer(listener)
        if announcer is None:
            yield
            return
        running = asyncio.create_task(self._announce(announcer))
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await announcer.leave()

    def _make_announcer(self, listener: socket.socket) -> Announcer | None:
        options, fence = self._options, self._worker.engine_client.fence
        if fence is None:
            return None
        url = options.announce_url or url_of(listener, options.host, is_tls=options.tls != "off")
        return Announcer(
            Announcement(
                worker=options.worker,
                epoch=self._epoch,
                url=url.rstrip("/"),
                role=Role(options.role),
                lease_s=options.announce_lease_s,
                sequence=1,
                topology=options.at,
            ),
            options.announce_to,
            options.credentials,
            clock=MachineClock(),
            fence=fence,
            on_change=self._on_standing,
        )

    async def _announce(self, announcer: Announcer) -> None:
        try:
            await announcer.run()
        except Exception as exc:
            is_expected = isinstance(exc, SupersededError)
            logger.critical("announcing has ended: %s", exc, exc_info=not is_expected)
            self._failure = exc
            await self._worker.drain(0.0)
            self._server.should_exit = True

    def _on_standing(self, standing: Standing) -> None:
        if standing is Standing.SERVING:
            logger.info("a gateway has accepted %s: it serves", self._options.worker)
            return
        reason = self._worker.engine_client.why_fenced() or standing
        num_open = self._worker.engine_client.num_open
        logger.error("%s; %d requests are ended", reason, num_open)
        self._worker.fence(reason)

    async def _watch_engine(self) -> None:
        # An engine that ends by itself sends no event: polling is all there is.
        while self._worker.engine.is_alive():  # noqa: ASYNC110
            await asyncio.sleep(ENGINE_WATCH_S)
        logger.critical("the engine's thread has ended: this worker cannot go on")
        await self._worker.drain(0.0)
        self._server.should_exit = True

    def _on_signal(self, number: int) -> None:
        timeout_s = self._watch.note_signal(self._options.drain_timeout_s)
        if timeout_s is None:
            if ignore_relayed(number):
                return
            logger.warning("a second signal: leaving at once")
            os._exit(128 + number)
        logger.info(
            "%s: no more requests, %d are being answered",
            signal.Signals(number).name,
            self._worker.engine_client.num_open,
        )
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.create_task(self._drain(timeout_s))

    async def _drain(self, timeout_s: float) -> None:
        await self._worker.drain(timeout_s)
        self._server.should_exit = True


def _load(options: ProcessOptions, clock: Clock, watch: PreemptionWatch) -> tuple[Worker, Epoch]:
    epoch = new_epoch()
    model = options.model_path.resolve()
    factory = ENGINES.build(options.engine, options.engine_options)
    transports = _transports(options, epoch, clock)
    memory = choose_memory(transports)
    if memory == "cuda":
        check_device_memory(
            options.store.tiers, options.handoff.encoding, options.handoff.error_budget
        )
    allocate = choose_allocation(options.transfer.options)
    engine = factory(EngineContext(model, clock, allocate, memory))
    fence = MembershipFence(options.announce_lease_s) if options.announce_to else None
    handoffs = _handoffs(options, engine, epoch, clock, transports=transports, fence=fence)
    served_model_name = options.served_model_name or model.name
    worker_options = WorkerOptions(
        worker=options.worker,
        epoch=epoch,
        role=options.role,
        served_model_name=served_model_name,
        credentials=options.credentials,
        is_tls=options.tls != "off",
        require_bearer=options.tls == "off" and not is_loopback(options.host),
        num_traces=options.num_traces,
        transports=options.transfer.transports,
        topology=options.at,
        modes=handoffs.modes,
        fence=fence,
        describe_drain=watch.describe_health,
    )
    return build_worker(worker_options, engine, handoffs, clock), epoch


def _handoffs(
    options: ProcessOptions,
    engine: Engine,
    epoch: Epoch,
    clock: Clock,
    *,
    transports: tuple[Transport, ...],
    fence: MembershipFence | None,
) -> HandoffDispatcher:
    view = KVView(engine.info.layout, engine.region, peer_mappings=engine.peer_mappings)
    handoff, transfer = options.handoff, options.transfer
    encodings = open_handoff_encodings(handoff.encoding, view.layout, handoff.error_budget)
    access = open_store_access(
        options.store,
        view,
        key=options.credentials.key,
        clock=clock,
        keeps_prefixes=options.store.prefixes,
        handoff_encodings=encodings,
        peers=PeerAccess(options.credentials, _find_tls(options), serves=True),
    )
    return open_handoffs(
        AgentOptions(
            worker=options.worker,
            epoch=epoch,
            fingerprint=engine.info.fingerprint,
            views=_views(options, engine, view, encodings, clock=clock),
            traits=list_lossy(encodings, access, receives=options.role != "prefill"),
            transports=transports,
            credentials=options.credentials,
            clock=clock,
            host=options.handoff_host,
            port=options.handoff_port,
            timeout_s=handoff.timeout_s,
            liveness_timeout_s=handoff.liveness_timeout_s,
            lease_s=handoff.lease_s,
            layer_batch_bytes=(
                handoff.layer_batch_bytes
                if view.device_access is None
                else handoff.device_layer_batch_bytes
            ),
            verification=VerificationPolicy.of(handoff),
            links=LinkOptions(
                transfer.choice, ProbeBounds(transfer.probe_time_s, transfer.probe_bytes)
            ),
            spin_s=transfer.spin_s,
            write_lease=fence,
        ),
        report_to(engine.journal, access, fingerprint=engine.info.fingerprint, clock=clock),
    )


def _views(
    options: ProcessOptions,
    engine: Engine,
    view: KVView,
    encodings: Sequence[KVEncoding],
    *,
    clock: Clock,
) -> tuple[KVView, ...]:
    """The engine's pages as they are, and encoded, where that is configured."""
    size = StagingSize(options.handoff.staging_bytes, engine.info.max_context_tokens)
    allocate = choose_allocation(options.transfer.options)
    return *make_encoded_views(view, encodings, size, clock=clock, allocate=allocate), view


def _transports(options: ProcessOptions, epoch: Epoch, clock: Clock) -> tuple[Transport, ...]:
    context = TransportContext(
        credentials=options.credentials,
        epoch=epoch,
        bind_host=options.handoff_host,
        clock=clock,
        tls=_find_tls(options),
    )
    return build_transports(options.transfer.transports, options.transfer.options, context)


def _find_tls(options: ProcessOptions) -> ClusterTls | None:
    """Of what moves KV between workers."""
    return ClusterTls(options.credentials) if options.tls == "all" else None


@contextmanager
def _outside_garbage_collection() -> Generator[None]:
    """Exclude what is made in the block, which lives until the end, from garbage collection.

    A full collection over torch and transformers stops every stream for half a second (2-core
    machine). While they load, several would find nothing; one more at exit delays a restart.
    """
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
