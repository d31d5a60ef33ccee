"""What workers have measured of their links: only what is new is looked into."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from baton.gateway import link_feed
from baton.gateway.link_feed import LinkFeed
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.options import WorkerAddress
from baton.gateway.workers import Worker, Workers
from baton.protocol.worker_http import MeasuredLink, MeasuredLinks, Role
from baton.router.load import FleetLoad
from baton.router.topology import Distance
from baton.testing.clocks import ManualClock
from tests.unit.gateway.test_workers import info

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

    from baton.ids import WorkerId

NUM = 3


class Fleet:
    """Workers `w0` to `w2` on a host each; what they have measured goes to `feed`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        addresses = [WorkerAddress(f"http://127.0.0.1:{n}", Role.DECODE) for n in range(1, NUM + 1)]
        self.workers, self.load = Workers(addresses, GatewayMetrics()), FleetLoad()
        for number, worker in enumerate(self.workers.all):
            self.place(worker, number, f"z/r/h{number}")
        self.feed = LinkFeed(self.workers, None, self.load, ManualClock())  # type: ignore[arg-type]
        self.looked_into: list[str] = []
        find_pairs = link_feed._find_pairs

        def note(view: object, *args: object) -> object:
            self.looked_into.append(view.id)  # type: ignore[attr-defined]
            return find_pairs(view, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(link_feed, "_find_pairs", note)

    def place(self, worker: Worker, number: int, topology: str) -> None:
        self.workers.register(worker, info(worker=f"w{number}", topology=topology))

    def report(self, number: int, peers: Iterable[int], byte_s: float) -> None:
        links = tuple(MeasuredLink(f"w{n}", "push", "tcp", 1e-3, byte_s, 1, 1) for n in peers)
        self.feed.reports[self.workers.all[number]] = MeasuredLinks(links)

    def note(self) -> list[str]:
        """Whose reports were looked into."""
        self.looked_into.clear()
        asyncio.run(self.feed.note_reports())
        return list(self.looked_into)

    @property
    def known(self) -> dict[tuple[WorkerId, WorkerId], float]:
        links = self.load.costs("demo").handoffs.links
        return {pair: link.byte_s for pair, link in links.items()}


def test_a_new_report_is_looked_into_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch)
    fleet.report(0, (1, 2), 1e-9)
    fleet.report(1, (0, 2), 2e-9)
    assert fleet.note() == ["w0", "w1"]
    fleet.report(1, (2,), 3e-9)
    assert fleet.note() == ["w1"]
    assert fleet.known == {("w0", "w1"): 1e-9, ("w0", "w2"): 1e-9, ("w1", "w2"): 3e-9}
    assert fleet.load.costs("demo").handoffs.measured_rate(Distance.SAME_RACK) == 1 / 1e-9
    del fleet.feed.reports[fleet.workers.all[0]]
    assert fleet.note() == []
    assert fleet.known == {("w1", "w2"): 3e-9}


def test_once_a_worker_has_moved_all_are_looked_into_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(monkeypatch)
    fleet.report(0, (1, 2), 1e-9)
    fleet.report(1, (0, 2), 2e-9)
    fleet.note()
    fleet.place(fleet.workers.all[2], 2, "z/other/h2")
    assert fleet.note() == ["w0", "w1"]
    handoffs = fleet.load.costs("demo").handoffs
    assert handoffs.measured_rate(Distance.SAME_ZONE) == 1 / 1.5e-9
    assert handoffs.measured_rate(Distance.SAME_RACK) == 1 / 1.5e-9
