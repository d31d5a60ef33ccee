"""The raw ASGI application: finds the handler, checks the bearer, answers errors."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.errors import BatonError
from baton.protocol.worker_http import HEALTH_PATH
from baton.worker.errors import (
    ClientGoneError,
    UnauthorizedError,
    UnknownPathError,
    WrongMethodError,
    describe,
    was_declined,
)
from baton.worker.exchange import WorkerExchange

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from baton.auth.key import ClusterKey
    from baton.telemetry.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[WorkerExchange], Awaitable[None]]
Methods: TypeAlias = Mapping[str, Handler]

OPEN_PATH: Final = HEALTH_PATH
"""The one path that needs no bearer: whoever watches the process may ask."""


@dataclass(frozen=True, slots=True)
class PatternRoute:
    """A path with one variable part between `prefix` and `suffix`."""

    prefix: str
    suffix: str
    methods: Methods

    def matches(self, path: str) -> bool:
        """Whether a path has this form, with something in between."""
        return (
            path.startswith(self.prefix)
            and path.endswith(self.suffix)
            and len(path) > len(self.prefix) + len(self.suffix)
        )


@dataclass(frozen=True, slots=True)
class Routes:
    """Which handler serves which path and method."""

    exact: Mapping[str, Methods]
    patterns: tuple[PatternRoute, ...]

    def find(self, method: str, path: str) -> Handler:
        """The handler.

        Raises:
            UnknownPathError: no such path.
            WrongMethodError: the path exists, for other methods.
        """
        methods = self.exact.get(path) or next(
            (route.methods for route in self.patterns if route.matches(path)), None
        )
        if methods is None:
            known = ", ".join(self.exact)
            raise UnknownPathError(f"there is nothing at {path[:200]!r}; try one of: {known}")
        if method not in methods:
            raise WrongMethodError(method, path, tuple(methods))
        return methods[method]


class Bearer:
    """Checks that a request comes from this cluster."""

    def __init__(self, key: ClusterKey) -> None:
        self._expected = b"Bearer " + key.sign("http", b"worker").hex().encode()

    def check(self, exchange: WorkerExchange) -> None:
        """Pass, or raise.

        Raises:
            UnauthorizedError: no bearer, or a wrong one.
        """
        shown = exchange.header(b"authorization") or b""
        if exchange.path != OPEN_PATH and not hmac.compare_digest(shown, self._expected):
            raise UnauthorizedError(
                "this worker listens beyond loopback and answers its own gateway only: send "
                "requests to the gateway; it needs the same BATON_CLUSTER_KEY as this worker"
            )


class WorkerApp:
    """The ASGI callable. `bearer` None trusts everybody who can connect (loopback)."""

    def __init__(self, routes: Routes, bearer: Bearer | None, metrics: WorkerMetrics) -> None:
        self._routes, self._bearer, self._metrics = routes, bearer, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other scopes are not ours."""
        if scope["type"] != "http":
            raise NotImplementedError(f"ASGI scope {scope['type']}")
        exchange = WorkerExchange(scope, receive, send)
        try:
            if self._bearer is not None:
                self._bearer.check(exchange)
            await self._routes.find(exchange.method, exchange.path)(exchange)
        except ClientGoneError:
            logger.debug("%s: the client left", exchange.request_id)
        except Exception as exc:
            if not isinstance(exc, BatonError):
                logger.exception("%s %s failed", exchange.method, exchange.path)
            await self._answer_error(exchange, exc)

    async def _answer_error(self, exchange: WorkerExchange, error: Exception) -> None:
        problem = describe(error)
        self._metrics.error_response(problem.status)
        if was_declined(error):
            logger.debug("%s: %s", exchange.request_id, error)
        elif problem.status >= 500:  # noqa: PLR2004 (HTTP's own line between the two faults)
            logger.warning("%s: %d, %s", exchange.request_id, problem.status, error)
        if not exchange.started:
            await exchange.send_json(problem.status, problem.body, problem.headers)
