"""A worker: everything around an engine and a handoff agent, up to the ASGI application."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

import baton
from baton.clock import MachineClock
from baton.handoff.pool_mode.metrics import PoolModeCollector
from baton.telemetry.held_block_time import HeldBlockTimeCollector
from baton.telemetry.links import LinkInstruments
from baton.telemetry.metrics import WorkerMetrics, set_worker_info
from baton.telemetry.trace import TraceRing
from baton.worker.api_adapters import ChatAdapter, CompletionAdapter
from baton.worker.app import Bearer, PatternRoute, Routes, WorkerApp
from baton.worker.chat_template import load_chat_template
from baton.worker.disabled_handoffs import DisabledHandoffs
from baton.worker.engine_client import EngineClient
from baton.worker.engine_collectors import EngineCollector, LeaseCollector
from baton.worker.generation import GenerationContext, GenerationService
from baton.worker.prompts import PromptReader
from baton.worker.request_metrics import RequestObserver
from baton.worker.status_pages import ABORT, FIRST_TOKEN, HANDOFFS, TRACES, StatusPages
from baton.worker.ticket_reader import TicketReader
from baton.worker.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.engines.interface import Engine
    from baton.handoff.agent import HandoffAgent
    from baton.handoff.interface import HandoffPort
    from baton.worker.options import WorkerOptions

HELD_LOOK_S: Final = 0.05
"""The engine tells nobody when the last of the prompts that it holds is taken."""

FALLBACK_CAUSES: Final = ("computed locally",)
"""What engines write in front of the reason in `RequestSpan.fallbacks`."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that is built. Owned by the event loop's thread."""

    app: WorkerApp
    engine_client: EngineClient
    engine: Engine
    agent: HandoffAgent | None

    async def start(self) -> None:
        """Start the handoff agent, then the engine; updates go to the running loop.

        Raises:
            ConfigError: the handoff port is taken.
            TransferError: a transport cannot expose the engine's memory.
        """
        self.engine_client.attach(asyncio.get_running_loop())
        port: HandoffPort = DisabledHandoffs()
        if self.agent is not None:
            self.agent.start(self.engine.wake)
            port = self.agent
        self.engine.start(self.engine_client.sink, port)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for the open ones, and what is held, at most `timeout_s`."""
        until = asyncio.get_running_loop().time() + timeout_s
        await self.engine_client.drain(timeout_s)
        now = asyncio.get_running_loop().time
        while self.engine.stats().num_held_blocks and now() < until:  # noqa: ASYNC110
            await asyncio.sleep(HELD_LOOK_S)

    async def stop(self, timeout_s: float) -> None:
        """End the agent, whose transports expose the engine's memory, then the engine."""
        if self.agent is not None:
            await asyncio.to_thread(self.agent.stop)
        await asyncio.to_thread(self.engine.stop, timeout_s)


def build_worker(
    options: WorkerOptions,
    engine: Engine,
    agent: HandoffAgent | None,
    clock: Clock | None = None,
) -> Worker:
    """Assemble a worker; starts nothing.

    Raises:
        ConfigError: the model's folder has no tokenizer, or its chat template does not compile.
    """
    clock = clock or MachineClock()
    model = Path(engine.info.model_path)
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, options.transports, FALLBACK_CAUSES)
    registry.register(EngineCollector(engine.stats))
    registry.register(HeldBlockTimeCollector(lambda: engine.stats().held_block_s))
    set_worker_info(registry, _facts(options, engine))
    if agent is not None:
        agent.observe_links(LinkInstruments(registry, options.transports))
        registry.register(LeaseCollector(lambda: agent.num_lapsed_leases))
        if agent.options.pool is not None:
            registry.register(PoolModeCollector(agent.options.pool))
    engine_client, traces = EngineClient(engine, clock), TraceRing(options.num_traces)
    reader = PromptReader(
        served_model_name=options.served_model_name,
        tokenizer=load_tokenizer(model),
        template=load_chat_template(model, clock),
        info=engine.info,
        max_default_tokens=options.max_default_tokens,
    )
    context = GenerationContext(
        options=options,
        clock=clock,
        tokenizer=reader.tokenizer,
        tickets=TicketReader(
            options.worker, options.epoch, options.key if agent is not None else None, clock
        ),
        engine_client=engine_client,
        traces=traces,
        observer=RequestObserver(clock, metrics),
    )
    pages = StatusPages(
        options=options,
        engine=engine,
        agent=agent,
        engine_client=engine_client,
        traces=traces,
        registry=registry,
        started_at=int(clock.unix_now()),
    )
    bearer = Bearer(options.key) if options.require_bearer and options.key is not None else None
    app = WorkerApp(_routes(pages, GenerationService(context), reader), bearer, metrics)
    return Worker(app, engine_client, engine, agent)


def _routes(pages: StatusPages, generation: GenerationService, reader: PromptReader) -> Routes:
    complete = partial(generation.serve, adapter=CompletionAdapter(reader))
    chat = partial(generation.serve, adapter=ChatAdapter(reader))
    return Routes(
        exact={
            "/v1/completions": {"POST": complete},
            "/v1/chat/completions": {"POST": chat},
            "/v1/models": {"GET": pages.models},
            "/health": {"GET": pages.health},
            "/version": {"GET": pages.version},
            "/metrics": {"GET": pages.metrics},
            "/baton/v1/info": {"GET": pages.info},
        },
        patterns=(
            PatternRoute(TRACES, "", {"GET": pages.trace}),
            PatternRoute(HANDOFFS, ABORT, {"POST": pages.abort}),
            PatternRoute(HANDOFFS, FIRST_TOKEN, {"POST": pages.first_token}),
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
