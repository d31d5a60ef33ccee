"""A small HTTP server in each rank's process, for the gateway and for people (docs/wire/vllm.md).

It runs on a daemon thread with a loop of its own and touches nothing of vLLM's. It binds to
loopback, or demands the cluster's bearer.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from baton.config.cluster_key import is_loopback
from baton.errors import ConfigError
from baton.ids import TicketId

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from prometheus_client import CollectorRegistry
    from starlette.types import Receive, Scope, Send

    from baton.auth.key import ClusterKey
    from baton.engines.vllm.step_orders import Occupancy
    from baton.engines.vllm.worker_info import WorkerInfo
    from baton.telemetry.trace import TraceRing

logger = logging.getLogger(__name__)

TRACES: Final = "/baton/v1/traces/"
HANDOFFS: Final = "/baton/v1/handoffs/"
ABORT: Final = "/abort"
HEALTH: Final = "/health"
MAX_ABORT_BYTES: Final = 4096
MAX_REASON_CHARS: Final = 500
TICKET_ID_BYTES: Final = 16
STOP_TIMEOUT_S: Final = 5.0
JSON: Final = b"application/json"


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's four fields."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object, as workers answer it."""

    error: ErrorDetail


class Health(msgspec.Struct, frozen=True):
    """`reason` says what to look at when the status is not ok."""

    status: str
    reason: str | None = None
    load: Load | None = None


class Load(msgspec.Struct, frozen=True):
    """vLLM's queue and KV blocks, where they are known."""

    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    block_size: int


class AbortOrder(msgspec.Struct, frozen=True):
    """Why the other half of a handoff is not coming."""

    reason: str


@dataclass(frozen=True, slots=True)
class ControlResponse:
    """One answer."""

    status: int
    body: bytes = b""
    content_type: bytes = JSON


@dataclass(frozen=True, slots=True)
class RankView:
    """What the server shows of a rank; all of it thread-safe."""

    info: Callable[[], WorkerInfo]
    is_alive: Callable[[], bool]
    occupancy: Callable[[], Occupancy | None]
    abort_from_peer: Callable[[TicketId, str], None]
    traces: TraceRing
    registry: CollectorRegistry


class ControlApp:
    """The ASGI callable. `bearer_key` None trusts everybody who can connect (loopback)."""

    def __init__(self, view: RankView, bearer_key: ClusterKey | None) -> None:
        self._view = view
        self._bearer = (
            None
            if bearer_key is None
            else b"Bearer " + bearer_key.sign("http", b"worker").hex().encode()
        )

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
        if path.startswith(HANDOFFS) and path.endswith(ABORT):
            if method != "POST":
                return _method_not_allowed("POST")
            return self._abort(path, await _read_body(receive))
        return self._get(path) if method == "GET" else _method_not_allowed("GET")

    def _is_authorized(self, scope: Scope, path: str) -> bool:
        if self._bearer is None or path == HEALTH:
            return True
        shown = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(shown, self._bearer)

    def _get(self, path: str) -> ControlResponse:
        view = self._view
        match path:
            case "/health":
                return self._health()
            case "/baton/v1/info":
                return _json(200, view.info())
            case "/metrics":
                text = generate_latest(view.registry)
                return ControlResponse(200, text, CONTENT_TYPE_LATEST.encode())
            case _ if path.startswith(TRACES):
                return self._trace(path.removeprefix(TRACES))
            case _:
                return _not_found(f"there is nothing at {path[:200]!r}")

    def _health(self) -> ControlResponse:
        if self._view.is_alive():
            return _json(200, Health("ok", load=_load(self._view.occupancy())))
        return _json(503, Health("failed", "the handoff agent's thread has ended"))

    def _trace(self, request_id: str) -> ControlResponse:
        trace = self._view.traces.find(request_id)
        return _not_found("no trace of this request") if trace is None else _json(200, trace)

    def _abort(self, path: str, body: bytes | None) -> ControlResponse:
        text = path.removeprefix(HANDOFFS).removesuffix(ABORT)
        try:
            ticket = TicketId(bytes.fromhex(text))
        except ValueError:
            ticket = TicketId(b"")
        if len(ticket) != TICKET_ID_BYTES:
            return _not_found(f"{text[:64]!r} is not a ticket id of 32 hex digits")
        try:
            order = msgspec.json.decode(body or b"", type=AbortOrder)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return _error_response(
                400, "invalid_request_error", "invalid_value", 'the body must be {"reason": TEXT}'
            )
        self._view.abort_from_peer(ticket, order.reason[:MAX_REASON_CHARS])
        return ControlResponse(204)


class ControlServer:
    """The server's socket and thread. Built and stopped on vLLM's worker thread."""

    def __init__(self, host: str, port: int, *, key: ClusterKey) -> None:
        """Take the port; nothing answers before `start`.

        Raises:
            ConfigError: the port is taken, or the address is not this machine's.
        """
        self._host, self._key = host, key
        self._listener = _bind(host, port)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        shown = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{shown}:{self._listener.getsockname()[1]}"

    def start(self, view: RankView) -> None:
        """Answer from now on."""
        app = ControlApp(view, None if is_loopback(self._host) else self._key)
        self._server = _Server(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                loop="asyncio",
                lifespan="off",
                interface="asgi3",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
            )
        )
        self._thread = threading.Thread(
            target=self._run, args=(self._server,), name="baton-control", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Close the port. Idempotent."""
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
        self._listener.close()

    def _run(self, server: uvicorn.Server) -> None:
        try:
            asyncio.run(server.serve(sockets=[self._listener]))
        except Exception:
            logger.exception("the control server has ended")


class _Server(uvicorn.Server):
    """uvicorn without handlers for signals: they are vLLM's."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """See `uvicorn.Server`."""
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} for control: {exc.strerror or exc}; choose another "
            "control_port, or 0 for a free one"
        ) from exc
    return listener


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


def _load(occupancy: Occupancy | None) -> Load | None:
    if occupancy is None:
        return None
    return Load(
        num_waiting=occupancy.num_waiting,
        num_blocks=occupancy.num_blocks,
        num_free_blocks=occupancy.num_free_blocks,
        block_size=occupancy.block_size,
    )


def _json(status: int, value: object) -> ControlResponse:
    return ControlResponse(status, msgspec.json.encode(value))


def _error_response(status: int, kind: str, code: str, message: str) -> ControlResponse:
    return _json(status, ErrorBody(ErrorDetail(message, kind, None, code)))


def _not_found(message: str) -> ControlResponse:
    return _error_response(404, "invalid_request_error", "unknown_path", message)


def _method_not_allowed(allowed: str) -> ControlResponse:
    return _error_response(405, "invalid_request_error", "method_not_allowed", f"use {allowed}")
