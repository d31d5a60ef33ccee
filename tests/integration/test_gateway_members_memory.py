"""A gateway that saw thousands of workers come and go has the memory of one that saw the last four.

Its parts are those of a real gateway; workers are entries in its registry, which identify
themselves by calls, and their addresses refuse connections.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
from typing import TYPE_CHECKING, Self

import numpy as np

from baton.clock import MachineClock
from baton.gateway import process
from baton.gateway.members import membership
from baton.gateway.members.membership import Membership
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.ids import new_epoch
from baton.protocol.worker_http import Health, Role, WorkerLoad
from baton.router.handoff_costs import LinkCost, group_links
from baton.router.placement import Placement, PlacementRequest
from tests.integration.scripted_worker import KEY
from tests.unit.gateway.test_workers import info

if TYPE_CHECKING:
    import pytest

NUM_AT_ONCE = 4
NUM_BEFORE, NUM_ROUNDS = 250, 250
MAX_BYTES_OF_EACH = 64
"""Less than an entry of a dictionary, and the name that it holds."""


class Fleet:
    """Workers that come and go at one gateway, and what they leave in each of its parts."""

    def __init__(self, opened: Membership) -> None:
        self.membership, self.services = opened, opened._services
        self.number = 0

    def replace_all(self) -> None:
        """Other workers are listed: they come up, and serve."""
        services, workers = self.services, self.services.workers
        numbers = range(self.number, self.number + NUM_AT_ONCE)
        self.number += NUM_AT_ONCE
        addresses = frozenset(
            WorkerAddress(
                f"http://127.{1 + n // 62500}.{n // 250 % 250}.{1 + n % 250}:9", Role.BOTH
            )
            for n in numbers
        )
        self.membership.apply(self.membership.sources[0], addresses)
        assert len(workers.all) == NUM_AT_ONCE, "those before were idle"
        for number, worker in zip(numbers, workers.all, strict=True):
            described = info(
                worker=f"worker-{number}",
                epoch=new_epoch(),
                role="both",
                has_kv_journal=True,
                topology=f"z/r{number % 4}/h{number % 32}",
            )
            workers.register(worker, described)
            load = WorkerLoad(number % 7, 100, 50, 16, max_running=8)
            workers.note_report(worker, Health(load=load))
        views = workers.fleet.models["demo"].decodes
        for prompt in numbers:
            self.serve(prompt)
        handoffs, cost = services.load.costs("demo").handoffs, LinkCost(1e-3, 1e-9)
        places = handoffs.places
        links = [group_links(((one, other, cost) for other in views), places) for one in views]
        handoffs.note_links(links, None)
        for one, other in zip(views, (*views[1:], views[0]), strict=True):
            self.finish(Placement(one, other))

    def serve(self, first_token: int) -> None:
        """A prompt that no worker has is placed; then it is expected there."""
        services, now = self.services, self.services.clock.now()
        assert services.prefixes is not None
        prompt = np.arange(first_token, first_token + 64, dtype=np.int32)
        match = services.prefixes._of("demo").find(prompt, "", now)
        request = PlacementRequest("demo", num_prompt_tokens=64, at=now, cached=match.cached)
        placement = services.placement.place(services.workers.fleet, request, services.load)
        assert isinstance(placement, Placement)
        services.prefixes.expect("demo", match, placement)
        self.finish(placement)

    def finish(self, placement: Placement) -> None:
        services, now = self.services, self.services.clock.now()
        running = services.load.begin(placement, 64, now)
        running.prefilled(now + 0.01)
        running.first_token(now + 0.02)
        running.end(now + 0.1, 8)


def test_workers_that_came_and_went_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="baton")  # pytest keeps what is logged
    opened: list[Membership] = []

    class Opened(Membership):
        async def __aenter__(self) -> Self:
            opened.append(self)
            return await super().__aenter__()

    monkeypatch.setattr(process, "Membership", Opened)
    monkeypatch.setattr(membership, "LOOK_S", 0.05)
    options = GatewayOptions(
        addresses=(), credentials=KEY, tls="off", policy="prefix", members=("file:/nowhere/at/all",)
    )

    async def run(fleet: Fleet, num_rounds: int) -> int:
        """Bytes in use afterwards."""
        for number in range(num_rounds):
            fleet.replace_all()
            # Now and then they stay for long enough that their events are followed.
            await asyncio.sleep(0.15 if number % 100 == 50 else 0)
        await asyncio.sleep(0.3)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    async def main() -> int:
        async with asyncio.timeout(250), process.open_gateway(options, MachineClock()) as app:
            fleet = Fleet(*opened)
            before = await run(fleet, NUM_BEFORE)  # caches of bounded size are full then
            between = await run(fleet, NUM_ROUNDS)
            after = await run(fleet, NUM_ROUNDS)
            # What is left grows both times; what else differs by tens of kilobytes does not.
            grown = min(between - before, after - between)
            text = app.metrics.exposition().decode()
            assert text.count("baton_gateway_worker_up{") == NUM_AT_ONCE
            assert f'worker="worker-{fleet.number - 1}"' in text
            assert f'worker="worker-{fleet.number - NUM_AT_ONCE - 1}"' not in text
            return grown

    tracemalloc.start()
    try:
        grown_bytes = asyncio.run(main())
    finally:
        tracemalloc.stop()
    assert grown_bytes < MAX_BYTES_OF_EACH * NUM_AT_ONCE * NUM_ROUNDS
