"""Builds a worker around an engine and, where it takes part in handoffs, an agent."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from prometheus_client import CollectorRegistry

import baton
from baton.clock import Clock, MachineClock, read_clock_domain
from baton.errors import HandoffError
from baton.handoff.pool_mode.metrics import PoolModeCollector
from baton.handoff.pool_mode.store_report import report_store
from baton.net.http_limits import WORKER_LIMITS, Connections, allow_descriptors
from baton.net.http_server import count_refusals
from baton.net.multiplex_server import MULTIPLEX_HANDLERS
from baton.net.tls import ClusterTls
from baton.protocol.worker_http import (
    ABORT_SUFFIX,
    CHAT_COMPLETIONS_PATH,
    COMPLETIONS_PATH,
    FIRST_TOKEN_SUFFIX,
    HANDOFFS_PREFIX,
    HEALTH_PATH,
    INFO_PATH,
    KV_EVENTS_PREFIX,
    LINKS_PATH,
    METRICS_PATH,
    MODELS_PATH,
    STANDBYS_PREFIX,
    TOKENS_SUFFIX,
    TRACES_PREFIX,
    TRANSFERS_PATH,
    VERSION_PATH,
)
from baton.telemetry.handoff_metrics import ReceivePaths
from baton.telemetry.links import LinkInstruments
from baton.telemetry.log_limit import WARNINGS
from baton.telemetry.metrics import HeldBlockTimeCollector, WorkerMetrics, set_worker_info
from baton.telemetry.trace import TraceRing
from baton.telemetry.transfers import TransferTable
from baton.tokenizer.chat_template import load_chat_template
from baton.tokenizer.digest import digest_tokenizer
from baton.tokenizer.tokenizer import load_tokenizer
from baton.worker.app import Bearer, PatternRoute, Routes, WorkerApp
from baton.worker.engine_client import EngineClient
from baton.worker.errors import FencedError
from baton.worker.exchange import WorkerExchange
from baton.worker.generation import GenerationContext, GenerationService
from baton.worker.metrics import EngineCollector, FenceCollector, LeaseCollector, RequestObserver
from baton.worker.prompts import NUM_THREADS, PromptReader
from baton.worker.replies import ChatAdapter, CompletionAdapter
from baton.worker.status_pages import StatusPages
from baton.worker.ticket_reader import TicketReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.auth.ticket import Ticket
    from baton.engines.interface import Engine
    from baton.handoff.dispatcher import HandoffDispatcher
    from baton.handoff.interface import (
        HandoffEvent,
        HandoffPort,
        ReceiveOrder,
        SampledToken,
        SendOrder,
        StreamPosition,
    )
    from baton.ids import TicketId
    from baton.protocol.worker_http import Health
    from baton.worker.options import WorkerOptions


class DisabledHandoffs:
    """Implements `HandoffPort`. `TicketReader` refuses tickets, so no handoff ever begins here."""

    prefixes = None

    def renew_lease(self, ticket: Ticket) -> None:
        """See `HandoffPort`."""
        _refuse(ticket)

    def start_receive(self, order: ReceiveOrder) -> None:
        """See `HandoffPort`."""
        _refuse(order.ticket)

    def start_send(self, order: SendOrder) -> None:
        """See `HandoffPort`."""
        _refuse(order.ticket)

    def report_progress(self, prompts: Sequence[Ticket]) -> None:
        """See `HandoffPort`."""

    def layer_ready(
        self,
        tickets: Sequence[tuple[TicketId, int]],
        layer: int,
        after: StreamPosition | None = None,
    ) -> None:
        """See `HandoffPort`."""

    def prefill_done(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `HandoffPort`."""

    def decline(self, ticket: Ticket, reason: str) -> None:
        """See `HandoffPort`."""

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffPort`."""

    def release_imported(self, ticket: TicketId) -> None:
        """See `SharedBlockPort`."""

    def revoke_exported(self) -> None:
        """See `SharedBlockPort`."""

    def cancel_oldest_ungranted(self, tickets: Sequence[TicketId], reason: str) -> None:
        """See `HandoffPort`."""

    def poll(self) -> list[HandoffEvent]:
        """See `HandoffPort`."""
        return []


def _refuse(ticket: Ticket) -> NoReturn:
    raise HandoffError(f"no handoffs here, but {ticket.id.hex()} asks for one", stage="start")


SEND_LOOK_S: Final = 0.05
"""Polling interval: the engine sends no event when its last handoff ends."""

FALLBACK_CAUSES: Final = ("computed locally",)
"""What engines write in front of the reason in `RequestSpan.fallbacks`."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that is built. Owned by the event loop's thread."""

    app: WorkerApp
    connections: Connections
    engine_client: EngineClient
    engine: Engine
    handoffs: HandoffDispatcher | None
    find_health: Callable[[], Health]

    async def start(self) -> None:
        """Start the handoffs, then the engine; updates go to the running loop.

        Raises:
            ConfigError: the handoff port is taken.
            TransferError: a transport cannot expose the engine's memory.
        """
        self.engine_client.attach(asyncio.get_running_loop())
        port: HandoffPort = DisabledHandoffs()
        if self.handoffs is not None:
            self.handoffs.start(self.engine.wake)
            port = self.handoffs
        self.engine.start(self.engine_client.sink, port)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests; wait for open ones, then for handoffs, at most `timeout_s` in all.

        A prefill request may be answered before its KV is sent.
        """
        until = asyncio.get_running_loop().time() + timeout_s
        await self.engine_client.drain(timeout_s)
        now = asyncio.get_running_loop().time
        while self.engine.stats().num_sending and now() < until:  # noqa: ASYNC110
            await asyncio.sleep(SEND_LOOK_S)

    def fence(self, reason: str) -> None:
        """Give up all that is under way; what comes is refused by the fence itself."""
        self.engine_client.fail_all(FencedError(reason))
        if self.handoffs is not None:
            self.handoffs.abort_all(reason)

    async def stop(self, timeout_s: float) -> None:
        """End the handoffs, whose transports expose the engine's memory, then the engine."""
        if self.handoffs is not None:
            await asyncio.to_thread(self.handoffs.stop)
        await asyncio.to_thread(self.engine.stop, timeout_s)


def build_worker(
    options: WorkerOptions,
    engine: Engine,
    handoffs: HandoffDispatcher | None,
    clock: Clock | None = None,
) -> Worker:
    """Assemble a worker; starts nothing.

    Raises:
        ConfigError: the model's folder has no tokenizer, or its chat template does not compile.
    """
    clock = clock or MachineClock()
    model = Path(engine.info.model_path)
    registry = CollectorRegistry()
    registry.register(WARNINGS)
    transfers = TransferTable(
        options.epoch,
        clock,
        lambda: 0 if handoffs is None else handoffs.agent.num_lapsed_leases,
        lambda: report_store(None if handoffs is None else handoffs.store),
    )
    paths = ReceivePaths() if handoffs is None else handoffs.receive_paths
    metrics = WorkerMetrics(registry, paths, FALLBACK_CAUSES, transfers)
    registry.register(EngineCollector(engine.stats))
    registry.register(HeldBlockTimeCollector(lambda: engine.stats().held_block_s))
    set_worker_info(registry, _facts(options, engine))
    if options.fence is not None:
        registry.register(FenceCollector(options.fence, clock))
    if handoffs is not None:
        handoffs.agent.observe_links(LinkInstruments(registry, paths, transfers))
        registry.register(LeaseCollector(lambda: handoffs.agent.num_lapsed_leases))
        if handoffs.store is not None:
            registry.register(
                PoolModeCollector(handoffs.store.access, handoffs.store.prefixes.counts)
            )
    engine_client = EngineClient(engine, clock, options.fence)
    traces = TraceRing(options.num_traces)
    reader = PromptReader(
        served_model_name=options.served_model_name,
        tokenizer=load_tokenizer(model),
        template=load_chat_template(model, clock),
        info=engine.info,
        max_default_tokens=options.max_default_tokens,
        threads=ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prompts"),
    )
    context = GenerationContext(
        options=options,
        max_body_bytes=min(options.max_body_bytes, reader.max_body_bytes),
        clock=clock,
        tokenizer=reader.tokenizer,
        tickets=TicketReader(
            options.worker, options.epoch, options.credentials if handoffs is not None else None
        ),
        engine_client=engine_client,
        traces=traces,
        observer=RequestObserver(clock, metrics),
    )
    pages = StatusPages(
        options=options,
        engine=engine,
        handoffs=handoffs,
        engine_client=engine_client,
        traces=traces,
        transfers=transfers,
        registry=registry,
        started_at=int(clock.unix_now()),
        max_prompt_chars=reader.max_prompt_chars,
        tokenizer_digest=digest_tokenizer(model),
        clock=clock,
        clock_domain=read_clock_domain(),
    )
    bearer = (
        Bearer(options.credentials.key)
        if options.require_bearer and options.credentials is not None
        else None
    )
    app = WorkerApp(_routes(pages, GenerationService(context), reader), bearer, metrics)
    tls = None
    if options.is_tls and options.credentials is not None:
        tls = ClusterTls(options.credentials)
    refused = count_refusals(registry, "baton_worker")
    connections = Connections(allow_descriptors(WORKER_LIMITS), clock, refused, tls)
    return Worker(app, connections, engine_client, engine, handoffs, pages.find_health)


def _routes(pages: StatusPages, generation: GenerationService, reader: PromptReader) -> Routes:
    complete = partial(generation.serve, adapter=CompletionAdapter(reader))
    chat = partial(generation.serve, adapter=ChatAdapter(reader))
    return Routes(
        exact={
            COMPLETIONS_PATH: {"POST": complete},
            CHAT_COMPLETIONS_PATH: {"POST": chat},
            MODELS_PATH: {"GET": pages.models},
            HEALTH_PATH: {"GET": pages.health},
            VERSION_PATH: {"GET": pages.version},
            METRICS_PATH: {"GET": pages.metrics},
            INFO_PATH: {"GET": pages.info},
            LINKS_PATH: {"GET": pages.links},
            TRANSFERS_PATH: {"GET": pages.transfers_page},
            **{
                path: {"POST": partial(WorkerExchange.hand_to, serve=serve)}
                for path, serve in MULTIPLEX_HANDLERS.items()
            },
        },
        patterns=(
            PatternRoute(TRACES_PREFIX, "", {"GET": pages.trace}),
            PatternRoute(KV_EVENTS_PREFIX, "", {"GET": pages.kv_events}),
            PatternRoute(HANDOFFS_PREFIX, ABORT_SUFFIX, {"POST": pages.abort}),
            PatternRoute(HANDOFFS_PREFIX, FIRST_TOKEN_SUFFIX, {"POST": pages.first_token}),
            PatternRoute(STANDBYS_PREFIX, TOKENS_SUFFIX, {"POST": generation.feed_standby}),
        ),
    )


def _facts(options: WorkerOptions, engine: Engine) -> dict[str, str]:
    return {
        "worker": options.worker,
        "role": options.role,
        "model": options.served_model_name,
        "engine": engine.info.engine,
        "version": baton.__version__,
    }
