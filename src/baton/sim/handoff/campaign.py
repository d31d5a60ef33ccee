"""Many seeds, one after the other, in as many processes as are wanted."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import signal
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.sim.handoff.generating import generate_schedule
from baton.sim.handoff.running import run_schedule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    from baton.sim.handoff.running import Violation

CHUNK: Final = 100
MAX_FOUND: Final = 20
"""So many failing seeds are enough to stop at."""


@dataclass(slots=True)
class Tally:
    """What runs came to. `found` has the seeds that broke an invariant."""

    num_schedules: int = 0
    num_steps: int = 0
    virtual_s: float = 0.0
    injected: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    found: dict[int, Violation] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Count another's runs too."""
        self.num_schedules += other.num_schedules
        self.num_steps += other.num_steps
        self.virtual_s += other.virtual_s
        self.injected += other.injected
        self.ends += other.ends
        self.seen += other.seen
        self.found |= other.found


def run_seeds(seeds: Iterable[int]) -> Tally:
    """Run the schedule of each seed."""
    tally = Tally()
    for seed in seeds:
        outcome = run_schedule(generate_schedule(seed))
        tally.num_schedules += 1
        tally.num_steps += outcome.num_steps
        tally.virtual_s += outcome.virtual_s
        tally.injected += outcome.injected
        tally.ends += outcome.ends
        tally.seen += outcome.seen
        if outcome.violation is not None:
            tally.found[seed] = outcome.violation
    return tally


def run_campaign(first: int, num_schedules: int, num_jobs: int) -> Iterator[Tally]:
    """Run seeds `[first, first + num_schedules)`; the tally so far, chunk by chunk.

    Ends early after `MAX_FOUND` failing seeds. With one job everything runs in this process.
    """
    stop = first + num_schedules
    chunks = iter(range(at, min(at + CHUNK, stop)) for at in range(first, stop, CHUNK))
    total = Tally()
    for tally in map(run_seeds, chunks) if num_jobs == 1 else _run_apart(chunks, num_jobs):
        total.add(tally)
        yield total
        if len(total.found) >= MAX_FOUND:
            return


def be_quiet() -> None:
    """What production code logs under thousands of faults is of no interest; nor is garbage."""
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _start_job() -> None:
    be_quiet()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the first process' business


def _run_apart(chunks: Iterator[range], num_jobs: int) -> Iterator[Tally]:
    """Two chunks for each process are under way, no more: so an interruption ends soon."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(num_jobs, context, initializer=_start_job) as pool:
        running: set[Future[Tally]] = set()
        try:
            for chunk in chunks:
                running.add(pool.submit(run_seeds, chunk))
                if len(running) >= 2 * num_jobs:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            yield from (future.result() for future in running)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
