"""Follows a journal of a prefix cache or a store: asks for what came after the last event known.

The worker answers once there is something, or after a second. What it no longer remembers it
replaces by all that it holds.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.errors import BatonError, ProtocolError
from baton.events.blocks import FeedEvent, FeedHealth, Lost, Restarted
from baton.events.journal import BATON_HASHES, JournalPage
from baton.events.wire import decode_page
from baton.gateway.errors import UpstreamError
from baton.protocol.worker_http import KV_EVENTS_PREFIX, MAX_KV_EVENTS_BYTES

if TYPE_CHECKING:
    from yarl import URL

    from baton.gateway.upstream import Upstream

ANSWER_TIMEOUT_S: Final = 10.0
PAGE_INTERVAL_S: Final = 0.1
"""A worker that generates has news in each step, and each answer takes of its processor's time."""
RETRY_AFTER_S: Final = 0.5
MAX_PENDING: Final = 1 << 16
"""Events not polled yet: it does not ask for more until they are."""


class JournalFeed:
    """A `KVEventFeed`. Owner: the event loop's thread."""

    def __init__(self, url: URL, upstream: Upstream) -> None:
        self._url, self._upstream = url, upstream
        self._events: list[FeedEvent] = []
        self._last = 0
        self.health = FeedHealth()
        self._task = asyncio.create_task(self._run())

    def poll(self) -> list[FeedEvent]:
        """See `KVEventFeed`."""
        events, self._events = self._events, []
        return events

    async def stop(self) -> None:
        """Ask no more; idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                if len(self._events) < MAX_PENDING:
                    self._take(await self._ask())
                    await asyncio.sleep(PAGE_INTERVAL_S)
                    continue
            except ProtocolError:
                unreadable = self.health.num_unreadable + 1
                self.health = replace(self.health, num_unreadable=unreadable)
            except BatonError:
                self.health = replace(self.health, connected=False)
            await asyncio.sleep(RETRY_AFTER_S)

    async def _ask(self) -> JournalPage:
        url = self._url.with_path(f"{KV_EVENTS_PREFIX}{self._last}")
        status, body = await self._upstream.get(url, ANSWER_TIMEOUT_S, MAX_KV_EVENTS_BYTES)
        if status != HTTPStatus.OK:
            raise UpstreamError(f"{url} answered {status}")
        return decode_page(body, BATON_HASHES)

    def _take(self, page: JournalPage) -> None:
        health = replace(self.health, connected=True, last_seq=page.last or None)
        if page.is_whole:
            self._events.append(Lost(page.last) if page.is_incomplete else Restarted())
            num_lost = health.num_lost + page.is_incomplete
            health = replace(health, num_replays=health.num_replays + 1, num_lost=num_lost)
        self.health = health
        self._events += page.events
        self._last = page.last
