"""When a stream is moved again whose move failed; what is looked at to find those to move."""

from __future__ import annotations

from collections import Counter
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from baton.clock import Instant
from baton.gateway import stream_record
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.options import WorkerAddress
from baton.gateway.running_streams import RunningStream, RunningStreams
from baton.gateway.stream_moves import BALANCE_S, StreamMoves, compute_pause_s, find_end
from baton.gateway.stream_record import RecordBudget, StreamRecord
from baton.gateway.workers import Preemption, Up, Workers
from baton.protocol.worker_http import Role
from baton.router.cost import CostOptions, CostPolicy
from baton.router.load import FleetLoad
from baton.testing.clocks import ManualClock
from tests.unit.gateway.test_workers import info


@pytest.mark.parametrize(
    ("num_too_slow", "left_s", "pause_s"),
    [
        pytest.param(0, inf, 1.0, id="refused"),
        pytest.param(1, inf, 1.0, id="too slow"),
        pytest.param(3, inf, 4.0, id="too slow for the third time"),
        pytest.param(20, inf, 8.0, id="never much beside the time that it took"),
        pytest.param(20, 6.0, 3.0, id="in time for another one before the end"),
        pytest.param(20, -1.0, 1.0, id="not at once, whatever is left"),
    ],
)
def test_the_pause_after_a_failure(num_too_slow: int, left_s: float, pause_s: float) -> None:
    assert compute_pause_s(num_too_slow, left_s) == pause_s


def test_the_end_of_a_worker_is_that_of_its_machine() -> None:
    workers = Workers((WorkerAddress("http://127.0.0.1:1", Role.DECODE),), GatewayMetrics())
    (worker,) = workers.all
    workers.change(worker, Up(info()))
    assert find_end(worker) == inf
    workers.drain(worker)
    assert find_end(worker) == inf, "not known"
    workers.drain(worker, Preemption("maintenance", Instant(70.0)))
    assert find_end(worker) == 70.0


def make_event(choices: str, usage: str = "") -> bytes:
    return b'data: {"id":"x","choices":[%b]%b}\n\n' % (choices.encode(), usage.encode())


OPEN = make_event('{"index":0,"text":" a","logprobs":null,"finish_reason":null}')
QUOTING = make_event(r'{"index":0,"text":"\"finish_reason\":\"stop\"","finish_reason":null}')
STOP = make_event('{"index":0,"text":"","finish_reason":"stop"}')
NO_USAGE = make_event('{"index":0,"text":"","finish_reason":null}', ',"usage":null')
ALL_USAGE = make_event('{"index":0,"text":"","finish_reason":null}', ',"usage":{"n":1}')
USAGE = make_event("", ',"usage":{"n":1}')


@pytest.mark.parametrize(
    ("last", "is_finished"),
    [
        (OPEN, False),
        (QUOTING, False),
        (NO_USAGE, False),
        (ALL_USAGE, False),
        (OPEN.replace(b":", b": "), False),
        (STOP, True),
        (STOP.replace(b":", b": "), True),
        (USAGE, True),
        (OPEN + STOP, True),
        (STOP + b"data: [DONE]\n\n", True),
        (b"data: [DONE]\n\n", True),
        (b": a comment\n\n", False),
    ],
)
def test_an_answer_is_finished_by_its_reason_and_by_what_follows_it(
    last: bytes, is_finished: bool
) -> None:
    record = StreamRecord(RecordBudget(1 << 20), 1 << 20)
    record.begin(has_ids=False)
    record.take(last)
    assert record.is_finished == is_finished


class Look:
    """Two models on two workers each, with a stream, and how much is done to look at them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
        self.counts = Counter[str]()
        self.clock, self.streams, metrics = ManualClock(), RunningStreams(), GatewayMetrics()
        addresses = [WorkerAddress(f"http://127.0.0.1:{n}", Role.DECODE) for n in range(1, 5)]
        workers = Workers(addresses, metrics)
        for number, worker in enumerate(workers.all):
            workers.register(worker, info(worker=f"d{number}", served_model_name=f"m{number % 2}"))
        admission = SimpleNamespace(
            tpot_s=lambda _: limit_s, itl_s=lambda _: None, find_full=lambda _: frozenset()
        )
        services: Any = SimpleNamespace(
            clock=self.clock,
            options=SimpleNamespace(mode="auto", move_streams="auto"),
            streams=self.streams,
            workers=workers,
            placement=CostPolicy(CostOptions()),
            admission=admission,
            load=FleetLoad(),
        )
        self.moves, self.records = StreamMoves(services, None), list[StreamRecord]()  # type: ignore[arg-type]
        for model, served in workers.fleet.models.items():
            self.add(model, served.decodes[0])
        for owner, name in (
            (RunningStreams, "all"), (RunningStream, "load"), (stream_record, "_decode")
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, self.count(name, getattr(owner, name)))

    def add(self, model: str, decode: Any) -> None:
        record = StreamRecord(RecordBudget(1 << 20), 1 << 20)
        record.begin(has_ids=True)
        resumption: Any = SimpleNamespace(record=record, num_before=0, num_moves=0, moved_at=-inf)
        body: Any = SimpleNamespace(adapter="", fields={})
        context: Any = SimpleNamespace(model=model)
        stream = RunningStream(context, body, resumption, decode, 9, None, lambda _: b"")
        self.streams._streams[stream] = None
        self.records.append(record)

    def count(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return function(*args, **kwargs)

        return counted

    def look(self) -> Counter[str]:
        """Half a second later, in which each stream got a token."""
        for record in self.records:
            record.take(b":17\n" + OPEN)
        self.clock.advance(BALANCE_S)
        self.counts.clear()
        self.moves._look()
        return Counter(self.counts)


def test_where_no_worker_is_slow_each_stream_is_hardly_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = Look(monkeypatch, limit_s=BALANCE_S)
    for _ in range(3):
        assert at.look() == {"all": 1}


def test_where_a_worker_is_slow_its_streams_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Look(monkeypatch, limit_s=0.9 * BALANCE_S)
    assert at.look() == {"all": 1}, "the first look measures nothing"
    assert at.look() == {"all": 1, "load": 2}
