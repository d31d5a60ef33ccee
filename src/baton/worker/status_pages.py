"""A worker's description of itself, and the abort of a handoff (docs/wire/worker-http.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UNSET
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

import baton
from baton.engines.interface import Engine, StandbyEngine
from baton.errors import UNDECODABLE, InvalidRequestError
from baton.events.journal_page import make_page, read_event_number
from baton.handoff.interface import SampledToken
from baton.handoff.link_page import describe_links
from baton.ids import TicketId
from baton.protocol.worker_http import (
    ABORT_SUFFIX,
    FIRST_TOKEN_SUFFIX,
    HANDOFFS_PREFIX,
    KV_EVENTS_PREFIX,
    MAX_ABORT_BYTES,
    MAX_REASON_CHARS,
    TRACES_PREFIX,
    AbortOrder,
    ClockReading,
    Health,
    MeasuredLinks,
    Role,
    ServedModel,
    ServedModels,
    Version,
    WorkerInfo,
    WorkerLoad,
)
from baton.worker.errors import UnknownPathError

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.handoff.dispatcher import HandoffDispatcher
    from baton.telemetry.trace import TraceRing
    from baton.telemetry.transfers import TransferTable
    from baton.worker.engine_client import EngineClient
    from baton.worker.exchange import WorkerExchange
    from baton.worker.options import WorkerOptions

MAX_TOKEN_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class StatusPages:
    """Handlers of everything that is not generation. `started_at` is Unix seconds."""

    options: WorkerOptions
    engine: Engine
    handoffs: HandoffDispatcher | None
    engine_client: EngineClient
    traces: TraceRing
    transfers: TransferTable
    registry: CollectorRegistry
    started_at: int
    max_prompt_chars: int
    tokenizer_digest: str
    clock: Clock
    clock_domain: str

    async def health(self, exchange: WorkerExchange) -> None:
        """`GET /health`."""
        state = self.find_health()
        read = ClockReading(self.clock_domain, self.clock.now())
        state = msgspec.structs.replace(state, clock=read)
        await exchange.send_json(200 if state.status == "ok" else 503, state)

    async def version(self, exchange: WorkerExchange) -> None:
        """`GET /version`."""
        await exchange.send_json(200, Version(baton.__version__))

    async def models(self, exchange: WorkerExchange) -> None:
        """`GET /v1/models`."""
        model = ServedModel(
            id=self.options.served_model_name,
            created=self.started_at,
            max_model_len=self.engine.info.max_context_tokens,
        )
        await exchange.send_json(200, ServedModels(data=(model,)))

    async def metrics(self, exchange: WorkerExchange) -> None:
        """`GET /metrics`."""
        await exchange.send_bytes(200, generate_latest(self.registry), CONTENT_TYPE_LATEST.encode())

    async def info(self, exchange: WorkerExchange) -> None:
        """`GET /baton/v1/info`."""
        info = self.engine.info
        await exchange.send_json(
            200,
            WorkerInfo(
                worker=self.options.worker,
                epoch=self.options.epoch,
                role=Role(self.options.role),
                model=info.model_path,
                served_model_name=self.options.served_model_name,
                fingerprint=info.fingerprint,
                max_context_tokens=info.max_context_tokens,
                max_prompt_chars=self.max_prompt_chars,
                max_step_tokens=info.max_step_tokens,
                num_landing_layers=info.num_landing_layers,
                handoff_address="" if self.handoffs is None else self.handoffs.address,
                layout=info.layout,
                transports=self.options.transports,
                version=baton.__version__,
                modes=self.options.modes,
                has_kv_journal=True,
                has_standby=isinstance(self.engine, StandbyEngine),
                multiplexes_streams=True,
                takes_unsigned_tickets=self.options.is_tls and self.options.credentials is not None,
                tokenizer=self.tokenizer_digest,
                topology=self.options.topology,
            ),
        )

    async def trace(self, exchange: WorkerExchange) -> None:
        """`GET /baton/v1/traces/{request_id}`."""
        request_id = exchange.path.removeprefix(TRACES_PREFIX)
        trace = self.traces.find(request_id)
        if trace is None:
            raise UnknownPathError(
                f"no trace of the request {request_id[:128]!r}; the last "
                f"{self.options.num_traces} requests are remembered"
            )
        await exchange.send_json(200, trace)

    async def kv_events(self, exchange: WorkerExchange) -> None:
        """`GET /baton/v1/kv_events/{after}`: what was stored and removed since then.

        Where that is nothing yet, the answer waits a moment for it.
        """
        text = exchange.path.removeprefix(KV_EVENTS_PREFIX)
        after = read_event_number(text)
        if after is None:
            raise UnknownPathError(f"{text[:64]!r} is not the number of an event; begin with 0")
        page = await make_page(self.engine.journal, after)
        await exchange.send_bytes(200, page, b"application/msgpack")

    async def links(self, exchange: WorkerExchange) -> None:
        """`GET /baton/v1/links`: what ways to peers cost, as measured."""
        links = MeasuredLinks(())
        if self.handoffs is not None:
            links = await describe_links(self.handoffs.agent)
        await exchange.send_json(200, links)

    async def transfers_page(self, exchange: WorkerExchange) -> None:
        """`GET /baton/v1/transfers`: what handoffs and links took, by peer."""
        await exchange.send_json(200, self.transfers.report())

    async def abort(self, exchange: WorkerExchange) -> None:
        """`POST /baton/v1/handoffs/{ticket}/abort`: the ticket's other half has failed."""
        text = exchange.path.removeprefix(HANDOFFS_PREFIX).removesuffix(ABORT_SUFFIX)
        order = _read_abort(await exchange.read_body(MAX_ABORT_BYTES))
        ticket = _read_ticket_id(text)
        if self.handoffs is not None:
            self.handoffs.abort_from_peer(ticket, order.reason[:MAX_REASON_CHARS])
        await exchange.send_nothing()

    async def first_token(self, exchange: WorkerExchange) -> None:
        """`POST /baton/v1/handoffs/{ticket}/first_token`: the client is to get it from prefill."""
        text = exchange.path.removeprefix(HANDOFFS_PREFIX).removesuffix(FIRST_TOKEN_SUFFIX)
        token = _read_token(await exchange.read_body(MAX_TOKEN_BYTES), self.engine.info.vocab_size)
        await exchange.send_json(200, self.engine.commit_first_token(_read_ticket_id(text), token))

    def find_health(self) -> Health:
        """What `GET /health` answers."""
        if (reason := self.engine_client.why_fenced()) is not None:
            return Health("fenced", reason)
        if self.engine_client.draining:
            return self.options.describe_drain()
        if self.handoffs is not None and not self.handoffs.is_alive:
            return Health("failed", "the handoff agent's thread has ended")
        if not self.engine.is_alive():
            return Health("failed", "the engine's thread has ended; the log has the reason")
        return Health("ok", load=self._load())

    def _load(self) -> WorkerLoad:
        stats = self.engine.stats()
        return WorkerLoad(
            num_waiting=stats.num_waiting,
            num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_free_blocks,
            block_size=self.engine.info.layout.block_size,
            max_running=self.engine.info.max_running or UNSET,
            store_loads=stats.store_loads or UNSET,
        )


def _read_abort(body: bytes) -> AbortOrder:
    try:
        return msgspec.json.decode(body, type=AbortOrder)
    except UNDECODABLE as exc:
        raise InvalidRequestError(
            f'the body is not what is expected here: {exc}. Send {{"reason": "…"}}.',
            param="reason",
            code="invalid_value",
        ) from exc


def _read_token(body: bytes, vocab_size: int) -> SampledToken:
    try:
        token = msgspec.json.decode(body, type=SampledToken)
    except UNDECODABLE as exc:
        raise InvalidRequestError(f"not a token: {exc}", code="invalid_value") from exc
    if not 0 <= token.token_id < vocab_size:
        raise InvalidRequestError(f"token ids go from 0 to {vocab_size - 1}", code="invalid_value")
    return token


def _read_ticket_id(text: str) -> TicketId:
    try:
        ticket = TicketId(bytes.fromhex(text))
    except ValueError:
        ticket = TicketId(b"")
    if len(ticket) != 16:  # noqa: PLR2004 (a ticket id's size is its definition)
        raise UnknownPathError(f"{text[:64]!r} is not a ticket id of 32 hex digits")
    return ticket
