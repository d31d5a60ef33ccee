"""SIGSTOP of a worker that announces itself: its gateway knows within three seconds, not sooner."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from typing import TYPE_CHECKING

from baton.testing.fleet import Fleet
from tests.chaos.clients import ClientRequest, Prompts, Streaming, ask
from tests.chaos.conftest import ENGINE, GATEWAY, KEY, freeze, run
from tests.chaos.process_state import until
from tests.free_ports import find_free_port
from tests.preloaded import start_preloaded

if TYPE_CHECKING:
    from pathlib import Path

    import aiohttp

    from baton.testing.fleet import FleetProcess

STALL_S = 2.0
KNOWN_WITHIN_S = 3.0
LATE_S = 5.0
"""What this machine may add, which runs other tests."""
NUM_TOKENS = 160


async def read_sum(
    session: aiohttp.ClientSession, gateway: FleetProcess, name: str, label: str = ""
) -> float:
    """The sum of a metric's series whose labels have this text in them."""
    async with session.get(f"{gateway.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    series = (line.rpartition(" ") for line in lines if re.match(rf"{name}[{{ ]", line))
    return sum(float(value) for labels, _, value in series if label in labels)


def test_a_stalled_worker_is_suspected_and_a_silent_one_is_given_up(tmp_path: Path) -> None:
    port = find_free_port()
    settings = ENGINE | {"worker.announce_to": [f"https://127.0.0.1:{port}"]}
    with Fleet(tmp_path, dict(os.environ, BATON_CLUSTER_KEY=KEY), start=start_preloaded) as fleet:
        workers = [fleet.start_worker(f"w{i}", "both", settings) for i in range(2)]
        announced = {"gateway.announce_port": port, "gateway.members": ["announced"]}
        gateway = fleet.start_gateway([], [], settings=GATEWAY | announced)
        for worker in workers:
            worker.wait_ready()

        async def scenario(session: aiohttp.ClientSession) -> None:
            async def both_up() -> bool:
                return await read_sum(session, gateway, "baton_gateway_worker_up") == 2

            async def both_beat() -> bool:
                """Four a second each: who is stopped before its first one cannot be missed."""
                return (
                    await read_sum(session, gateway, "baton_gateway_heartbeats_total", "taken") > 6
                )

            await until("both workers are used", both_up, 30.0)
            await until("both send heartbeats", both_beat, 30.0)
            await check_stall(session)
            await check_silence(session)

        async def begin(session: aiohttp.ClientSession) -> tuple[Streaming, asyncio.Task[object]]:
            streaming = Streaming()
            request = ClientRequest(PROMPT, NUM_TOKENS, stream=True)
            asking = asyncio.create_task(ask(session, gateway.url, request, streaming))

            async def flows() -> bool:
                return len(streaming.tokens) > 8

            await until("the stream flows", flows, 20.0)
            return streaming, asking

        async def find_busy(session: aiohttp.ClientSession) -> FleetProcess:
            busy = [
                worker
                for worker in workers
                if await read_sum(session, gateway, "baton_router_requests", worker.name)
            ]
            assert len(busy) == 1, busy
            return busy[0]

        async def count_silent(session: aiohttp.ClientSession) -> float:
            return await read_sum(session, gateway, "baton_gateway_silent_workers_total")

        async def check_stall(session: aiohttp.ClientSession) -> None:
            """Not run until it is suspected: it gets nothing new, and keeps what it has."""
            streaming, asking = await begin(session)
            stalled = await find_busy(session)
            await freeze(stalled)

            async def is_suspected() -> bool:
                state = "baton_gateway_worker_state"
                return await read_sum(session, gateway, state, "suspected") == 1

            await until("it is suspected", is_suspected, STALL_S)
            assert len(streaming.tokens) < NUM_TOKENS, "the fault came too late"
            stalled.send(signal.SIGCONT)
            reply = await asking
            assert len(reply.tokens) == NUM_TOKENS
            assert await count_silent(session) == 0

            async def is_not() -> bool:
                return not await is_suspected()

            await until("it is not suspected any more", is_not, 20.0)

        async def check_silence(session: aiohttp.ClientSession) -> None:
            """Its requests go on elsewhere, long before its lease of 10 s is over."""
            streaming, asking = await begin(session)
            silent = await find_busy(session)
            (other,) = (worker for worker in workers if worker is not silent)
            await freeze(silent)
            frozen_at, num_tokens = time.monotonic(), len(streaming.tokens)
            assert num_tokens < NUM_TOKENS, "the fault came too late"

            async def is_known() -> bool:
                return await count_silent(session) == 1

            await until("it is known to be silent", is_known, KNOWN_WITHIN_S + LATE_S)
            known_s = time.monotonic() - frozen_at
            reply = await asking
            print(f"known after {known_s:.2f} s, answered after {time.monotonic() - frozen_at:.2f}")
            assert known_s > STALL_S
            assert reply.error is None
            request = ClientRequest(PROMPT, NUM_TOKENS, stream=True)
            assert reply == await ask(session, other.url, request)
            resumed = "baton_gateway_resumed_streams_total"
            assert await read_sum(session, gateway, resumed) == 1
            silent.send(signal.SIGCONT)

        run(scenario)


PROMPT = Prompts(18).make(64)
