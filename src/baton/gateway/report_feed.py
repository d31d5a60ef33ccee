"""Reads one page of every worker, now and then: links, transfers.

Each worker is asked every `interval_s`, and less often where decoding would take too much of the
event loop's time; one that does not answer keeps what it reported before until it is down. Of a
vLLM server each rank is asked, and their reports become one.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

from baton.errors import UNDECODABLE, BatonError
from baton.gateway.workers import Up, Worker, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from yarl import URL

    from baton.clock import Clock
    from baton.gateway.upstream import Upstream

LOOK_S: Final = 1.0
ANSWER_TIMEOUT_S: Final = 2.0
MOST_AT_ONCE: Final = 8
MAX_DECODE_SHARE: Final = 0.03
"""Of the event loop's time, which requests need."""
MAX_AGE_S: Final = 30.0
"""Of the latest report of a worker that answers. Alerts look at as much (`alerts.rules.RECENT_S`):
they must see each report."""
MAX_INTERVAL_S: Final = MAX_AGE_S - LOOK_S - ANSWER_TIMEOUT_S
SMOOTHING: Final = 0.1
"""Of the mean time to decode a report: the weight of the latest one."""

log = logging.getLogger(__name__)
Report = TypeVar("Report")


@dataclass(frozen=True, slots=True)
class ReportPage(Generic[Report]):
    """What is read. `decode` gives None for a report that does not replace the one before.

    `merge` makes one report of those of a worker's ranks; it is also given the workers' names.
    """

    path: str
    interval_s: float
    max_bytes: int
    decode: Callable[[bytes], Report | None]
    merge: Callable[[Mapping[int, Report], Collection[str]], Report]


class ReportFeed(ABC, Generic[Report]):
    """An asynchronous context manager: it reads within. Owner: the event loop's thread.

    `reports` has the latest of each worker that is up.
    """

    def __init__(
        self, workers: Workers, upstream: Upstream, clock: Clock, page: ReportPage[Report]
    ) -> None:
        self._workers, self._upstream, self._clock = workers, upstream, clock
        self._page = page
        self.reports: dict[Worker, Report] = {}
        self._of_ranks: dict[Worker, dict[int, Report]] = {}
        self._asked_at: dict[Worker, float] = {}
        self._at_once = asyncio.Semaphore(MOST_AT_ONCE)
        self._decode_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to read."""
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Read no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @abstractmethod
    async def note_reports(self) -> None:
        """Called after a round in which a report was another than before, or a worker was lost."""

    async def read_due(self) -> None:
        """Ask every worker whose turn it is."""
        now = self._clock.now()
        lost = [each for each in self._asked_at if not isinstance(each.state, Up)]
        for worker in lost:
            del self._asked_at[worker]
            self.reports.pop(worker, None)
            self._of_ranks.pop(worker, None)
        up = [worker for worker in self._workers.all if isinstance(worker.state, Up)]
        interval_s = self._compute_interval_s(sum(len(worker.control_urls) for worker in up))
        due = [
            worker for worker in up if now - self._asked_at.get(worker, float("-inf")) >= interval_s
        ]
        for worker in due:
            self._asked_at[worker] = now
        if any(await asyncio.gather(*map(self._ask, due))) or lost:
            await self.note_reports()

    def _compute_interval_s(self, num_reports: int) -> float:
        needed_s = num_reports * self._decode_s / MAX_DECODE_SHARE
        return max(self._page.interval_s, min(needed_s, MAX_INTERVAL_S))

    async def _run(self) -> None:
        while True:
            try:
                await self.read_due()
            except Exception:
                log.exception("reading %s of the workers failed; trying again", self._page.path)
            await asyncio.sleep(LOOK_S)

    async def _ask(self, worker: Worker) -> bool:
        """Whether it has reported something new."""
        # Whose addresses they are was checked before the worker came up.
        known = self._of_ranks.get(worker, {})
        answers = await asyncio.gather(*(self._read(worker, url) for url in worker.control_urls))
        found = {
            rank: known[rank] if answer is None else answer
            for rank, answer in enumerate(answers)
            if answer is not None or rank in known
        }
        if found == known:
            return False
        self._of_ranks[worker] = found
        names = {str(each.info.worker) for each in self._workers.all if each.info is not None}
        self.reports[worker] = self._page.merge(found, names)
        return True

    async def _read(self, worker: Worker, url: URL) -> Report | None:
        """What one rank reports; None if it does not answer, or has nothing to report."""
        try:
            async with self._at_once:
                status, body = await self._upstream.get(
                    url.with_path(self._page.path), ANSWER_TIMEOUT_S, self._page.max_bytes
                )
            return self._decode(body) if status == HTTPStatus.OK else None
        except (BatonError, *UNDECODABLE) as exc:
            log.debug("no %s from %s at %s: %s", self._page.path, worker, url, exc)
            return None

    def _decode(self, body: bytes) -> Report | None:
        began_at = self._clock.now()
        report = self._page.decode(body)
        self._decode_s += SMOOTHING * (self._clock.now() - began_at - self._decode_s)
        return report
