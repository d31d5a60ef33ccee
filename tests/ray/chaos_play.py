"""Plays one fault under load, and checks what holds after any fault, as on one machine.

Greedy tokens as of a colocated server, no failed or broken request, one owner of each name, and
nothing left: each block is back, and processes that lived through it hold what they held before.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import aiohttp

from baton.net.tls import ClusterTls
from tests.chaos.checks import (
    ProcessResources,
    read_counters,
    until_gateway_idle,
    until_resources,
)
from tests.chaos.process_state import TIMEOUT_S, until_idle
from tests.ray.chaos_fleet import NUM_CLIENTS, ChaosFleet, RayProcess, wait_until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tests.greedy_load import GreedyLoad
    from tests.ray.chaos_faults import Fault
    from tests.ray.chaos_injections import Injected

WHOLE_TIMEOUT_S = 90.0
GONE_TIMEOUT_S = 60.0
ANSWERS_TIMEOUT_S = 60.0
OWNERS_INTERVAL_S = 0.5
CLOSING_S = 0.1
"""After a session, until its TLS connections are closed, too."""
MAX_PROBLEMS = 8
MAX_LOOKS, SAME_S = 8, 3.0

Answer = TypeVar("Answer")
HandoffCounts: TypeAlias = defaultdict[int, Counter[str]]


@dataclass
class Result:
    """One fault. Seconds; None for what did not come about in time. Without `problems`: green.

    `whole_s`: from the fault, or from its end, until the gateway uses all workers again.
    `began_s`: until the process that was lost is started again. `old_gone_s`: from the end of a
    partition until the old life ended. `longest_gap_s`: of any client, between parts of an answer.
    `handoffs`: how many ended how.
    """

    fault: str
    without_head: bool
    proof: str = ""
    whole_s: float | None = None
    began_s: float | None = None
    old_gone_s: float | None = None
    longest_gap_s: float = 0.0
    num_answers: int = 0
    num_broken: int = 0
    handoffs: dict[str, int] = field(default_factory=dict)
    num_owner_samples: int = 0
    signs: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class OwnerWatch:
    """Looks twice a second whether the gateway uses two lives of one name."""

    def __init__(self, fleet: ChaosFleet) -> None:
        self._fleet = fleet
        self._names: dict[str, str] = {}
        self.num_samples = 0
        self.problems: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Until the block ends."""
        ending = threading.Event()
        watching = threading.Thread(target=self._run, args=(ending,))
        watching.start()
        try:
            yield
        finally:
            ending.set()
            watching.join()

    def _run(self, ending: threading.Event) -> None:
        while not ending.wait(OWNERS_INTERVAL_S):
            with suppress(OSError):  # what ends while it is looked at
                self._names |= {each.url: each.name for each in self._fleet.list_processes()}
            owners: defaultdict[str, set[str]] = defaultdict(set)
            for url in self._fleet.find_up():
                owners[self._names.get(url, url)].add(url)
            self.num_samples += bool(owners)
            self.problems += [
                f"{name} has two owners: {sorted(urls)}"
                for name, urls in owners.items()
                if len(urls) > 1
            ]


def play(fleet: ChaosFleet, fault: Fault) -> Result:
    """One fault, on a fleet that serves and goes on serving."""
    result = Result(fault.name, fleet.is_head_lost)
    load, watch = fleet.new_load(), OwnerWatch(fleet)
    try:
        warm_up = fleet.new_load()
        with warm_up.running():
            _wait_for_answers(warm_up, 2 * NUM_CLIENTS)
        before = asyncio.run(_asked(fleet, _take_inventory))
        with load.running(), watch.running():
            _wait_for_answers(load, 2 * NUM_CLIENTS)
            handoffs = asyncio.run(_asked(fleet, _count_handoffs))
            _strike(fleet, fault, result)
            _wait_for_answers(load, 2 * NUM_CLIENTS)
            after = _wait_for_handoff(fleet)
        result.handoffs = dict(sum((after[pid] - handoffs[pid] for pid in after), Counter()))
        asyncio.run(_asked(fleet, lambda *given: _check_nothing_left(*given, before)))
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is reported
        result.problems.append(f"{type(exc).__name__}: {exc}")
    result.problems += watch.problems[:MAX_PROBLEMS]
    result.num_owner_samples = watch.num_samples
    if watch.num_samples == 0:
        result.problems.append("it was never seen whom the gateway uses")
    result.num_answers, result.num_broken = load.num_answers, len(load.failures)
    result.longest_gap_s = load.longest_gap_s
    wrong = [each for each in load.failures if "other tokens" in each]
    if wrong or result.num_broken > fault.may_break:
        result.problems += sorted(set(wrong or load.failures))[:MAX_PROBLEMS]
    return result


def _strike(fleet: ChaosFleet, fault: Fault, result: Result) -> None:
    """From the fault until everything is whole again."""
    begun = time.monotonic()
    with fault.inject(fleet) as injected:
        struck_at = time.monotonic()
        begun = struck_at if fault.name != "upgrade" else begun
        result.proof = injected.proof
        if fault.whole == "meanwhile":
            _wait_until_whole(fleet, result, injected, begun)
        counts = asyncio.run(_asked(fleet, _count_requests, injected.old))
        time.sleep(max(0.0, struck_at + fault.lasts_s - time.monotonic()))
        if asyncio.run(_asked(fleet, _count_requests, injected.old)) != counts:
            result.problems.append("an old life was asked, though another one has its name")
    result.signs = injected.signs
    healed_at = time.monotonic()
    if injected.old:
        gone = lambda: not any(each.is_alive for each in injected.old)  # noqa: E731
        result.old_gone_s = wait_until(gone, GONE_TIMEOUT_S)
        if result.old_gone_s is None:
            result.problems.append("an old life goes on")
    if fault.whole == "after":
        _wait_until_whole(fleet, result, injected, healed_at)
    elif wait_until(lambda: fleet.is_whole(injected.lost), WHOLE_TIMEOUT_S) is None:
        result.problems.append("not all workers are used in the end")


def _wait_until_whole(fleet: ChaosFleet, result: Result, injected: Injected, since: float) -> None:
    if wait_until(lambda: fleet.is_whole(injected.lost), WHOLE_TIMEOUT_S) is None:
        result.problems.append(f"not all workers are used after {WHOLE_TIMEOUT_S:g} s")
        return
    result.whole_s = time.monotonic() - since
    begun = [each.begun_at for each in fleet.list_processes() if each.pid not in injected.lost]
    if injected.lost and max(begun) > since:
        result.began_s = max(begun) - since


def _wait_for_answers(load: GreedyLoad, num_answers: int) -> None:
    wanted = load.num_answers + num_answers
    if wait_until(lambda: load.num_answers >= wanted, ANSWERS_TIMEOUT_S) is None:
        raise AssertionError(f"{num_answers} answers take more than {ANSWERS_TIMEOUT_S:g} s")


def _wait_for_handoff(fleet: ChaosFleet) -> HandoffCounts:
    """Until one more is completed; the first ones may be declined.

    While the prefill worker was away decode workers computed prompts themselves, and have them.
    """
    before = asyncio.run(_asked(fleet, _count_handoffs))
    after = before

    def has_completed() -> bool:
        nonlocal after
        after = asyncio.run(_asked(fleet, _count_handoffs))
        return any(after[pid]["completed"] > before[pid]["completed"] for pid in after)

    if wait_until(has_completed, ANSWERS_TIMEOUT_S) is None:
        raise AssertionError(f"no request is handed over in {ANSWERS_TIMEOUT_S:g} s: {after}")
    return after


async def _asked(
    fleet: ChaosFleet,
    ask: Callable[..., Awaitable[Answer]],
    *arguments: object,
) -> Answer:
    """What is found with a session in which workers answer."""
    connector = aiohttp.TCPConnector(ssl=ClusterTls(fleet.credentials).dialing, force_close=True)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        answer = await ask(session, fleet, *arguments)
    await asyncio.sleep(CLOSING_S)
    return answer


async def _take_inventory(
    session: aiohttp.ClientSession, fleet: ChaosFleet
) -> dict[RayProcess, ProcessResources]:
    """Once it stays the same: after the fault before, links are opened anew in idle moments."""
    workers = _list_workers(fleet)
    inventory: dict[RayProcess, ProcessResources] = {}
    for _ in range(MAX_LOOKS):
        await until_idle(session, *workers, within_s=TIMEOUT_S)
        before, inventory = inventory, {each: ProcessResources.of(each) for each in workers}
        if inventory == before:
            break
        await asyncio.sleep(SAME_S)
    return inventory


async def _count_handoffs(session: aiohttp.ClientSession, fleet: ChaosFleet) -> HandoffCounts:
    """How many ended how, by the process that received them."""
    counts: HandoffCounts = defaultdict(Counter)
    for worker in _list_workers(fleet):
        counters = await read_counters(session, worker)
        for (name, labels), value in counters.items():
            if name == "baton_handoffs_total" and ("role", "decode") in labels:
                counts[worker.pid][dict(labels)["result"]] += int(value)
    return counts


async def _count_requests(
    session: aiohttp.ClientSession, fleet: ChaosFleet, workers: tuple[RayProcess, ...]
) -> float:
    """How many have ended at these, once nothing is under way there."""
    del fleet
    alive = [worker for worker in workers if worker.url and worker.is_alive]
    await until_idle(session, *alive, within_s=TIMEOUT_S)
    counters = [await read_counters(session, worker) for worker in alive]
    return sum(
        value
        for each in counters
        for (name, _), value in each.items()
        if name == "baton_worker_requests_total"
    )


async def _check_nothing_left(
    session: aiohttp.ClientSession,
    fleet: ChaosFleet,
    before: dict[RayProcess, ProcessResources],
) -> None:
    await until_gateway_idle(session, fleet.url)
    await until_idle(session, *_list_workers(fleet), within_s=TIMEOUT_S)
    for worker, resources in before.items():
        if worker.is_alive:
            await until_resources(worker, resources)


def _list_workers(fleet: ChaosFleet) -> list[RayProcess]:
    return [each for each in fleet.list_processes() if each.role != "gateway" and each.url]
