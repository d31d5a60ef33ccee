"""Sends one phase's requests and records them. Owned by one event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

from baton.bench.load.records import Phase, Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.bench.load.client import BodyWriter, Client, Exchange, Prepared
    from baton.bench.load.stream import Failure
    from baton.bench.workloads.requests import Conversation, Request
    from baton.clock import Clock, Instant

NUM_UNREACHABLE: Final = 5
NUM_FAILED: Final = 20
LEAST_FAILING_S: Final = 1.0
"""A shorter burst of failures does not stop a run."""


class Breaker:
    """Circuit breaker: stops a run whose server is gone. A complete answer resets it.

    So does a refusal of a server that streams to others: it sheds load.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._num_failed = self._num_unreachable = 0

    def count(self, record: Record, last_token_s: float = -inf) -> str | None:
        """Count an ended request; why to stop, or None.

        `last_token_s`: when any request received a token, by the clock of the record.
        """
        failure = record.failure
        sheds_load = (
            failure is not None
            and failure.kind == "refused"
            and self._first_s is not None
            and last_token_s > self._first_s
        )
        if record.is_complete or sheds_load:
            self._first_s, self._num_failed, self._num_unreachable = None, 0, 0
        return None if failure is None else self._count_failure(record, failure)

    def _count_failure(self, record: Record, failure: Failure) -> str | None:
        if self._first_s is None:
            self._first_s = record.sent_s
        is_unreachable = failure.kind == "connect"
        self._num_failed += 1
        self._num_unreachable += is_unreachable
        lasts_s = record.ended_s - self._first_s
        if lasts_s < LEAST_FAILING_S:
            return None
        if is_unreachable and self._num_unreachable >= NUM_UNREACHABLE:
            return f"the server is gone: no connection for {lasts_s:.1f} s ({failure.message})"
        if self._num_failed >= NUM_FAILED:
            return f"{self._num_failed} requests in a row failed; the last: {failure.message}"
        return None


AFTER_FAILURE_S: Final = 0.2
"""A failed conversation is replaced after this pause: a failing server is not flooded."""


@dataclass(frozen=True, slots=True)
class Due:
    """A request's scheduled time, and how long `max_in_flight` delayed it."""

    at_s: float | None = None
    held_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """A request's position in a run."""

    index: int
    conversation: int
    turn: int
    due: Due


class Observer(Protocol):
    """Observes a run."""

    def sent(self, phase: Phase) -> None:
        """A request was sent."""
        ...

    def ended(self, record: Record) -> None:
        """A request has ended."""
        ...


class Sender:
    """One phase. Once closed it sends nothing; requests in flight continue until cancelled.

    `broken` is set when the server is gone; `why` is then the reason.
    """

    def __init__(
        self,
        client: Client,
        writer: BodyWriter,
        clock: Clock,
        *,
        phase: Phase,
        observers: Iterable[Observer],
    ) -> None:
        self.records: list[Record] = []
        self.broken = asyncio.Event()
        self.why: str | None = None
        self.phase = phase
        self._client, self._writer, self._clock = client, writer, clock
        self._observers: Sequence[Observer] = tuple(observers)
        self._breaker = Breaker()
        self._closing = asyncio.Event()
        self._origin = clock.now()
        self._num_sent = 0

    @property
    def is_open(self) -> bool:
        """Whether more may be sent."""
        return not self._closing.is_set()

    def close(self) -> None:
        """Stop sending."""
        self._closing.set()

    def now_s(self) -> float:
        """Seconds since this phase's beginning."""
        return self._clock.now() - self._origin

    def prepare(self, ask: Request) -> Prepared:
        """Encode a request before its scheduled time."""
        return self._writer.prepare(ask)

    async def wait_until(self, due_s: float) -> bool:
        """Wait until a time; whether this is still open then."""
        delay_s = due_s - self.now_s()
        try:
            async with asyncio.timeout(max(0.0, delay_s)):
                await self._closing.wait()
        except TimeoutError:
            pass
        return self.is_open

    async def run_conversation(
        self, number: int, conversation: Conversation, first: Prepared, due: Due
    ) -> None:
        """Send a conversation's requests, each after the answer before; a failure ends it."""
        prepared = first
        for turn in range(len(conversation.turns)):
            place = Place(self._num_sent, number, turn, due if turn == 0 else Due())
            record = await self._ask(prepared, place)
            if not record.is_complete:
                await self.wait_until(self.now_s() + AFTER_FAILURE_S)
                return
            if turn + 1 == len(conversation.turns) or not self.is_open:
                return
            prepared = self.prepare(conversation.turns[turn + 1])
            if conversation.pause_s and not await self.wait_until(
                self.now_s() + conversation.pause_s
            ):
                return

    async def _ask(self, prepared: Prepared, place: Place) -> Record:
        self._num_sent += 1
        for observer in self._observers:
            observer.sent(self.phase)
        found = await self._client.exchange(prepared)
        record = make_record(found, prepared.ask, place, self._origin, phase=self.phase)
        self.records.append(record)
        for observer in self._observers:
            observer.ended(record)
        why = self._breaker.count(record, self._client.last_token_at - self._origin)
        if why is not None and self.why is None:
            self.why = why
            self.broken.set()
        return record


def make_record(
    found: Exchange, ask: Request, place: Place, origin: Instant, *, phase: Phase
) -> Record:
    """The record of a request; times in microseconds since `origin`."""
    answer = found.answer

    def since(at: float) -> float:
        return round(at - origin, 6)

    return Record(
        index=place.index,
        conversation=place.conversation,
        turn=place.turn,
        phase=phase,
        scheduled_s=place.due.at_s,
        held_s=round(place.due.held_s, 6),
        sent_s=since(found.sent_at),
        first_byte_s=None if found.first_byte_at is None else since(found.first_byte_at),
        token_s=tuple(map(since, answer.token_at)),
        ended_s=since(found.ended_at),
        tokens=answer.tokens,
        asked_prompt_tokens=ask.num_prompt_tokens,
        asked_output_tokens=ask.num_output_tokens,
        status=found.status,
        finish_reason=answer.finish_reason,
        failure=found.failure,
        is_cut=found.is_cut,
    )
