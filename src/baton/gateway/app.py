"""The allow-list of paths: any other path is answered 404, even where workers have it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from baton import __version__
from baton.clock import Instant
from baton.config.cluster_key import is_loopback
from baton.errors import BatonError
from baton.gateway.asgi import JSON, send_error, send_whole
from baton.gateway.errors import MethodNotAllowedError, NoWorkerError, PathNotFoundError, answer_for
from baton.gateway.workers import Pending
from baton.protocol import worker_http
from baton.protocol.worker_http import (
    CHAT_COMPLETIONS_PATH,
    COMPLETIONS_PATH,
    METRICS_PATH,
    Role,
    ServedModel,
    ServedModels,
    Version,
)

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from baton.clock import Clock
    from baton.gateway.completions import Completions
    from baton.gateway.debug import RequestTraces, WorkerList
    from baton.gateway.metrics import GatewayMetrics
    from baton.gateway.workers import Workers


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


COMPLETION_PATHS: Final = frozenset({CHAT_COMPLETIONS_PATH, COMPLETIONS_PATH})
REQUESTS_PATH: Final = "/debug/requests"
WORKERS_PATH: Final = "/debug/workers"
PROMETHEUS_TEXT: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

log = logging.getLogger(__name__)


class Status(msgspec.Struct, frozen=True):
    """The answer to `/health` and `/ready`."""

    status: str


class GatewayApp:
    """An ASGI application. Completions go straight to their handler; all else is a short answer."""

    def __init__(
        self,
        completions: Completions,
        workers: Workers,
        metrics: GatewayMetrics,
        *,
        traces: RequestTraces,
        worker_list: WorkerList,
        readiness: Readiness,
    ) -> None:
        self._completions, self._workers = completions, workers
        self._metrics, self._traces, self._worker_list = metrics, traces, worker_list
        self._ready = readiness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        if path in COMPLETION_PATHS and scope["method"] == "POST":
            await self._completions.serve(path, scope, receive, send)
            return
        try:
            await self._answer(path, scope, send)
        except BatonError as exc:
            await send_error(send, answer_for(exc))
        except Exception as exc:
            log.exception("%s failed", path)
            await send_error(send, answer_for(exc))

    async def _answer(self, path: str, scope: Scope, send: Send) -> None:
        if path in COMPLETION_PATHS:
            raise MethodNotAllowedError(f"{path} takes POST", allowed="POST")
        if path == METRICS_PATH:
            _need_get(path, scope)
            await send_whole(send, 200, self._metrics.exposition(), (PROMETHEUS_TEXT,))
            return
        answer = await self._json_answer(path, scope)
        await send_whole(send, 200, msgspec.json.encode(answer), (JSON,))

    async def _json_answer(self, path: str, scope: Scope) -> msgspec.Struct:
        match path:
            case worker_http.HEALTH_PATH:
                answer: msgspec.Struct = Status("ok")
            case "/ready":
                answer = self._readiness()
            case worker_http.VERSION_PATH:
                answer = Version(__version__)
            case worker_http.MODELS_PATH:
                answer = self._models()
            case _ if f"{path}/".startswith(f"{REQUESTS_PATH}/") and _is_local(scope):
                answer = await self._debug(path)
            case _ if path == WORKERS_PATH and _is_local(scope):
                answer = self._worker_list.show()
            case _:
                raise PathNotFoundError(f"{path} does not exist here")
        _need_get(path, scope)
        return answer

    def _readiness(self) -> Status:
        reason = self._ready.why_not()
        if reason is not None:
            raise NoWorkerError(f"not ready: {reason}")
        return Status("ready")

    def _models(self) -> ServedModels:
        lengths = self._workers.context_lengths()
        return ServedModels(
            data=tuple(
                ServedModel(id=name, max_model_len=lengths[name]) for name in sorted(lengths)
            )
        )

    async def _debug(self, path: str) -> msgspec.Struct:
        if path == REQUESTS_PATH:
            return self._traces.latest()
        return await self._traces.of(path.removeprefix(f"{REQUESTS_PATH}/"))


def _need_get(path: str, scope: Scope) -> None:
    if scope["method"] not in {"GET", "HEAD"}:
        raise MethodNotAllowedError(f"{path} takes GET", allowed="GET")


def _is_local(scope: Scope) -> bool:
    """Whether the client is on this machine: others' requests are not for everybody's eyes."""
    client = scope.get("client")
    return client is not None and is_loopback(client[0])
