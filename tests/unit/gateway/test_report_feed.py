"""How often workers are asked for a page."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from baton.gateway.metrics import GatewayMetrics
from baton.gateway.options import WorkerAddress
from baton.gateway.report_feed import (
    MAX_DECODE_SHARE,
    MAX_INTERVAL_S,
    ReportFeed,
    ReportPage,
)
from baton.gateway.workers import Workers
from baton.ids import WorkerId
from baton.protocol.worker_http import Role
from baton.testing.clocks import ManualClock
from tests.unit.gateway.test_workers import info

if TYPE_CHECKING:
    from collections.abc import Mapping

NUM_WORKERS = 10
INTERVAL_S = 5.0


class Feed(ReportFeed[int]):
    """Each of its reports takes so long to decode."""

    def __init__(self, decode_s: float) -> None:
        self.clock, self.decode_s, self.num_decoded = ManualClock(), decode_s, 0
        addresses = tuple(
            WorkerAddress(f"http://10.0.0.5:{n}", Role.DECODE) for n in range(1, NUM_WORKERS + 1)
        )
        workers = Workers(addresses, GatewayMetrics())
        for number, worker in enumerate(workers.all):
            workers.register(worker, info(worker=WorkerId(f"d{number}")))

        async def get(*_: object) -> tuple[int, bytes]:
            return 200, b""

        page = ReportPage("/page", INTERVAL_S, 100, self._take, _first)
        super().__init__(workers, SimpleNamespace(get=get), self.clock, page)  # type: ignore[arg-type]

    async def note_reports(self) -> None:
        pass

    def _take(self, _: bytes) -> int:
        self.clock.advance(self.decode_s)
        self.num_decoded += 1
        return self.num_decoded


def _first(reports: Mapping[int, int], _: object) -> int:
    return reports[0]


@pytest.mark.parametrize(
    ("decode_s", "interval_s"),
    [(0.001, INTERVAL_S), (0.06, NUM_WORKERS * 0.06 / MAX_DECODE_SHARE), (0.2, MAX_INTERVAL_S)],
)
def test_workers_are_asked_less_often_where_decoding_takes_long(decode_s, interval_s):
    feed = Feed(decode_s)

    async def scenario() -> None:
        for _ in range(10):
            feed.clock.advance(MAX_INTERVAL_S)
            await feed.read_due()
        began_at, feed.num_decoded = feed.clock.now(), 0
        while feed.clock.now() - began_at < 300.0:
            feed.clock.advance(0.1)
            await feed.read_due()

    asyncio.run(scenario())
    assert feed.num_decoded / NUM_WORKERS == pytest.approx(300 / interval_s, rel=0.1)
