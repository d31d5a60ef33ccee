"""A worker that announces itself: what it serves, and what it ends, by what gateways answer."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import aiohttp
import pytest

from baton.ids import WorkerId
from baton.worker.announcer import SupersededError
from tests.free_ports import find_free_port
from tests.integration.announcing import gateway, life
from tests.integration.gateway_cluster import until, until_true
from tests.integration.test_worker_life import living, one_token, read_end, start_stream
from tests.unit.worker.scripted_engine import EPOCH, ScriptedEngine

if TYPE_CHECKING:
    from collections.abc import Awaitable

LEASE_S = 1.8


async def read_health(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with session.get(f"{url}/health") as answer:
        return answer.status, (await answer.json())["status"]


async def until_health(session: aiohttp.ClientSession, url: str, *expected: object) -> None:
    async def is_so() -> bool:
        return await read_health(session, url) == expected

    await until_true(is_so)


def run(scenario: Awaitable[None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await scenario

    asyncio.run(main())


def test_a_worker_that_no_gateway_accepts_serves_nothing() -> None:
    async def scenario() -> None:
        port = find_free_port()
        at = f"https://127.0.0.1:{port}"
        engine = ScriptedEngine(one_token)
        async with (
            living(engine, announce_to=(at,), announce_lease_s=LEASE_S) as (url, _, worker),
            aiohttp.ClientSession() as session,
        ):
            assert await read_health(session, url) == (503, "fenced")
            async with gateway(port=port, tls="off"):
                await until_health(session, url, 200, "ok")
                reply = await start_stream(session, url)
            assert await read_end(reply) == ("fenced", "data: [DONE]")
            assert engine.cancelled == [engine.requests[0].id]
            assert await read_health(session, url) == (503, "fenced")
            refused = await start_stream(session, url)
            assert refused.status == 503
            assert (await refused.json())["error"]["code"] == "fenced"
            async with session.get(f"{url}/metrics") as answer:
                text = await answer.text()
            assert "\nbaton_worker_fenced 1.0" in text
            assert "\nbaton_worker_fences_total 1.0" in text
            async with gateway(port=port, tls="off"):
                await until_health(session, url, 200, "ok")
                assert worker.engine_client.why_fenced() is None

    run(scenario())


def test_a_worker_that_is_superseded_ends() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(one_token)
        async with (
            gateway(tls="off") as one,
            living(engine, announce_to=(one.url,), announce_lease_s=LEASE_S) as (url, running, _),
            aiohttp.ClientSession() as session,
        ):
            await until_health(session, url, 200, "ok")
            reply = await start_stream(session, url)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                other = f"https://127.0.0.1:{listener.getsockname()[1]}"
                async with life("w0", other, one.url) as second:

                    def has_lost_its_name() -> bool:
                        # As if its address had refused connections for a moment.
                        one.members.table.end(WorkerId("w0"), EPOCH)
                        return one.epoch_of("w0") == second.epoch

                    await until(has_lost_its_name)
                    with pytest.raises(SupersededError, match="runs elsewhere"):
                        await running
                    assert one.epoch_of("w0") == second.epoch
            assert (await read_end(reply))[0] in {"fenced", "draining"}

    run(scenario())


def test_a_clean_stop_is_reported_to_gateways() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(one_token)
        async with gateway(tls="off") as one:
            async with living(engine, announce_to=(one.url,), announce_lease_s=60.0) as (url, _, _):
                async with aiohttp.ClientSession() as session:
                    await until_health(session, url, 200, "ok")
                assert one.epoch_of("w0") == EPOCH
            assert one.epoch_of("w0") is None
            assert one.count("baton_gateway_ended_leases_total", cause="farewell") == 1

    run(scenario())
