"""Between the engine's thread and the event loop; also who is let in, and drain.

engine's thread: sink(updates of one step) ──one call_soon_threadsafe──► event loop: dispatch
event loop:      open(request) ─► AnswerStream ─► async iteration ─► closed: cancel if unfinished
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.engines.interface import (
    NewToken,
    PrefillRequest,
    RequestFailed,
    StandbyEngine,
    TokensComputed,
)
from baton.errors import BatonError, InvalidRequestError
from baton.worker.errors import DeadlineError, DrainingError, FencedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from baton.clock import Clock
    from baton.engines.interface import Engine, EngineUpdate, GenerationRequest
    from baton.ids import RequestId
    from baton.worker.fence import MembershipFence

DEADLINE_MARGIN_S: Final = 0.05
"""Deadlines are kept here, a little before the engine keeps them: its error has no status."""


class AnswerStream:
    """The updates of one request, in order. At most `max_tokens` of them are ever queued.

    `num_computed`: of a standby request, how many tokens it has the KV of.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._updates: deque[NewToken | RequestFailed] = deque()
        self._arrived = asyncio.Event()
        self.finished = False
        self.num_computed = 0

    def push(self, update: EngineUpdate) -> None:
        """Queue an update; the one that ends the answer sets `finished`, later ones are lost."""
        if self.finished:
            return
        self._arrived.set()
        if isinstance(update, TokensComputed):
            self.num_computed = update.num_tokens
            return
        self._updates.append(update)
        self.finished = isinstance(update, RequestFailed) or update.finish is not None

    def fail(self, request: RequestId, error: BatonError) -> None:
        """End an unfinished answer with an error, in the engine too."""
        if not self.finished:
            self._cancel()
            self.push(RequestFailed(request, error))

    def close(self) -> None:
        """Want no more updates: cancel in the engine what is unfinished. Idempotent."""
        if not self.finished:
            self.finished = True
            self._cancel()

    async def wait_computed(self, num_tokens: int) -> None:
        """Wait until a standby request has the KV of so many tokens.

        Raises:
            BatonError: the request failed.
        """
        while self.num_computed < num_tokens:
            if self._updates:
                await self.tokens()
            self._arrived.clear()
            await self._arrived.wait()

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


class EngineClient:
    """Owned by the event loop's thread; `sink` alone is called on the engine's."""

    def __init__(self, engine: Engine, clock: Clock, fence: MembershipFence | None = None) -> None:
        """Without a `fence` the worker announces itself to no gateway, and is never fenced."""
        self._engine, self._clock, self.fence = engine, clock, fence
        self._streams: dict[RequestId, AnswerStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the loop that updates go to, before the engine starts."""
        self._loop = loop

    def sink(self, updates: Sequence[EngineUpdate]) -> None:
        """The engine's `UpdateSink`: one wake-up of the loop for all updates of a step."""
        if updates and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, tuple(updates))

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def why_fenced(self) -> str | None:
        """Why nothing is served, now; None where it is."""
        return None if self.fence is None else self.fence.explain(self._clock.now())

    def fail_all(self, error: BatonError) -> None:
        """End every unfinished answer with an error, in the engine too."""
        for request, stream in self._streams.items():
            stream.fail(request, error)

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return len(self._streams)

    @contextmanager
    def open(self, request: GenerationRequest) -> Iterator[AnswerStream]:
        """Submit a request; leaving cancels it if it is unfinished, its deadline fails it.

        Raises:
            FencedError: this worker has no membership lease, or has it no more.
            DrainingError: no new requests are taken, but those that move a stream elsewhere.
            OverloadedError: the engine's queue is full.
            ContextLengthError: the request can never fit.
            InvalidRequestError: it is a standby request, which the engine does not take.
        """
        if request.is_standby and not isinstance(self._engine, StandbyEngine):
            raise InvalidRequestError("this worker's engine takes no standby requests")
        if (reason := self.why_fenced()) is not None:
            raise FencedError(reason)
        if self._draining and not (self._streams and _is_leaving(request)):
            raise DrainingError("this worker is ending; send the request to another one")
        stream = AnswerStream(partial(self._engine.cancel, request.id))
        self._streams[request.id] = stream
        self._idle.clear()
        try:
            self._engine.submit(request)
        except BaseException:
            stream.finished = True  # the engine never had it
            self._remove(request.id)
            raise
        expiry = self._expire_later(request, stream)
        try:
            yield stream
        finally:
            expiry.cancel()
            stream.close()
            self._remove(request.id)

    def extend(self, request: RequestId, token_ids: Sequence[int], *, generates: bool) -> None:
        """See `StandbyEngine.extend`."""
        if isinstance(self._engine, StandbyEngine):
            self._engine.extend(request, token_ids, generates=generates)

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests; wait until the open ones end, then fail the rest."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self.fail_all(
                DrainingError(f"this worker ended before the answer did, after {timeout_s:g} s")
            )

    def _expire_later(
        self, request: GenerationRequest, stream: AnswerStream
    ) -> asyncio.TimerHandle:
        left_s = max(0.0, request.deadline - self._clock.now() - DEADLINE_MARGIN_S)
        error = DeadlineError("the time for this request was over before its answer was complete")
        return asyncio.get_running_loop().call_later(left_s, stream.fail, request.id, error)

    def _remove(self, request: RequestId) -> None:
        del self._streams[request]
        if not self._streams:
            self._idle.set()

    def _dispatch(self, updates: tuple[EngineUpdate, ...]) -> None:
        for update in updates:
            stream = self._streams.get(update.request)
            if stream is not None:
                stream.push(update)


def _is_leaving(request: GenerationRequest) -> bool:
    """Whether it hands the KV of an answer's first tokens over: a stream is moved from here."""
    return isinstance(request.kind, PrefillRequest) and request.sampling.first_index > 0
