"""Many requests, clients that leave at random, a worker that is killed: twice, without growth.

By `make chaos`, more often.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from tests.chaos.clients import ClientRequest, Prompts, Reply, ask
from tests.chaos.conftest import LONG, SEED, ChaosCluster, Pair, run
from tests.chaos.process_state import (
    find_trace,
    read_rss_bytes,
    until_footprint,
    until_idle,
    until_mid_handoff,
)

if TYPE_CHECKING:
    import aiohttp
    import pytest

    from baton.testing.fleet import FleetProcess

NUM_ROUNDS, NUM_ROUNDS_OF_ALL_CHAOS = 2, 4
NUM_REQUESTS = 20
LONGEST = 600
SPREAD_S = 2.5
LEAVING = 0.4
MAX_TIMEOUT_S = 0.4
MAX_GROWTH_BYTES = 24 << 20
"""Of a process' own memory from the end of the first round to that of the last one."""


class Storm:
    """One round. `rng` decides who asks what, where and when, and who leaves."""

    def __init__(self, cluster: ChaosCluster, session: aiohttp.ClientSession, seed: int) -> None:
        self._cluster, self._session = cluster, session
        self._rng = random.Random(seed)
        self._prompts = Prompts(seed)
        self.num_left = self.num_correct = self.num_errors = 0

    async def run(self, victim: Pair) -> None:
        """Ask, leave, kill the victim's prefill worker once, and check whatever is answered."""
        async with asyncio.TaskGroup() as group:
            for prompt in self._prompts.make_mixed(NUM_REQUESTS - 1, longest=LONGEST):
                group.create_task(self._run_client(prompt))
            group.create_task(self._kill(victim))

    async def _run_client(self, prompt: list[int]) -> None:
        rng, pair = self._rng, self._rng.choice(self._cluster.pairs)
        request = ClientRequest(prompt, num_tokens=rng.randint(1, 20), stream=rng.random() < 0.5)
        patience_s = rng.uniform(0.005, MAX_TIMEOUT_S) if rng.random() < LEAVING else None
        await asyncio.sleep(rng.uniform(0, SPREAD_S))
        try:
            async with asyncio.timeout(patience_s):
                reply = await ask(self._session, pair.gateway.url, request)
        except TimeoutError:
            if patience_s is None:
                raise
            self.num_left += 1
            return
        await self._check(request, reply)

    async def _check(self, request: ClientRequest, reply: Reply) -> None:
        if reply.error is not None:
            assert reply.is_clean_error, reply
            self.num_errors += 1
            return
        self.num_correct += 1
        expected = await self._cluster.expect(self._session, request.prompt, request.num_tokens)
        assert reply == expected

    async def _kill(self, victim: Pair) -> None:
        await asyncio.sleep(SPREAD_S / 4)
        request = ClientRequest(self._prompts.make(LONG))
        answering = asyncio.create_task(ask(self._session, victim.gateway.url, request))
        await until_mid_handoff(self._session, victim.prefill, victim.decode, request.id)
        victim.prefill.kill()
        assert not answering.done()
        await self._check(request, await answering)
        trace = await find_trace(self._session, victim.decode, request.id)
        assert trace is not None
        assert trace.fallbacks, "the kill was too late to matter"


def test_storm(cluster: ChaosCluster, pytestconfig: pytest.Config) -> None:
    num_rounds = NUM_ROUNDS_OF_ALL_CHAOS if pytestconfig.getoption("--all-chaos") else NUM_ROUNDS
    survivors = [process for pair in cluster.pairs for process in (pair.decode, pair.gateway)]

    async def calm(session: aiohttp.ClientSession) -> None:
        workers = [worker for pair in cluster.pairs for worker in (pair.prefill, pair.decode)]
        await until_idle(session, *workers, within_s=20.0)
        for pair in cluster.pairs:
            await cluster.check_handoff(session, pair)
        await until_idle(session, *workers, within_s=20.0)

    async def scenario(session: aiohttp.ClientSession) -> None:
        rss: list[dict[FleetProcess, int]] = []
        restarts: dict[str, asyncio.Task[None]] = {}
        await calm(session)
        for number in range(num_rounds):
            victim = cluster.pairs[number % 2]
            if victim.transport in restarts:
                await restarts.pop(victim.transport)
            seed = SEED + number
            storm = Storm(cluster, session, seed)
            try:
                await storm.run(victim)
            except BaseException as exc:
                exc.add_note(f"seed of the storm: {seed}")
                raise
            print(
                f"storm {seed}: {storm.num_correct} right, {storm.num_errors} clean errors, "
                f"{storm.num_left} left"
            )
            assert storm.num_left > 0
            assert storm.num_correct > NUM_REQUESTS / 3
            await until_idle(session, *(pair.decode for pair in cluster.pairs), within_s=20.0)
            # While its peer is dead: what links hold depends on which modes busy workers chose.
            unlinked = victim.unlinked[victim.decode.pid]
            await until_footprint(victim.decode, unlinked, within_s=20.0)
            rss.append({process: read_rss_bytes(process) for process in survivors})
            restarts[victim.transport] = asyncio.create_task(
                asyncio.to_thread(victim.restart, "prefill")
            )
        for restart in restarts.values():
            await restart
        await calm(session)
        for process in survivors:
            sizes = [measured[process] >> 10 for measured in rss]
            print(f"{process.name}: {sizes} KiB")
            assert rss[-1][process] - rss[0][process] < MAX_GROWTH_BYTES, sizes

    run(scenario)
