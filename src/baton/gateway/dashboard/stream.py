"""`/dashboard/events`: one snapshot a second, made once for all viewers, as server-sent events.

A viewer that reads slowly is sent the latest snapshot when it is ready for one, and not those
before: nothing is queued. While no page is open, only `Series.sample` runs.

    history ──► (tick, links) ──► tick ──► tick ──► … ──► (tick, links) ──► …
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Self

import msgspec

from baton.errors import OverloadedError

if TYPE_CHECKING:
    from starlette.types import Receive, Send

    from baton.gateway.asgi import Header
    from baton.gateway.dashboard.series import Series
    from baton.gateway.dashboard.snapshot import SnapshotBuilder

INTERVAL_S: Final = 1.0
LINKS_EVERY: Final = 5
"""Ticks: links change slowly, and are the larger part."""
MOST_VIEWERS: Final = 16
RETRY_MS: Final = 2000
SEND_TIMEOUT_S: Final = 20.0
"""A viewer that takes nothing for so long is gone."""
HEADERS: Final[tuple[Header, ...]] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)

log = logging.getLogger(__name__)


class DashboardStream:
    """An asynchronous context manager: it samples within. Owner: the event loop's thread."""

    def __init__(self, series: Series, builder: SnapshotBuilder) -> None:
        self._series, self._builder = series, builder
        self._tick = self._links = b""
        self._num_ticks = self._num_links = 0
        self._made = asyncio.Event()
        self._is_over = False
        self._task: asyncio.Task[None] | None = None
        self.num_viewers = 0

    async def __aenter__(self) -> Self:
        """Begin to sample."""
        self._series.sample()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Sample no more."""
        self.end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def end(self) -> None:
        """Viewers' streams end now: the process is going to, and must not wait for them."""
        self._is_over = True
        self._made.set()

    async def serve(self, receive: Receive, send: Send) -> None:
        """Send one viewer what changes, until it leaves or `end`.

        Raises:
            OverloadedError: there are `MOST_VIEWERS` already.
        """
        if self.num_viewers >= MOST_VIEWERS:
            raise OverloadedError(
                f"{MOST_VIEWERS} dashboards are open at this gateway; close one of them"
            )
        self.num_viewers += 1
        leaving = asyncio.create_task(_until_left(receive))
        try:
            if self.num_viewers == 1:
                await self._make()
            start = {"type": "http.response.start", "status": 200, "headers": HEADERS}
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(start)
            history = _event("history", self._builder.history())
            await _write(send, b"retry: %d\n\n%b" % (RETRY_MS, history))
            await self._follow(leaving, send)
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            log.info("a dashboard took nothing for %g s; its stream ends", SEND_TIMEOUT_S)
        finally:
            leaving.cancel()
            self.num_viewers -= 1
            if not self.num_viewers:
                self._tick = self._links = b""

    async def _follow(self, leaving: asyncio.Task[None], send: Send) -> None:
        num_links_sent = num_ticks_sent = -1
        while not (leaving.done() or self._is_over):
            made = self._made
            if self._tick and num_ticks_sent != self._num_ticks:  # b"": the first is being made
                num_ticks_sent, body = self._num_ticks, self._tick
                if num_links_sent != self._num_links:
                    num_links_sent, body = self._num_links, self._tick + self._links
                await _write(send, body)
            if made is self._made:
                await made.wait()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                self._series.sample()
                if self.num_viewers:
                    await self._make()
            except Exception:
                log.exception("a dashboard's snapshot failed; trying again")

    async def _make(self) -> None:
        """A new snapshot, for all who wait for one."""
        if not self._links or self._num_ticks % LINKS_EVERY == 0:
            links = _event("links", await self._builder.links())
            if not self.num_viewers:  # the last one left meanwhile: the next is sent none so old
                return
            self._links = links
            self._num_links += 1
        self._tick = _event("tick", self._builder.tick(self._series.points[-1]))
        self._num_ticks += 1
        made, self._made = self._made, asyncio.Event()
        made.set()


def _event(name: str, data: msgspec.Struct) -> bytes:
    """JSON has no line breaks, so it is one line of data."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


async def _write(send: Send, body: bytes) -> None:
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
