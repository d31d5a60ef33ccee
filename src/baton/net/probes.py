"""Kubernetes' probes of a worker: plain HTTP on a port of its own, which answers nothing else.

The worker's own port asks for a certificate, which the kubelet does not have.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final

from baton.clock import MachineClock
from baton.net.http_limits import Connections, HttpLimits
from baton.net.http_server import bind, serve_beside

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from starlette.types import Receive, Scope, Send

LIVE_PATH: Final = "/live"
"""200 as long as the event loop runs: also while the worker drains, or is busy."""
READY_PATH: Final = "/ready"
"""200 while the worker's own `/health` is 200: once it has loaded, until it drains."""
LIMITS: Final = HttpLimits(
    max_head_bytes=8 * 1024, head_timeout_s=5.0, max_connections=8, max_connections_per_address=8
)

log = logging.getLogger(__name__)


class ProbeApp:
    """An ASGI application: two paths, and answers without a body."""

    def __init__(self, is_ready: Callable[[], Awaitable[bool]]) -> None:
        self._is_ready = is_ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        del receive
        if scope["type"] != "http":
            return
        start = {
            "type": "http.response.start",
            "status": await self._find_status(scope["method"], scope["path"]),
            "headers": [(b"content-length", b"0")],
        }
        await send(start)
        await send({"type": "http.response.body", "body": b""})

    async def _find_status(self, method: str, path: str) -> int:
        if method == "GET" and path == LIVE_PATH:
            return 200
        if method == "GET" and path == READY_PATH:
            return 200 if await self._is_ready() else 503
        return 404


@contextlib.asynccontextmanager
async def serve_probes(
    host: str, port: int | None, is_ready: Callable[[], Awaitable[bool]]
) -> AsyncGenerator[None]:
    """Answer probes for as long as the block runs; `port` None: nothing listens.

    Raises:
        ConfigError: the port is taken.
    """
    if port is None:
        yield
        return
    connections = Connections(LIMITS, MachineClock(), lambda _: None)
    async with serve_beside(ProbeApp(is_ready), connections, bind(host, port), host) as url:
        log.info("probes: %s", url)
        yield
