"""Did KV move, how much, and where did the time go.

By the traces of Baton's gateway; of a peer, by vLLM's metrics before and after a load.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, Final, Protocol

import aiohttp
import msgspec

from baton.bench.architectures.results import NO_STAGES, Proof, Stages
from baton.errors import UNDECODABLE
from baton.telemetry.trace import TraceSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class TransferEvidence:
    """Evidence of one cell. `proof` None: none was requested."""

    stages: Stages
    proof: Proof | None


class TransferCheck(Protocol):
    """Reads the servers before and after each load. Raises nothing; missing data is reported."""

    async def begin(self, session: aiohttp.ClientSession) -> None:
        """Before a load."""
        ...

    async def verify(
        self, session: aiohttp.ClientSession, names: Sequence[str], num_answered: int
    ) -> TransferEvidence:
        """After the load. `names`: its requests' ids; `num_answered`: by the client's count."""
        ...


@dataclass(frozen=True, slots=True)
class TraceCheck:
    """See `TransferCheck`: Baton's gateway has a trace of every request."""

    url: str

    async def begin(self, session: aiohttp.ClientSession) -> None:
        """See `TransferCheck`: traces have the requests' ids, so that nothing is read here."""

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
"""vLLM recomputes a prompt's last token: its KV may be missing."""

MOST_BLOCK_TOKENS: Final = 128
"""The largest of any engine here: vLLM's on CPUs."""


class FetchedTrace(msgspec.Struct, frozen=True):
    """The fields of the gateway's answer that are used here."""

    id: str
    status: int
    summary: TraceSummary | None


@dataclass(slots=True)
class RequestIds:
    """Ids of requests: `prefix-0`, `prefix-1`, …; counts them."""

    prefix: str
    num_given: int = field(default=0)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.num_given += 1
        return f"{self.prefix}-{self.num_given - 1}"

    @property
    def given(self) -> list[str]:
        """The ids that were given, of at most `MOST_TRACES` the latest: a gateway has these."""
        first = max(0, self.num_given - MOST_TRACES)
        return [f"{self.prefix}-{i}" for i in range(first, self.num_given)]


async def fetch_traces(
    session: aiohttp.ClientSession, url: str, names: Sequence[str]
) -> list[FetchedTrace | None]:
    """Each request's trace; None where there is none (evicted, or the gateway has ended)."""
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
        except (aiohttp.ClientError, TimeoutError, OSError, *UNDECODABLE):
            return None

    return await asyncio.gather(*(fetch(name) for name in names))


def prove(traces: Sequence[FetchedTrace | None], num_answered: int) -> Proof:
    """Compare the tokens that decode received and needed. `num_answered`: by the client's count.

    Of more requests than there are `traces`, only so many are looked at.
    """
    answered = _answered(traces)
    num_answered = min(num_answered, len(traces))
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
    """Medians of the traces of answered requests."""
    answered = _answered(traces)

    def middle(read: Callable[[TraceSummary], float | None]) -> float | None:
        found = [value for value in map(read, answered) if value is not None]
        return median(found) if found else None

    return Stages(
        middle(lambda s: s.queue_s),
        middle(lambda s: s.prefill_s),
        middle(lambda s: s.exposed_transfer_s),
        middle(lambda s: s.decode_queue_s),
    )


def _answered(traces: Sequence[FetchedTrace | None]) -> list[TraceSummary]:
    """Summaries of complete answers: one that was cut or failed proves nothing."""
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
    """Whether less than a block was missing after the cached ones: decode computes that itself.

    That is no failure: a handoff would take longer. The block size is not in the trace: it is a
    power of two, and what is cached is whole blocks.
    """
    needed = summary.num_prompt_tokens - summary.num_cached_tokens
    most_block_tokens = summary.num_cached_tokens & -summary.num_cached_tokens
    is_short = needed < min(most_block_tokens, MOST_BLOCK_TOKENS)
    was_sent = summary.num_received_tokens > 0 or summary.num_bytes > 0
    return is_short and not was_sent and not summary.fallbacks


METRICS_TIMEOUT_S: Final = 10.0
SOURCES: Final = "vllm:prompt_tokens_by_source_total"
NIXL_BYTES: Final = "vllm:nixl_bytes_transferred_sum"
NIXL_FAILURES: Final = "vllm:nixl_num_failed_transfers_total"
SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([-+.\deEinfNa]+)", re.MULTILINE)
SOURCE: Final = re.compile(r'\bsource="(\w+)"')


class Counts(msgspec.Struct, frozen=True):
    """Counters of the decode servers since their start: prompt tokens by the source of their KV."""

    num_computed_tokens: float = 0.0
    num_cached_tokens: float = 0.0
    num_received_tokens: float = 0.0
    num_bytes: float = 0.0
    num_failed: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return self._combined(other, 1)

    def __sub__(self, other: Counts) -> Counts:
        return self._combined(other, -1)

    def _combined(self, other: Counts, sign: int) -> Counts:
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Counts(*(a + sign * b for a, b in zip(mine, theirs, strict=True)))


def read_counts(text: str) -> Counts | None:
    """Parse Prometheus' text; None where vLLM does not count what it received."""
    by_source: dict[str, float] = {}
    sums = {NIXL_BYTES: 0.0, NIXL_FAILURES: 0.0}
    for name, labels, value in SAMPLE.findall(text):
        if name in sums:
            sums[name] += float(value)
        elif name == SOURCES and (source := SOURCE.search(labels)):
            by_source[source[1]] = by_source.get(source[1], 0.0) + float(value)
    if "external_kv_transfer" not in by_source:
        return None
    return Counts(
        by_source.get("local_compute", 0.0),
        by_source.get("local_cache_hit", 0.0),
        by_source["external_kv_transfer"],
        sums[NIXL_BYTES],
        sums[NIXL_FAILURES],
    )


def prove_by_counts(spent: Counts | None, num_answered: int) -> Proof:
    """Proof from sums over all requests: only the total of missing tokens is known.

    `num_not_handed_over` is the least number, if each prompt had the mean length.
    """
    if spent is None:
        return _no_proof(num_answered)
    num_cached, num_received = int(spent.num_cached_tokens), int(spent.num_received_tokens)
    num_prompt = int(spent.num_computed_tokens) + num_cached + num_received
    needed = num_prompt - num_cached
    lacking = max(0, needed - num_received - RECOMPUTED_TOKENS * num_answered)
    mean = max(1.0, needed / max(1, num_answered))
    has_bytes = spent.num_bytes > 0 or needed <= RECOMPUTED_TOKENS * num_answered
    return Proof(
        num_requests=num_answered,
        num_untraced=0,
        num_not_handed_over=min(num_answered, ceil(lacking / mean)) if has_bytes else num_answered,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_needed_tokens=needed,
        num_received_tokens=num_received,
        num_bytes=int(spent.num_bytes),
        modes={"nixl": num_answered},
        transports={"UCX": num_answered},
        fallbacks={"failed transfer": int(spent.num_failed)} if spent.num_failed else {},
        source="metrics",
    )


def _no_proof(num_answered: int) -> Proof:
    return Proof(
        num_requests=num_answered,
        num_untraced=num_answered,
        num_not_handed_over=0,
        num_prompt_tokens=0,
        num_cached_tokens=0,
        num_needed_tokens=0,
        num_received_tokens=0,
        num_bytes=0,
        modes={},
        transports={},
        fallbacks={},
        source="none",
    )


@dataclass(slots=True)
class MetricsCheck:
    """See `TransferCheck`. Reads the decode servers themselves, not the proxy."""

    urls: tuple[str, ...]
    _before: Counts | None = field(default=None)

    async def begin(self, session: aiohttp.ClientSession) -> None:
        """See `TransferCheck`."""
        self._before = await self._count(session)

    async def verify(
        self, session: aiohttp.ClientSession, names: Sequence[str], num_answered: int
    ) -> TransferEvidence:
        """See `TransferCheck`."""
        del names
        after = await self._count(session)
        known = self._before is not None and after is not None
        spent = after - self._before if known and after and self._before else None
        return TransferEvidence(NO_STAGES, prove_by_counts(spent, num_answered))

    async def _count(self, session: aiohttp.ClientSession) -> Counts | None:
        found = await asyncio.gather(*(_fetch_counts(session, url) for url in self.urls))
        total = Counts()
        for each in found:
            if each is None:
                return None
            total += each
        return total


class NoCheck:
    """See `TransferCheck`: of a peer that moves no KV."""

    async def begin(self, session: aiohttp.ClientSession) -> None:
        """See `TransferCheck`."""

    async def verify(
        self, session: aiohttp.ClientSession, names: Sequence[str], num_answered: int
    ) -> TransferEvidence:
        """See `TransferCheck`."""
        del session, names, num_answered
        return TransferEvidence(NO_STAGES, None)


async def _fetch_counts(session: aiohttp.ClientSession, url: str) -> Counts | None:
    timeout = aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)
    try:
        async with session.get(f"{url}/metrics", timeout=timeout) as response:
            return read_counts((await response.read()).decode(errors="replace"))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
