"""vLLM's metrics before and after a load → proof that KV moved."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from baton.bench.architectures.results import NO_STAGES, Proof
from baton.bench.architectures.transfer_check import RECOMPUTED_TOKENS, TransferEvidence

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT_S: Final = 10.0
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
        return _unknown(num_answered)
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


def _unknown(num_answered: int) -> Proof:
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
        found = await asyncio.gather(*(_fetch(session, url) for url in self.urls))
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


async def _fetch(session: aiohttp.ClientSession, url: str) -> Counts | None:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with session.get(f"{url}/metrics", timeout=timeout) as response:
            return read_counts((await response.read()).decode(errors="replace"))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
