"""A run: warm-up, requests by a closed or open loop, drain; and the client's own load meanwhile.

Owned by one event loop. Every wait is bounded: by the request's timeout or the drain.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

import msgspec
import numpy as np

from baton.bench.load.plan import Closed, LoadPlan, Open, Replay, arrival_times
from baton.bench.load.sender import Due, Observer, Sender
from baton.bench.workloads.requests import Conversation, Request, Segment, Segments, Workload

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator, Sequence

    from baton.bench.load.client import BodyWriter, Client
    from baton.bench.load.records import Phase, Record
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


MOST_WARM_UP_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run's result. `window_s`: how long was measured, from the beginning on.

    `stopped`: why it ended early; `is_interrupted`: by a signal.
    """

    records: tuple[Record, ...]
    client: ClientLoad
    window_s: float
    stopped: str | None
    is_interrupted: bool

    @property
    def is_partial(self) -> bool:
        """Whether less was measured than requested."""
        return self.is_interrupted or self.stopped is not None


class LoadRunner:
    """Runs one load, once. `interrupt`, set by others, ends it at once."""

    def __init__(
        self,
        client: Client,
        writer: BodyWriter,
        plan: LoadPlan,
        *,
        clock: Clock,
        interrupt: asyncio.Event,
        observers: Iterable[Observer] = (),
    ) -> None:
        self._client, self._writer, self._plan = client, writer, plan
        self._clock, self._interrupt = clock, interrupt
        self._observers = tuple(observers)

    async def run(self, workload: Workload, seed: int = 0) -> Outcome:
        """Run the workload to its end; no request is in flight afterwards."""
        conversations = workload.generate()
        warm_up = await self._warm_up(workload)
        settling = await self._settle(warm_up, conversations)
        limited = limit_requests(conversations, self._plan.limits.num_requests)
        before = warm_up.records if settling is warm_up else [*warm_up.records, *settling.records]
        measured = self._open_sender("measured")
        watch = ClientMonitor(self._clock)
        watch.start()
        window_s = 0.0
        try:
            if not (settling.broken.is_set() or self._interrupt.is_set()):
                sending = self._start(measured, limited, seed)
                window_s = await self._go(measured, sending, self._plan.limits.duration_s)
        finally:
            await watch.stop()
        return Outcome(
            (*before, *measured.records),
            watch.judge(measured.records),
            window_s or max((record.ended_s for record in measured.records), default=0.0),
            settling.why or measured.why,
            self._interrupt.is_set(),
        )

    async def _warm_up(self, workload: Workload) -> Sender:
        sender = self._open_sender("warm-up")
        requests = warm_up_requests(workload, self._plan.num_warm_up)
        conversations = iter([Conversation((ask,)) for ask in requests])
        at_once = min(MOST_WARM_UP_AT_ONCE, max(1, len(requests)))
        await self._go(sender, closed_loop(sender, conversations, at_once), None)
        return sender

    async def _settle(self, warm_up: Sender, conversations: Iterator[Conversation]) -> Sender:
        """The load itself for a while: servers that adapt to it have done so afterwards."""
        load, settle_s = self._plan.load, self._plan.settle_s
        if not settle_s or not isinstance(load, Closed) or warm_up.broken.is_set():
            return warm_up
        sender = self._open_sender("warm-up")
        await self._go(sender, closed_loop(sender, conversations, load.concurrency), settle_s)
        return sender

    def _open_sender(self, phase: Phase) -> Sender:
        return Sender(
            self._client, self._writer, self._clock, phase=phase, observers=self._observers
        )

    def _start(
        self, sender: Sender, conversations: Iterator[Conversation], seed: int
    ) -> Coroutine[None, None, None]:
        match self._plan.load:
            case Closed(concurrency):
                return closed_loop(sender, conversations, concurrency)
            case Open() as load:
                timed = zip(arrival_times(load, seed), conversations, strict=False)
                return open_loop(sender, timed, load.max_in_flight)
            case Replay(max_in_flight):
                recorded = (
                    (conversation.arrival_s or 0.0, conversation) for conversation in conversations
                )
                return open_loop(sender, recorded, max_in_flight)
            case other:
                assert_never(other)

    async def _go(
        self, sender: Sender, sending: Coroutine[None, None, None], duration_s: float | None
    ) -> float:
        """Send until all is sent, the time is over, or it must stop; then drain.

        Returns:
            When sending was stopped, in seconds since the beginning; 0 where all was sent.
        """
        loop = asyncio.ensure_future(sending)
        stops: list[asyncio.Future[bool]] = [
            asyncio.ensure_future(each.wait()) for each in (self._interrupt, sender.broken)
        ]
        try:
            await _wait_for_first(loop, stops, duration_s)
            stopped_s = 0.0 if loop.done() else sender.now_s()
            sender.close()
            if not any(stop.done() for stop in stops):
                await _wait_for_first(loop, stops, self._plan.limits.drain_s)
        finally:
            sender.close()
            loop.cancel()
            for stop in stops:
                stop.cancel()
            await asyncio.gather(loop, *stops, return_exceptions=True)
        if not loop.cancelled():
            loop.result()  # raises what is a bug of this client
        return stopped_s


async def closed_loop(
    sender: Sender, conversations: Iterator[Conversation], concurrency: int
) -> None:
    """This many conversations at once, until there are no more, or the sender is closed."""
    numbered = enumerate(conversations)

    async def lane() -> None:
        for number, conversation in numbered:
            if not sender.is_open:
                return
            await sender.run_conversation(
                number, conversation, sender.prepare(conversation.turns[0]), Due()
            )

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(lane())


async def open_loop(
    sender: Sender, timed: Iterable[tuple[float, Conversation]], max_in_flight: int | None
) -> None:
    """Each conversation at its time, or when `max_in_flight` permits it."""
    room = None if max_in_flight is None else asyncio.Semaphore(max_in_flight)
    free_s = 0.0  # those before it were held back until then
    async with asyncio.TaskGroup() as group:
        for number, (due_s, conversation) in enumerate(timed):
            first = sender.prepare(conversation.turns[0])
            if not await sender.wait_until(due_s):
                return
            held_s = 0.0
            if room is not None:
                ready_s, is_full = sender.now_s(), room.locked()
                await room.acquire()
                now_s = sender.now_s()
                held_s = now_s - ready_s + max(0.0, free_s - due_s)
                free_s = now_s if is_full else free_s
            if not sender.is_open:
                return
            due = Due(round(due_s, 6), held_s)
            task = group.create_task(sender.run_conversation(number, conversation, first, due))
            if room is not None:
                task.add_done_callback(partial(_release, room))


def _release(room: asyncio.Semaphore, _: asyncio.Task[None]) -> None:
    room.release()


def limit_requests(
    conversations: Iterable[Conversation], num_requests: int | None
) -> Iterator[Conversation]:
    """Conversations of this many requests in total: the last one may be cut short."""
    if num_requests is None:
        yield from conversations
        return
    rest = num_requests
    for conversation in conversations:
        turns = conversation.turns[:rest]
        rest -= len(turns)
        yield replace(conversation, turns=turns)
        if rest <= 0:
            return


def warm_up_requests(workload: Workload, num_asks: int) -> list[Request]:
    """As large as the workload's first ones, with prompts that are not used again."""
    conversations = islice(workload.generate(), num_asks)
    return [
        _private(conversation.turns[0], f"warm-up/{i}")
        for i, conversation in enumerate(conversations)
    ]


def _private(ask: Request, key: str) -> Request:
    if not isinstance(ask.prompt, Segments):
        return ask
    return replace(ask, prompt=Segments((Segment(key, ask.prompt.num_tokens),)))


async def _wait_for_first(
    loop: asyncio.Future[None], stops: Iterable[asyncio.Future[bool]], timeout_s: float | None
) -> None:
    awaited: set[asyncio.Future[None] | asyncio.Future[bool]] = {loop, *stops}
    await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
