"""The allow-list of paths: any other path is answered 404, even where workers have it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Self, TypeAlias

import msgspec

from baton import __version__
from baton.clock import Clock, Instant
from baton.config.cluster_key import is_loopback
from baton.errors import BatonError, ModelNotFoundError
from baton.gateway.asgi import JSON, send_error, send_preflight, send_whole, share_with
from baton.gateway.dashboard.pages import Dashboard, is_dashboard
from baton.gateway.errors import (
    ForbiddenError,
    MethodNotAllowedError,
    NoWorkerError,
    PathNotFoundError,
    answer_for,
)
from baton.gateway.openapi import Status, describe
from baton.gateway.request import MAX_MODEL_CHARS
from baton.gateway.workers import Pending, Workers
from baton.protocol import worker_http
from baton.protocol.gateway_http import (
    ALERTS_PATH,
    DASHBOARD_PATH,
    DEMAND_PATH,
    LINKS_PATH,
    OPENAPI_PATH,
    QUEUE_PATH,
    READY_PATH,
    REQUESTS_PATH,
    ROUTE_PATH,
    TRANSFERS_PATH,
    WORKERS_PATH,
)
from baton.protocol.worker_http import (
    CHAT_COMPLETIONS_PATH,
    COMPLETIONS_PATH,
    METRICS_PATH,
    MODELS_PATH,
    Role,
    ServedModel,
    ServedModels,
    Version,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    Headers: TypeAlias = Iterable[tuple[bytes, bytes]]

    from starlette.types import Receive, Scope, Send

    from baton.gateway.alerts.monitor import AlertMonitor
    from baton.gateway.clients import Clients
    from baton.gateway.completions import Completions
    from baton.gateway.debug import LinkList, WorkerList
    from baton.gateway.demand_page import DemandPage
    from baton.gateway.management_key import ManagementKey
    from baton.gateway.metrics import GatewayMetrics
    from baton.gateway.options import GatewayOptions
    from baton.gateway.queue_page import QueuePage
    from baton.gateway.request_pages import RequestPages
    from baton.gateway.route_explainer import RouteExplainer
    from baton.gateway.transfer_page import TransferPage


PREFILL_STARTUP_GRACE_S: Final = 15.0
"""Once somebody decodes, for workers that were listed and have never answered."""


class Readiness:
    """Owner: the event loop's thread."""

    def __init__(self, workers: Workers, clock: Clock) -> None:
        self._workers, self._clock = workers, clock
        self._grace_ends_at: Instant | None = None

    def why_not(self) -> str | None:
        """What is waited for; None if the gateway is ready."""
        workers = self._workers
        if not workers.fleet.can_decode:
            return workers.why_not_ready()
        now = self._clock.now()
        if self._grace_ends_at is None:
            self._grace_ends_at = Instant(now + PREFILL_STARTUP_GRACE_S)
        in_grace = now < self._grace_ends_at
        return workers.why_not_ready() if in_grace and self._is_prefill_pending() else None

    def _is_prefill_pending(self) -> bool:
        return any(
            isinstance(worker.state, Pending) and worker.address.role is not Role.DECODE
            for worker in self._workers.all
        )


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Which `Host` and `Origin` headers are taken: against DNS rebinding and other sites' pages.

    `hosts` None: any, as on an address that other machines reach. Browsers name the page's origin
    with each request that a page sends; other clients name none.
    """

    hosts: frozenset[str] | None
    origins: frozenset[str]

    @classmethod
    def of(cls, options: GatewayOptions, address: str) -> Self:
        """What the operator allows; at an address of loopback, only names of loopback besides."""
        listed = {host.lower() for host in options.allowed_hosts}
        hosts = frozenset(listed) if listed or is_loopback(address) else None
        return cls(hosts, frozenset(options.allowed_origins))

    def check(self, path: str, headers: Headers) -> bytes:
        """Pass, or raise: the listed origin that the request names, empty without one.

        The dashboard's own page asks for its modules as its origin.

        Raises:
            ForbiddenError: the request names a host or an origin that is not allowed.
        """
        host = listed = b""
        origins: tuple[bytes, ...] = ()
        for name, value in headers:
            if name == b"host":
                host = value
                if self.hosts is not None:
                    self._check_host(value.decode("latin-1"))
            elif name == b"origin" and value.decode("latin-1") in self.origins:
                listed = value
            elif name == b"origin":
                origins = (*origins, value)
        for origin in origins:
            is_own = origin in {b"http://" + host, b"https://" + host}
            if not (is_own and is_dashboard(path)):
                raise ForbiddenError(
                    f"pages of {origin[:200]!r} may not use this gateway; list their origin in "
                    "gateway.allowed_origins"
                )
        return listed

    def _check_host(self, text: str) -> None:
        host = text.rpartition(":")[0] if text.rpartition(":")[2].isdigit() else text
        host = host.strip("[]").lower()
        if self.hosts is not None and host not in self.hosts and not _is_loopback(host):
            raise ForbiddenError(
                f"this gateway is not called {host[:200]!r}; if a proxy in front of it is, list "
                "the name in gateway.allowed_hosts"
            )


FIND_INTERVAL_S: Final = 0.02
MAX_HOST_CHARS: Final = 253
"""Of a name in DNS."""
COMPLETION_PATHS: Final = frozenset({CHAT_COMPLETIONS_PATH, COMPLETIONS_PATH})
CLIENT_PATHS: Final = "/v1/"
DEBUG_PATHS: Final = "/debug/"
OPERATOR_PATHS: Final = (DEBUG_PATHS, DASHBOARD_PATH, ALERTS_PATH)
"""They show requests and workers: behind the management key, and never to other machines' clients
of the gateway's own port."""
MANAGEMENT_PATHS: Final = (METRICS_PATH, *OPERATOR_PATHS)
PROMETHEUS_TEXT: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask for what. Owner: the event loop's thread.

    `management_origin`: for the management listener, which has an address of its own.
    `is_managed_here`: whether `MANAGEMENT_PATHS` are answered, not by a listener of their own.
    `key`: what `OPERATOR_PATHS` need; None: nothing.
    """

    origin: RequestOrigin
    management_origin: RequestOrigin
    clients: Clients
    is_managed_here: bool
    key: ManagementKey | None = None

    def check(self, path: str, scope: Scope) -> None:
        """Pass, or raise. Completions look for the client themselves, and count it.

        Raises:
            UnauthorizedError: an API key is needed, or the management key.
            PathNotFoundError: the path is not answered here.
        """
        headers: Headers = scope["headers"]
        if path.startswith(CLIENT_PATHS) and path not in COMPLETION_PATHS:
            self.clients.authenticate(headers)
        elif path.startswith(MANAGEMENT_PATHS) and not self.is_managed_here:
            raise PathNotFoundError(f"{path} is answered by the management listener alone")
        elif path.startswith(OPERATOR_PATHS) and not _is_local(scope):
            raise PathNotFoundError(f"{path} does not exist here")
        elif self.key is not None and path.startswith(OPERATOR_PATHS):
            self.key.check(headers)

    def check_management(self, path: str, headers: Headers) -> None:
        """Pass, or raise: for the management listener.

        Raises:
            ForbiddenError: see `RequestOrigin`.
            PathNotFoundError: the path is for clients.
            UnauthorizedError: the management key is needed.
        """
        self.management_origin.check(path, headers)
        if path.startswith(CLIENT_PATHS):
            raise PathNotFoundError(f"{path} is not answered by the management listener")
        if self.key is not None and path.startswith(OPERATOR_PATHS):
            self.key.check(headers)


@dataclass(frozen=True, slots=True)
class DebugPages:
    """What an operator may look at."""

    requests: RequestPages
    workers: WorkerList
    queue: QueuePage
    route: RouteExplainer
    links: LinkList
    demand: DemandPage
    transfers: TransferPage
    alerts: AlertMonitor
    dashboard: Dashboard


class GatewayApp:
    """An ASGI application. Completions go straight to their handler; all else is a short answer."""

    def __init__(
        self,
        completions: Completions,
        workers: Workers,
        metrics: GatewayMetrics,
        *,
        debug: DebugPages,
        readiness: Readiness,
        access: Access,
    ) -> None:
        self._completions, self._workers, self.metrics = completions, workers, metrics
        self._debug_pages, self._ready, self._access = debug, readiness, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        try:
            origin = self._access.origin.check(path, scope["headers"])
            if origin and path.startswith(CLIENT_PATHS):
                send = share_with(origin, send)
                if scope["method"] == "OPTIONS":  # a browser asks first, without the API key
                    await send_preflight(send, scope["headers"])
                    return
            self._access.check(path, scope)
            if path in COMPLETION_PATHS and scope["method"] == "POST":
                await self._completions.serve(path, scope, receive, send)
                return
            await self._answer(path, scope, receive, send)
        except BatonError as exc:
            await send_error(send, answer_for(exc))
        except Exception as exc:
            log.exception("%s failed", path)
            await send_error(send, answer_for(exc))

    async def find_workers(self, timeout_s: float) -> None:
        """Return once requests can be served, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._ready.why_not() is not None:  # noqa: ASYNC110 - it sends no event
                    await asyncio.sleep(FIND_INTERVAL_S)

    def end_streams(self) -> None:
        """The process is going to end: what would go on as long as its client wants ends now."""
        self._debug_pages.dashboard.end()

    async def manage(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to the management listener."""
        path: str = scope["path"]
        try:
            self._access.check_management(path, scope["headers"])
            await self._answer(path, scope, receive, send)
        except BatonError as exc:
            await send_error(send, answer_for(exc))
        except Exception as exc:
            log.exception("%s failed", path)
            await send_error(send, answer_for(exc))

    async def _answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if path in COMPLETION_PATHS or (path == ROUTE_PATH and scope["method"] != "POST"):
            raise MethodNotAllowedError(f"{path} takes POST", allowed="POST")
        if path == ROUTE_PATH:
            explained = await self._debug_pages.route.serve(scope, receive)
            await send_whole(send, 200, msgspec.json.encode(explained), (JSON,))
            return
        if is_dashboard(path):
            await self._debug_pages.dashboard.serve(path, scope, receive, send)
            return
        if path == METRICS_PATH:
            _need_get(path, scope)
            text = await self.metrics.exposition_in_parts()
            await send_whole(send, 200, text, (PROMETHEUS_TEXT,))
            return
        if path == OPENAPI_PATH:
            _need_get(path, scope)
            await send_whole(send, 200, describe(is_managed_here=self._access.is_managed_here))
            return
        answer = await self._json_answer(path, scope)
        await send_whole(send, 200, msgspec.json.encode(answer), (JSON,))

    async def _json_answer(self, path: str, scope: Scope) -> msgspec.Struct:
        match path:
            case worker_http.HEALTH_PATH:
                answer: msgspec.Struct = Status("ok")
            case _ if path == READY_PATH:
                answer = self._readiness()
            case worker_http.VERSION_PATH:
                answer = Version(__version__)
            case _ if path == MODELS_PATH:
                answer = self._models()
            case _ if path.startswith(f"{MODELS_PATH}/"):
                answer = self._model(path.removeprefix(f"{MODELS_PATH}/"))
            case _ if f"{path}/".startswith(f"{REQUESTS_PATH}/"):
                asked = path.removeprefix(REQUESTS_PATH).removeprefix("/")
                answer = await self._debug_pages.requests.show(asked, scope["query_string"])
            case _ if path == TRANSFERS_PATH:
                answer = await self._debug_pages.transfers.show()
            case _:
                answer = self._management_page(path)
        _need_get(path, scope)
        return answer

    def _management_page(self, path: str) -> msgspec.Struct:
        pages = self._debug_pages
        match path:
            case _ if path == WORKERS_PATH:
                return pages.workers.show()
            case _ if path == QUEUE_PATH:
                return pages.queue.show()
            case _ if path == DEMAND_PATH:
                return pages.demand.show()
            case _ if path == LINKS_PATH:
                return pages.links.show()
            case _ if path == ALERTS_PATH:
                return pages.alerts.show()
            case _:
                raise PathNotFoundError(f"{path} does not exist here")

    def _readiness(self) -> Status:
        reason = self._ready.why_not()
        if reason is not None:
            raise NoWorkerError(f"not ready: {reason}")
        return Status("ready")

    def _models(self) -> ServedModels:
        lengths, adapters = self._workers.context_lengths(), self._workers.fleet.adapters
        models = [ServedModel(id=name, max_model_len=lengths[name]) for name in sorted(lengths)]
        models += [
            ServedModel(id=name, max_model_len=lengths[parent], parent=parent)
            for name, parent in sorted(adapters.items())
            if parent in lengths and name not in lengths
        ]
        return ServedModels(data=tuple(models))

    def _model(self, name: str) -> ServedModel:
        found = next((model for model in self._models().data if model.id == name), None)
        if found is None:
            raise ModelNotFoundError(f"no model {name[:MAX_MODEL_CHARS]!r} is served here")
        return found


class ManagementApp:
    """What an operator looks at, on a listener of its own: all but completions."""

    def __init__(self, app: GatewayApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "http":
            await self._app.manage(scope, receive, send)


def _is_loopback(host: str) -> bool:
    return len(host) <= MAX_HOST_CHARS and _is_loopback_cached(host)


# Reading an address takes 5 us, and each request names its host.
_is_loopback_cached = lru_cache(maxsize=256)(is_loopback)


def _need_get(path: str, scope: Scope) -> None:
    if scope["method"] not in {"GET", "HEAD"}:
        raise MethodNotAllowedError(f"{path} takes GET", allowed="GET")


def _is_local(scope: Scope) -> bool:
    """Whether the client is on this machine: others' requests are not for everybody's eyes."""
    client = scope.get("client")
    return client is not None and is_loopback(client[0])
