"""Between the engine's thread and the event loop; also who is let in, and drain.

    engine's thread: sink(updates of one step) ──one call_soon_threadsafe──► event loop: dispatch
    event loop:      open(request) ─► AnswerStream ─► async iteration ─► closed: cancel if unfinished
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from baton.engines.interface import NewToken, RequestFailed
from baton.worker.problems import DrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.engines.interface import Engine, EngineUpdate, GenerationRequest
    from baton.ids import RequestId


class AnswerStream:
    """The updates of one request, in order. At most `max_tokens` of them are ever queued."""

    def __init__(self) -> None:
        self._updates: deque[EngineUpdate] = deque()
        self._arrived = asyncio.Event()
        self.finished = False

    def push(self, update: EngineUpdate) -> None:
        """Queue an update; the one that ends the answer sets `finished`."""
        self._updates.append(update)
        self.finished = isinstance(update, RequestFailed) or update.finish is not None
        self._arrived.set()

    async def tokens(self) -> list[NewToken]:
        """Wait for at least one token, then take all that are there.

        Raises:
            BatonError: the request failed; tokens before the failure were returned earlier.
        """
        while not self._updates:
            self._arrived.clear()
            await self._arrived.wait()
        taken: list[NewToken] = []
        while self._updates:
            update = self._updates[0]
            if isinstance(update, RequestFailed):
                if taken:
                    break
                raise update.error
            taken.append(update)
            self._updates.popleft()
        return taken


class EngineBridge:
    """Owned by the event loop's thread; `sink` alone is called on the engine's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams: dict[RequestId, AnswerStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say which loop updates go to, before the engine starts."""
        self._loop = loop

    def sink(self, updates: Sequence[EngineUpdate]) -> None:
        """The engine's `UpdateSink`: one wake-up of the loop for all updates of a step."""
        if updates and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, tuple(updates))

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return len(self._streams)

    @contextmanager
    def open(self, request: GenerationRequest) -> Iterator[AnswerStream]:
        """Submit a request; leaving early, however, cancels it.

        Raises:
            DrainingError: no new requests are taken.
            OverloadedError: the engine's queue is full.
            ContextLengthError: the request can never fit.
        """
        if self._draining:
            raise DrainingError("this worker is ending; send the request to another one")
        stream = AnswerStream()
        self._streams[request.id] = stream
        self._idle.clear()
        try:
            self._engine.submit(request)
            yield stream
        finally:
            del self._streams[request.id]
            if not stream.finished:
                self._engine.cancel(request.id)
            if not self._streams:
                self._idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests; wait until the open ones end, then fail the rest."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            error = DrainingError(f"this worker ended before the answer, {timeout_s:g} s into drain")
            for request, stream in self._streams.items():
                self._engine.cancel(request)
                stream.push(RequestFailed(request, error))
            await self._idle.wait()

    def _dispatch(self, updates: tuple[EngineUpdate, ...]) -> None:
        for update in updates:
            stream = self._streams.get(update.request)
            if stream is not None and not stream.finished:
                stream.push(update)
