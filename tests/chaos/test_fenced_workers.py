"""SIGSTOP past a lease: the name goes to a second life, and the first one writes nowhere any more.

Real processes and a real gateway. The peers of the stopped worker are patient: nothing but its own
fence keeps it from finishing the handoff that it was stopped in.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from baton.telemetry.trace import Stamp
from baton.testing.fleet import Fleet
from tests.chaos.clients import ClientRequest, Prompts, ask
from tests.chaos.conftest import ENGINE, GATEWAY, KEY, LONG, freeze, run
from tests.chaos.process_state import find_trace, read_samples, until, until_mid_handoff
from tests.free_ports import find_free_port
from tests.preloaded import start_preloaded

if TYPE_CHECKING:
    from collections.abc import Iterator

    import aiohttp

    from baton.testing.fleet import FleetProcess

LEASE_S = 2.0
SUPERSEDED = 76
PATIENT = ENGINE | {"handoff.liveness_timeout_s": 60.0, "handoff.timeout_s": 60.0}
NAME = "prefill-0"


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY)
    with Fleet(tmp_path_factory.mktemp("fenced"), environment, start=start_preloaded) as fleet:
        yield fleet


async def count(session: aiohttp.ClientSession, gateway: FleetProcess, name: str) -> float:
    """The sum of a metric's series."""
    samples = await read_samples(session, gateway)
    return sum(value for (sample, _), value in samples.items() if sample == name)


def test_the_old_life_of_a_worker_writes_nowhere(fleet: Fleet) -> None:
    port = find_free_port()
    announcing = PATIENT | {
        "worker.announce_to": [f"https://127.0.0.1:{port}"],
        "worker.announce_lease_s": LEASE_S,
        "engine.max_batch_tokens": 16,
        "transfer.transports": ["tcp"],
    }
    decode_settings = PATIENT | {"transfer.transports": ["tcp"]}
    decode = fleet.start_worker("decode-0", "decode", decode_settings)
    first = fleet.start_worker(NAME, "prefill", announcing)
    for worker in (decode, first):
        worker.wait_ready()
    settings = GATEWAY | {
        "gateway.announce_port": port,
        "gateway.members": ["announced"],
        "router.policy": "round_robin",  # each request is handed over
    }
    gateway = fleet.start_gateway([first], [decode], settings=settings)

    async def scenario(session: aiohttp.ClientSession) -> None:
        async def is_serving() -> bool:
            async with session.get(f"{first.url}/health") as answer:
                return answer.status == 200

        await until("the first life is accepted", is_serving, 20.0)
        prompts = Prompts(18)
        request = ClientRequest(prompts.make(LONG))
        answering = asyncio.create_task(ask(session, gateway.url, request))
        await until_mid_handoff(session, first, decode, request.id)
        await freeze(first)
        frozen_at = time.monotonic()
        second = await asyncio.to_thread(start_second_life)

        async def is_accepted() -> bool:
            async with session.get(f"{second.url}/health") as answer:
                return answer.status == 200

        async def has_one_owner() -> bool:  # what a gateway shows is up to a tenth of a second old
            num_owners = await count(session, gateway, "baton_gateway_announced_workers")
            assert num_owners <= 1
            return num_owners == 1

        await until("the second life is accepted", is_accepted, 20.0)
        # A lease runs from its last renewal, which was up to a third of it before.
        assert time.monotonic() - frozen_at > LEASE_S / 2
        assert not answering.done(), "the handoff must be under way still"
        await until("the name has one owner", has_one_owner, 20.0)

        first.send(signal.SIGCONT)
        assert await asyncio.to_thread(first.popen.wait, 20.0) == SUPERSEDED
        assert "runs elsewhere" in first.tail()
        reply = await answering
        assert reply.error is None
        assert reply == await ask(session, decode.url, ClientRequest(request.prompt))
        trace = await find_trace(session, decode, request.id)
        assert trace is not None
        assert Stamp.KV_READY not in trace.stamps, "the old life finished its handoff"
        assert any("computed locally" in fallback for fallback in trace.fallbacks)
        await until("the name has one owner", has_one_owner, 20.0)
        assert second.is_alive

    def start_second_life() -> FleetProcess:
        return fleet.start_worker(NAME, "prefill", announcing).wait_ready()

    run(scenario)
