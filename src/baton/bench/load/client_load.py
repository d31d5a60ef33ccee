"""The client's own load: was it the bottleneck?"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.bench.load.record import Record
    from baton.clock import Clock

TICK_S: Final = 0.02
SCHEDSTAT: Final = Path("/proc/self/schedstat")
MOST_CPU_SHARE: Final = 0.8
MOST_WAIT_SHARE: Final = 0.2
MOST_LAG_S: Final = 0.02
MOST_LATE_S: Final = 0.05


class ClientLoad(msgspec.Struct, frozen=True):
    """The client's own load during a run.

    `cpu_share`: of one core, which is its maximum. `waited_for_cpu_share`: of the time it was ready
    to run and another process ran (None: unknown). `lag_*`: how late the event loop woke, hence how
    late an arrival may have been observed. `late_p99_s`: sent after the scheduled time.
    `problems`: none means that the figures are the server's.
    """

    cpu_share: float
    waited_for_cpu_share: float | None
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    late_p99_s: float | None
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Usage:
    at: float
    cpu_s: float
    waited_s: float | None


class ClientMonitor:
    """Measures its own process from `start` to `stop`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lags: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._before = _Usage(0.0, 0.0, None)

    def start(self) -> None:
        """Start, on the event loop that is measured."""
        self._before = self._read()
        self._task = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        """Stop; may be called again, or without a start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def judge(self, records: Sequence[Record]) -> ClientLoad:
        """The load until now."""
        after = self._read()
        wall_s = max(after.at - self._before.at, 1e-9)
        waited = None
        if after.waited_s is not None and self._before.waited_s is not None:
            waited = (after.waited_s - self._before.waited_s) / wall_s
        lags = np.array(self._lags or [0.0])
        late = [record.late_s for record in records if record.late_s is not None]
        p50, p99 = np.percentile(lags, (50, 99))
        return judge_client(
            ClientLoad(
                (after.cpu_s - self._before.cpu_s) / wall_s,
                waited,
                float(p50),
                float(p99),
                float(lags.max()),
                float(np.percentile(late, 99)) if late else None,
                (),
            )
        )

    async def _tick(self) -> None:
        while True:
            wanted = self._clock.now() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lags.append(max(0.0, self._clock.now() - wanted))

    def _read(self) -> _Usage:
        times = os.times()
        return _Usage(self._clock.now(), times.user + times.system, _read_waited_s())


def judge_client(seen: ClientLoad) -> ClientLoad:
    """The same, with its problems. Pure."""
    problems = []
    if seen.cpu_share > MOST_CPU_SHARE:
        problems.append(
            f"the client used {seen.cpu_share:.0%} of the one core that it can use: it is the "
            "bottleneck; run several clients, or load less"
        )
    if seen.waited_for_cpu_share is not None and seen.waited_for_cpu_share > MOST_WAIT_SHARE:
        problems.append(
            f"the client waited for a core for {seen.waited_for_cpu_share:.0%} of the time: give "
            "it one of its own (taskset), or run it on another machine"
        )
    if seen.lag_p99_s > MOST_LAG_S:
        problems.append(
            f"the client's event loop was {seen.lag_p99_s * 1e3:.0f} ms late (p99): TTFT and ITL "
            "are too large by up to that"
        )
    if seen.late_p99_s is not None and seen.late_p99_s > MOST_LATE_S:
        problems.append(
            f"requests were sent {seen.late_p99_s * 1e3:.0f} ms after the schedule (p99): the rate "
            "that was asked for was not offered"
        )
    return msgspec.structs.replace(seen, problems=tuple(problems))


def _read_waited_s() -> float | None:
    """Time that the main thread, which is the event loop's, spent on a run queue."""
    try:
        return int(SCHEDSTAT.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
