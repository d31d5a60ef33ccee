"""Who tells what happened on the servers under a load: did KV move, and where did the time go."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final, Protocol

import aiohttp
import msgspec

from baton.bench.architectures.results import Proof, Stages
from baton.telemetry.summary import TraceSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class TransferEvidence:
    """What is known of one cell. `proof` None: nobody was asked."""

    stages: Stages
    proof: Proof | None


class TransferCheck(Protocol):
    """Asked before each load and after it. Raises nothing: what is not known is said so."""

    async def begin(self, session: aiohttp.ClientSession) -> None:
        """A load is about to begin."""
        ...

    async def verify(
        self, session: aiohttp.ClientSession, names: Sequence[str], num_answered: int
    ) -> TransferEvidence:
        """The load is over. `names`: all its requests'; `num_answered`: as the client counted."""
        ...


@dataclass(frozen=True, slots=True)
class TraceCheck:
    """See `TransferCheck`: Baton's gateway has a trace of every request."""

    url: str

    async def begin(self, session: aiohttp.ClientSession) -> None:
        """See `TransferCheck`: traces bear the requests' names, nothing is to be remembered."""

    async def verify(
        self, session: aiohttp.ClientSession, names: Sequence[str], num_answered: int
    ) -> TransferEvidence:
        """See `TransferCheck`."""
        traces = await fetch_traces(session, self.url, names)
        return TransferEvidence(measure_stages(traces), prove(traces, num_answered))


NUM_AT_ONCE: Final = 8
TIMEOUT_S: Final = 10.0
MOST_TRACES: Final = 8192
OK: Final = 200
RECOMPUTED_TOKENS: Final = 1
"""vLLM computes a prompt's last token anew: KV for it may stay away."""

MOST_BLOCK_TOKENS: Final = 128
"""The largest of any engine here: vLLM's on CPUs."""


class FetchedTrace(msgspec.Struct, frozen=True):
    """The gateway's answer, as far as it matters here."""

    id: str
    status: int
    summary: TraceSummary | None


@dataclass(slots=True)
class RequestIds:
    """Names requests: `prefix-0`, `prefix-1`, …, and remembers how many."""

    prefix: str
    num_given: int = field(default=0)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.num_given += 1
        return f"{self.prefix}-{self.num_given - 1}"

    @property
    def given(self) -> list[str]:
        """All that were given, up to as many as are worth asking for."""
        return [f"{self.prefix}-{i}" for i in range(min(self.num_given, MOST_TRACES))]


async def fetch_traces(
    session: aiohttp.ClientSession, url: str, names: Sequence[str]
) -> list[FetchedTrace | None]:
    """Each request's trace; None where there is none (forgotten, or the gateway is gone)."""
    decoder = msgspec.json.Decoder(FetchedTrace)
    room = asyncio.Semaphore(NUM_AT_ONCE)

    async def fetch(name: str) -> FetchedTrace | None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                room,
                session.get(f"{url}/debug/requests/{name}", timeout=timeout) as response,
            ):
                return decoder.decode(await response.read()) if response.status == OK else None
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
            return None

    return await asyncio.gather(*(fetch(name) for name in names))


def prove(traces: Sequence[FetchedTrace | None], num_answered: int) -> Proof:
    """Compare what decode received with what it lacked. `num_answered`: as the client counted."""
    answered = _answered(traces)
    lacking = [summary for summary in answered if not _is_handed_over(summary)]
    modes = Counter(summary.mode or "none" for summary in answered)
    transports = Counter(s.transport for s in answered if s.transport is not None)
    fallbacks = Counter(cause.partition(": ")[0] for s in answered for cause in s.fallbacks)
    num_prompt = sum(summary.num_prompt_tokens for summary in answered)
    num_cached = sum(summary.num_cached_tokens for summary in answered)
    return Proof(
        num_requests=num_answered,
        num_untraced=max(0, num_answered - len(answered)),
        num_not_handed_over=len(lacking),
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_needed_tokens=num_prompt - num_cached,
        num_received_tokens=sum(summary.num_received_tokens for summary in answered),
        num_bytes=sum(summary.num_bytes for summary in answered),
        modes=dict(modes),
        transports=dict(transports),
        fallbacks=dict(fallbacks),
        num_tails=sum(map(_is_tail, answered)),
    )


def measure_stages(traces: Sequence[FetchedTrace | None]) -> Stages:
    """Medians of what the traces of answered requests have."""
    answered = _answered(traces)

    def middle(read: Callable[[TraceSummary], float | None]) -> float | None:
        found = [value for value in map(read, answered) if value is not None]
        return median(found) if found else None

    return Stages(
        middle(lambda s: s.queue_s),
        middle(lambda s: s.prefill_s),
        middle(lambda s: s.visible_transfer_s),
        middle(lambda s: s.decode_queue_s),
    )


def _answered(traces: Sequence[FetchedTrace | None]) -> list[TraceSummary]:
    """Of complete answers alone: one that was cut or failed proves nothing either way."""
    return [
        trace.summary
        for trace in traces
        if trace is not None
        and trace.status == OK
        and trace.summary is not None
        and trace.summary.outcome == "ok"
    ]


def _is_handed_over(summary: TraceSummary) -> bool:
    needed = summary.num_prompt_tokens - summary.num_cached_tokens
    # All but one token were in decode's cache: there is nothing to move.
    if needed <= RECOMPUTED_TOKENS:
        return True
    if _is_tail(summary):
        return True
    has_bytes = summary.num_bytes > 0 or summary.mode == "reference"
    return summary.num_received_tokens >= needed - RECOMPUTED_TOKENS and has_bytes


def _is_tail(summary: TraceSummary) -> bool:
    """Whether less than a block was lacking after cached ones: decode computes that by itself.

    Nothing went wrong and nothing was sent: a handoff would take longer. How large blocks are no
    trace says: their size is a power of two, and what is cached is whole blocks.
    """
    needed = summary.num_prompt_tokens - summary.num_cached_tokens
    most_block_tokens = summary.num_cached_tokens & -summary.num_cached_tokens
    is_short = needed < min(most_block_tokens, MOST_BLOCK_TOKENS)
    was_sent = summary.num_received_tokens > 0 or summary.num_bytes > 0
    return is_short and not was_sent and not summary.fallbacks
