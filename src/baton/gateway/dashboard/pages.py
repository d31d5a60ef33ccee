"""Answers requests below `/dashboard`: the page's files, which the package has, and its stream."""

from __future__ import annotations

import contextlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from baton.gateway.asgi import Header, send_whole
from baton.gateway.dashboard.series import Series
from baton.gateway.dashboard.snapshot import SnapshotBuilder, SnapshotPages
from baton.gateway.dashboard.stream import DashboardStream
from baton.gateway.errors import MethodNotAllowedError, PathNotFoundError
from baton.protocol.gateway_http import DASHBOARD_PATH

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Receive, Scope, Send

    from baton.gateway.completions import Completions
    from baton.gateway.request_context import Services
    from baton.gateway.request_history import RequestHistory

EVENTS: Final = "events"
INDEX: Final = "index.html"
REDIRECT: Final = 307
TYPES: Final = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
HEADERS: Final[tuple[Header, ...]] = (
    (
        b"content-security-policy",
        (
            b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
            b"img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            b"require-trusted-types-for 'script'"
        ),
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


class Dashboard:
    """What an operator's browser asks for. Owner: the event loop's thread."""

    def __init__(self, stream: DashboardStream) -> None:
        self._stream = stream

    async def serve(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; `path` is `/dashboard`, or below it.

        Raises:
            MethodNotAllowedError: it is no GET.
            PathNotFoundError: the page has no such file.
            OverloadedError: too many viewers.
        """
        if scope["method"] not in {"GET", "HEAD"}:
            raise MethodNotAllowedError(f"{path} takes GET", allowed="GET")
        name = path.removeprefix(DASHBOARD_PATH)
        if not name:  # the page's links are relative, so that a proxy may put it anywhere
            await send_whole(send, REDIRECT, b"", ((b"location", b"dashboard/"),))
            return
        name = name.removeprefix("/") or INDEX
        if name == EVENTS and scope["method"] == "GET":
            await self._stream.serve(receive, send)
            return
        content = _read_files().get(name)
        if content is None:
            raise PathNotFoundError(f"{path} does not exist here")
        kind = TYPES[name.rpartition(".")[2]]
        await send_whole(send, 200, content, ((b"content-type", kind), *HEADERS))

    def end(self) -> None:
        """See `DashboardStream.end`."""
        self._stream.end()


@contextlib.asynccontextmanager
async def open_dashboard(
    pages: SnapshotPages, services: Services, records: RequestHistory, completions: Completions
) -> AsyncGenerator[Dashboard]:
    """The dashboard, which samples for as long as the block runs; it shows what `pages` show."""
    series = Series(services, records, completions)
    builder = SnapshotBuilder(pages, services, records, series)
    async with DashboardStream(series, builder) as stream:
        yield Dashboard(stream)


def is_dashboard(path: str) -> bool:
    """Whether `Dashboard.serve` answers it."""
    return path == DASHBOARD_PATH or path.startswith(f"{DASHBOARD_PATH}/")


@cache
def _read_files() -> dict[str, bytes]:
    """All files of the page, by name: 150 KB, read when one is first asked for."""
    folder = files("baton.gateway.dashboard") / "static"
    return {
        each.name: each.read_bytes()
        for each in folder.iterdir()
        if each.name.rpartition(".")[2] in TYPES
    }
