"""The stream of snapshots: made once for all, not while nobody looks, never queued."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from baton.gateway.dashboard import stream as module
from baton.gateway.dashboard.stream import DashboardStream


class Number(msgspec.Struct):
    number: int


class Series:
    def __init__(self) -> None:
        self.points: list[int] = []

    def sample(self) -> None:
        self.points.append(len(self.points))


class Builder:
    def __init__(self) -> None:
        self.num_ticks = self.num_links = 0
        self.may_make = asyncio.Event()
        self.may_make.set()

    def history(self) -> Number:
        return Number(-1)

    def tick(self, point: int) -> Number:
        self.num_ticks += 1
        return Number(point)

    async def links(self) -> Number:
        self.num_links += 1
        number = self.num_links
        await self.may_make.wait()
        return Number(number)


class Viewer:
    """One client; `is_reading` False: it takes nothing."""

    def __init__(self, stream: DashboardStream) -> None:
        self.body = b""
        self.num_sent = 0
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.leaves = asyncio.Event()
        self.task = asyncio.create_task(stream.serve(self.receive, self.send))

    async def receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.may_read.wait()
        self.body += message.get("body", b"")
        self.num_sent += 1

    def ticks(self) -> list[int]:
        lines = self.body.decode().split("\n")
        at = [i for i, line in enumerate(lines) if line == "event: tick"]
        return [msgspec.json.decode(lines[i + 1].removeprefix("data: "))["number"] for i in at]


@pytest.fixture(autouse=True)
def fast(monkeypatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.005)


def run(scenario) -> None:
    async def main() -> None:
        series, builder = Series(), Builder()
        async with DashboardStream(series, builder) as stream:  # type: ignore[arg-type]
            await scenario(stream, series, builder)

    asyncio.run(asyncio.wait_for(main(), 20))


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_nothing_is_made_while_nobody_looks() -> None:
    async def scenario(stream: DashboardStream, series: Series, builder: Builder) -> None:
        await until(lambda: len(series.points) > 5)
        assert builder.num_ticks == builder.num_links == 0
        viewer = Viewer(stream)
        await until(lambda: len(viewer.ticks()) > 3)
        viewer.leaves.set()
        await viewer.task
        assert stream.num_viewers == 0
        num_made = builder.num_ticks
        num_points = len(series.points)
        await until(lambda: len(series.points) > num_points + 5)
        assert builder.num_ticks == num_made

    run(scenario)


def test_one_snapshot_serves_all_viewers() -> None:
    async def scenario(stream: DashboardStream, series: Series, builder: Builder) -> None:
        viewers = [Viewer(stream) for _ in range(10)]
        await until(lambda: all(len(each.ticks()) >= 12 for each in viewers))
        num_seconds = len(series.points)
        assert builder.num_ticks <= num_seconds + 1
        assert builder.num_links <= num_seconds / module.LINKS_EVERY + 2
        assert all(each.body.count(b"event: links") >= 2 for each in viewers)
        assert all(each.body.count(b"event: history") == 1 for each in viewers)

    run(scenario)


def test_a_slow_viewer_gets_the_latest_and_no_backlog() -> None:
    async def scenario(stream: DashboardStream, series: Series, builder: Builder) -> None:
        viewer = Viewer(stream)
        await until(viewer.ticks)
        viewer.may_read.clear()
        num_before = len(series.points)
        await until(lambda: len(series.points) >= num_before + 20)
        num_shown = len(viewer.ticks())
        viewer.may_read.set()
        await until(lambda: len(viewer.ticks()) >= num_shown + 3)
        missed, after = viewer.ticks()[num_shown], viewer.ticks()[num_shown + 1]
        assert after - missed >= 15, "what came between was dropped"

    run(scenario)


def test_a_viewer_that_takes_nothing_is_let_go(monkeypatch) -> None:
    monkeypatch.setattr(module, "SEND_TIMEOUT_S", 0.05)

    async def scenario(stream: DashboardStream, series: Series, builder: Builder) -> None:
        viewer = Viewer(stream)
        viewer.may_read.clear()
        await viewer.task
        assert stream.num_viewers == 0

    run(scenario)


def test_streams_end_with_the_process() -> None:
    async def scenario(stream: DashboardStream, series: Series, builder: Builder) -> None:
        viewers = [Viewer(stream) for _ in range(3)]
        await until(lambda: all(each.ticks() for each in viewers))
        stream.end()
        await asyncio.gather(*(each.task for each in viewers))

    run(scenario)


def test_a_snapshot_that_fails_is_tried_again(caplog) -> None:
    async def scenario(stream: DashboardStream, series: Series, builder: Builder) -> None:
        viewer = Viewer(stream)
        await until(viewer.ticks)
        make, builder.tick = builder.tick, lambda _: 1 / 0  # type: ignore[assignment,method-assign]
        await until(lambda: "snapshot failed" in caplog.text)
        builder.tick = make  # type: ignore[method-assign]
        num = len(viewer.ticks())
        await until(lambda: len(viewer.ticks()) > num)

    run(scenario)


def test_a_snapshot_that_takes_long_holds_up_no_other_task_and_is_never_an_old_one() -> None:
    async def scenario(stream: DashboardStream, series: Series, builder: Builder) -> None:
        builder.may_make.clear()
        first, second = Viewer(stream), Viewer(stream)
        await until(lambda: second.num_sent == 2)
        await until(lambda: builder.num_links == 2)
        for viewer in (first, second):
            viewer.leaves.set()
        assert first.num_sent == 0
        assert second.num_sent == 2, "nothing is sent before there is something"
        builder.may_make.set()
        await first.task
        await second.task
        third = Viewer(stream)
        await until(third.ticks)
        assert b'"number":3' in third.body.partition(b"event: links")[2]

    run(scenario)
