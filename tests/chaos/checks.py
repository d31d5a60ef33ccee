"""What holds after any fault: the right tokens or a clean error, nothing leaked, counters moved."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, assert_never

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.process_state import TIMEOUT_S, read_footprint, read_shm_files, until, until_idle

if TYPE_CHECKING:
    from baton.testing.fleet import FleetProcess
    from tests.chaos.injections import Case, Victim

Counters: TypeAlias = Counter[tuple[str, frozenset[tuple[str, str]]]]

SETTLE_S = TIMEOUT_S
"""Until nothing of a fault is left. test_client_disconnects.py measures how quick that is."""


class Outcome(StrEnum):
    """What the client may see."""

    CORRECT = "right"
    CORRECT_OR_ERROR = "right, or a clean error"
    ERROR = "a clean error"
    BROKEN = "a broken connection"  # to a gateway that died: nobody is left to say anything
    NO_CLIENT = "nobody waits"


@dataclass(frozen=True)
class Moved:
    """A counter that must have grown: on whom, its name, and labels that it has among others.

    `without` are labels that it has not.
    """

    on: Victim
    name: str
    labels: tuple[tuple[str, str], ...] = ()
    without: tuple[tuple[str, str], ...] = ()

    def total(self, counters: Counters) -> float:
        wanted, unwanted = set(self.labels), set(self.without)
        return sum(
            value for (name, labels), value in counters.items()
            if name == self.name and wanted <= labels and not unwanted & labels
        )  # fmt: skip


@dataclass(frozen=True)
class ProcessResources:
    """What a worker holds: descriptors by kind, mapped memories, threads, files in `/dev/shm`."""

    descriptors: tuple[tuple[str, int], ...]
    num_memories: int
    num_threads: int
    shm_files: frozenset[str]

    @classmethod
    def of(cls, process: FleetProcess) -> ProcessResources:
        footprint = read_footprint(process)
        num_threads = len(list(Path(f"/proc/{process.pid}/task").iterdir()))
        shm_files = frozenset(read_shm_files(process.pid))
        return cls(footprint.descriptors, len(footprint.memories), num_threads, shm_files)

    def exceeds(self, before: ProcessResources) -> bool:
        """Whether there is more of anything. Less is no leak: with a peer's new life some of what
        is opened in idle moments may not be there yet.
        """
        more_open = Counter(dict(self.descriptors)) - Counter(dict(before.descriptors))
        more_files = self.shm_files - before.shm_files
        has_more_mapped = self.num_memories > before.num_memories
        has_more_threads = self.num_threads > before.num_threads
        return bool(more_open or more_files) or has_more_mapped or has_more_threads


async def read_counters(session: aiohttp.ClientSession, process: FleetProcess) -> Counters:
    """Every counter of a process, by name and labels; nothing if it does not answer."""
    try:
        async with session.get(f"{process.url}/metrics") as response:
            text = await response.text()
    except aiohttp.ClientError:
        return Counter()
    return Counter({
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith("_total")
    })


async def check_outcome(case: Case, outcome: Outcome) -> None:
    """What the client was told is what it may be told."""
    match outcome:
        case Outcome.NO_CLIENT:
            assert case.asking.cancelled()
        case Outcome.BROKEN:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                reply = await case.asking
                raise AssertionError(f"an answer from the dead: {reply}")
        case Outcome.CORRECT | Outcome.ERROR | Outcome.CORRECT_OR_ERROR:
            await _check_reply(case, outcome)
        case _:
            assert_never(outcome)


async def _check_reply(case: Case, outcome: Outcome) -> None:
    reply = await case.asking
    if reply.error is None:
        assert outcome is not Outcome.ERROR, "nobody could have answered"
        num_tokens = case.request.num_tokens
    else:
        assert outcome is not Outcome.CORRECT, reply
        assert reply.is_clean_error, reply
        num_tokens = len(reply.tokens)
    if num_tokens:
        expected = await case.cluster.expect(case.session, case.request.prompt, num_tokens)
        assert reply.tokens == expected.tokens, "a wrong token"


class Inventory:
    """What everybody holds and has counted before a fault; checked after it."""

    def __init__(self, case_session: aiohttp.ClientSession) -> None:
        self._session = case_session
        self._resources: dict[int, tuple[FleetProcess, ProcessResources]] = {}
        self._counters: dict[int, Counters] = {}

    async def take(self, workers: tuple[FleetProcess, ...], gateway: FleetProcess) -> None:
        for worker in workers:
            self._resources[worker.pid] = worker, ProcessResources.of(worker)
        for process in (*workers, gateway):
            self._counters[process.pid] = await read_counters(self._session, process)

    async def check_moved(self, case: Case, moved: tuple[Moved, ...]) -> None:
        """Each of these counters has grown (a new life's began at 0)."""
        for counter in moved:
            process = case.process(counter.on)
            before = self._counters.get(process.pid, Counter())

            async def grew(counter=counter, process=process, before=before) -> bool:
                after = await read_counters(self._session, process)
                return counter.total(after) > counter.total(before)

            await until(f"{counter} moved", grew, SETTLE_S)

    async def check_nothing_leaked(self, case: Case) -> float:
        """Every page is back, and those who lived through it hold what they held before."""
        pair = case.pair
        elapsed_s = await until_idle(self._session, pair.prefill, pair.decode, within_s=SETTLE_S)
        await until_gateway_idle(self._session, pair.gateway.url)
        await case.cluster.check_handoff(self._session, pair)
        for worker, before in self._resources.values():
            if worker.is_alive:
                await until_resources(worker, before)
        return elapsed_s


async def until_gateway_idle(session: aiohttp.ClientSession, url: str) -> None:
    """Until a gateway has no request under way."""

    async def idle() -> bool:
        async with session.get(f"{url}/metrics") as response:
            return "baton_gateway_inflight_requests 0.0" in await response.text()

    await until("the gateway serves nothing", idle, SETTLE_S)


async def until_resources(worker: FleetProcess, before: ProcessResources) -> None:
    """Until a worker holds no more of anything than it did."""

    async def no_more() -> bool:
        return not ProcessResources.of(worker).exceeds(before)

    try:
        await until("belongings", no_more, SETTLE_S)
    except AssertionError as exc:
        now = ProcessResources.of(worker)
        raise AssertionError(f"{worker.name} holds {now}, and held {before}") from exc
    await asyncio.sleep(0)
