"""A small HTTP server in each rank's process, for the gateway and for people (docs/wire/vllm.md).

It runs on a daemon thread with a loop of its own and touches nothing of vLLM's. It binds to
loopback, or demands the cluster's bearer.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UNSET
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from baton.clock import MachineClock, read_clock_domain
from baton.config.cluster_key import is_loopback
from baton.errors import UNDECODABLE
from baton.events.journal_page import make_page, read_event_number
from baton.ids import TicketId
from baton.net.http_limits import Connections, HttpLimits, allow_descriptors
from baton.net.http_server import (
    SilentServer,
    bind,
    count_refusals,
    make_server_config,
    start_listening,
    url_of,
)
from baton.protocol import worker_http
from baton.protocol.worker_http import (
    ABORT_SUFFIX,
    HANDOFFS_PREFIX,
    HEALTH_PATH,
    KV_EVENTS_PREFIX,
    LINKS_PATH,
    MAX_ABORT_BYTES,
    MAX_REASON_CHARS,
    TRACES_PREFIX,
    AbortOrder,
    ClockReading,
    ErrorBody,
    ErrorDetail,
    Health,
    WorkerLoad,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import uvicorn
    from starlette.types import Receive, Scope, Send

    from baton.auth.credentials import Credentials
    from baton.auth.key import ClusterKey
    from baton.engines.vllm.step_orders import Occupancy
    from baton.events.journal import CacheJournal
    from baton.net.tls import Tls
    from baton.protocol.worker_http import MeasuredLinks, StoreLoads, WorkerInfo
    from baton.telemetry.trace import TraceRing
    from baton.telemetry.transfers import TransferTable

logger = logging.getLogger(__name__)

TICKET_ID_BYTES: Final = 16
STOP_TIMEOUT_S: Final = 1.0
"""For answers under way, which take milliseconds. vLLM's engine must exit within 3 s."""
CONTROL_LIMITS: Final = HttpLimits(max_connections=1024)
"""Many gateways may send aborts at once, and one of them may be all the clients there are."""
JSON: Final = b"application/json"
MSGPACK: Final = b"application/msgpack"


@dataclass(frozen=True, slots=True)
class ControlResponse:
    """One answer."""

    status: int
    body: bytes = b""
    content_type: bytes = JSON


@dataclass(frozen=True, slots=True)
class RankView:
    """What the server shows of a rank; all of it thread-safe.

    `store_loads` gives None without a store. `journal` is of the store, and empty but for rank 0's.
    """

    info: Callable[[], WorkerInfo]
    is_alive: Callable[[], bool]
    occupancy: Callable[[], Occupancy | None]
    store_loads: Callable[[], StoreLoads | None]
    abort_from_peer: Callable[[TicketId, str], None]
    links: Callable[[], Awaitable[MeasuredLinks]]
    traces: TraceRing
    transfers: TransferTable
    registry: CollectorRegistry
    journal: CacheJournal


class ControlApp:
    """The ASGI callable. `bearer_key` None trusts everybody who can connect (TLS, loopback)."""

    def __init__(self, view: RankView, bearer_key: ClusterKey | None) -> None:
        self._view = view
        self._bearer = (
            None
            if bearer_key is None
            else b"Bearer " + bearer_key.sign("http", b"worker").hex().encode()
        )
        self._is_ending = False
        self._clock_domain = read_clock_domain()

    def begin_end(self) -> None:
        """Answer at once whoever waits for KV events. Any thread."""
        self._is_ending = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other scopes are not ours."""
        if scope["type"] != "http":
            raise NotImplementedError(f"ASGI scope {scope['type']}")
        response = await self._respond(scope, receive)
        headers = [(b"content-length", str(len(response.body)).encode())]
        if response.body:
            headers.append((b"content-type", response.content_type))
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    async def _respond(self, scope: Scope, receive: Receive) -> ControlResponse:
        method, path = str(scope["method"]), str(scope["path"])
        if not self._is_authorized(scope, path):
            return _error_response(
                401, "authentication_error", "unauthorized", "a bearer is needed here"
            )
        if path.startswith(HANDOFFS_PREFIX) and path.endswith(ABORT_SUFFIX):
            if method != "POST":
                return _method_not_allowed("POST")
            return self._abort(path, await _read_body(receive))
        if method == "GET" and path == LINKS_PATH:
            return _json(200, await self._view.links())
        if method == "GET" and path.startswith(KV_EVENTS_PREFIX):
            return await self._kv_events(path.removeprefix(KV_EVENTS_PREFIX))
        return self._get(path) if method == "GET" else _method_not_allowed("GET")

    def _is_authorized(self, scope: Scope, path: str) -> bool:
        if self._bearer is None or path == HEALTH_PATH:
            return True
        shown = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(shown, self._bearer)

    def _get(self, path: str) -> ControlResponse:
        view = self._view
        match path:
            case worker_http.HEALTH_PATH:
                return self._health()
            case worker_http.INFO_PATH:
                return _json(200, view.info())
            case worker_http.TRANSFERS_PATH:
                return _json(200, view.transfers.report())
            case worker_http.METRICS_PATH:
                text = generate_latest(view.registry)
                return ControlResponse(200, text, CONTENT_TYPE_LATEST.encode())
            case _ if path.startswith(TRACES_PREFIX):
                return self._trace(path.removeprefix(TRACES_PREFIX))
            case _:
                return _not_found(f"there is nothing at {path[:200]!r}")

    async def _kv_events(self, text: str) -> ControlResponse:
        after = read_event_number(text)
        if after is None:
            return _not_found(f"{text[:64]!r} is not the number of an event; begin with 0")
        page = await make_page(self._view.journal, after, lambda: self._is_ending)
        return ControlResponse(200, page, MSGPACK)

    def _health(self) -> ControlResponse:
        view = self._view
        if view.is_alive():
            occupancy = view.occupancy()
            load = _load(occupancy, view.store_loads())
            clock = ClockReading(self._clock_domain, MachineClock().now())
            reason = None if occupancy is None else occupancy.why_no_handoffs
            health = Health("ok", load=load, clock=clock, why_no_handoffs=reason or UNSET)
            return _json(200, health)
        return _json(503, Health("failed", "the handoff agent's thread has ended"))

    def _trace(self, request_id: str) -> ControlResponse:
        trace = self._view.traces.find(request_id)
        return _not_found("no trace of this request") if trace is None else _json(200, trace)

    def _abort(self, path: str, body: bytes | None) -> ControlResponse:
        text = path.removeprefix(HANDOFFS_PREFIX).removesuffix(ABORT_SUFFIX)
        try:
            ticket = TicketId(bytes.fromhex(text))
        except ValueError:
            ticket = TicketId(b"")
        if len(ticket) != TICKET_ID_BYTES:
            return _not_found(f"{text[:64]!r} is not a ticket id of 32 hex digits")
        try:
            order = msgspec.json.decode(body or b"", type=AbortOrder)
        except UNDECODABLE:
            return _error_response(
                400, "invalid_request_error", "invalid_value", 'the body must be {"reason": TEXT}'
            )
        self._view.abort_from_peer(ticket, order.reason[:MAX_REASON_CHARS])
        return ControlResponse(204)


class ControlServer:
    """The server's socket and thread. Built and stopped on vLLM's worker thread."""

    def __init__(self, host: str, port: int, *, credentials: Credentials, tls: Tls | None) -> None:
        """Take the port; nothing answers before `start`. With `tls`, no bearer is needed.

        Raises:
            ConfigError: the port is taken, or the address is not this machine's.
        """
        self._host, self._credentials, self._tls = host, credentials, tls
        self._listener = bind(host, port)
        start_listening(self._listener)
        self._app: ControlApp | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return url_of(self._listener, self._host, is_tls=self._tls is not None)

    def start(self, view: RankView) -> None:
        """Answer from now on.

        Raises:
            ConfigError: this process may open too few files.
        """
        needs_bearer = self._tls is None and not is_loopback(self._host)
        app = self._app = ControlApp(view, self._credentials.key if needs_bearer else None)
        refused = count_refusals(view.registry, "baton_worker")
        limits = allow_descriptors(CONTROL_LIMITS)
        connections = Connections(limits, MachineClock(), refused, self._tls)
        self._server = SilentServer(
            make_server_config(app, connections, drain_timeout_s=round(STOP_TIMEOUT_S))
        )
        self._thread = threading.Thread(
            target=self._run, args=(self._server,), name="baton-control", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Close the port. Idempotent."""
        if self._app is not None:
            self._app.begin_end()
        if self._server is not None:
            # Peers' connections are not waited for: they keep idle ones open.
            self._server.should_exit = self._server.force_exit = True
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
        self._listener.close()

    def _run(self, server: uvicorn.Server) -> None:
        try:
            asyncio.run(server.serve(sockets=[self._listener]))
        except Exception:
            logger.exception("the control server has ended")


async def _read_body(receive: Receive) -> bytes | None:
    """The body; None if it is too long, or the client left."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_ABORT_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _load(occupancy: Occupancy | None, store_loads: StoreLoads | None) -> WorkerLoad | None:
    if occupancy is None:
        return None
    return WorkerLoad(
        num_waiting=occupancy.num_waiting,
        num_blocks=occupancy.num_blocks,
        num_free_blocks=occupancy.num_free_blocks,
        block_size=occupancy.block_size,
        max_running=occupancy.max_running or UNSET,
        store_loads=store_loads or UNSET,
    )


def _json(status: int, value: object) -> ControlResponse:
    return ControlResponse(status, msgspec.json.encode(value))


def _error_response(status: int, kind: str, code: str, message: str) -> ControlResponse:
    return _json(status, ErrorBody(ErrorDetail(message, kind, code=code)))


def _not_found(message: str) -> ControlResponse:
    return _error_response(404, "invalid_request_error", "unknown_path", message)


def _method_not_allowed(allowed: str) -> ControlResponse:
    return _error_response(405, "invalid_request_error", "method_not_allowed", f"use {allowed}")
