"""The allow-list of paths. What is not on it does not exist, even where workers have it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from baton import __version__
from baton.config.cluster_key import is_loopback
from baton.errors import BatonError
from baton.gateway.asgi import JSON, send_error, send_whole
from baton.gateway.errors import (
    MethodNotAllowedError,
    NoWorkerError,
    PathNotFoundError,
    answer_for,
)

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from baton.gateway.completions import Completions
    from baton.gateway.debug_requests import RequestTraces
    from baton.gateway.debug_workers import WorkerList
    from baton.gateway.metrics import GatewayMetrics
    from baton.gateway.readiness import Readiness
    from baton.gateway.workers import Workers

COMPLETION_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
REQUESTS_PATH: Final = "/debug/requests"
WORKERS_PATH: Final = "/debug/workers"
PROMETHEUS_TEXT: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

log = logging.getLogger(__name__)


class Status(msgspec.Struct, frozen=True):
    """The answer to `/health` and `/ready`."""

    status: str


class Version(msgspec.Struct, frozen=True):
    """The answer to `/version`."""

    version: str


class Model(msgspec.Struct, frozen=True):
    """One entry of OpenAI's model list."""

    id: str
    max_model_len: int
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "baton"


class ModelList(msgspec.Struct, frozen=True):
    """The answer to `/v1/models`."""

    data: tuple[Model, ...]
    object: Literal["list"] = "list"


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
        if path == "/metrics":
            _need_get(path, scope)
            await send_whole(send, 200, self._metrics.exposition(), (PROMETHEUS_TEXT,))
            return
        answer = await self._json_answer(path, scope)
        await send_whole(send, 200, msgspec.json.encode(answer), (JSON,))

    async def _json_answer(self, path: str, scope: Scope) -> msgspec.Struct:
        match path:
            case "/health":
                answer: msgspec.Struct = Status("ok")
            case "/ready":
                answer = self._readiness()
            case "/version":
                answer = Version(__version__)
            case "/v1/models":
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

    def _models(self) -> ModelList:
        lengths = self._workers.context_lengths()
        return ModelList(tuple(Model(name, lengths[name]) for name in sorted(lengths)))

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
