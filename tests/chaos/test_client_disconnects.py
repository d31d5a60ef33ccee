"""Whoever asked is gone: both workers are free again soon."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.chaos.clients import ClientRequest, Streaming, ask
from tests.chaos.conftest import LONG, ChaosCluster, Pair, run
from tests.chaos.process_state import find_trace, read_load, until, until_idle, until_mid_handoff

if TYPE_CHECKING:
    import aiohttp

    from baton.testing.fleet import FleetProcess
    from tests.chaos.clients import Reply

FREE_WITHIN_S = 20.0
"""A hang would last as long as a handoff may, 60 s; how soon it is, is printed."""
ONE_TRANSPORT = pytest.mark.parametrize(
    "transport", [pytest.param("shared", marks=pytest.mark.every), "tcp"]
)
"""How an end reaches the workers does not depend on the transport."""


async def begin_prefill(
    session: aiohttp.ClientSession, pair: Pair, request: ClientRequest
) -> asyncio.Task[Reply]:
    """Ask, and return in the middle of the handoff, before the answer's headers."""
    asking = asyncio.create_task(ask(session, pair.gateway.url, request))
    await until_mid_handoff(session, pair.prefill, pair.decode, request.id)
    assert not asking.done()
    return asking


async def begin_stream(
    session: aiohttp.ClientSession, pair: Pair, request: ClientRequest
) -> asyncio.Task[Reply]:
    """Ask, and return when tokens come."""
    streaming = Streaming()
    asking = asyncio.create_task(ask(session, pair.gateway.url, request, streaming))

    async def flows() -> bool:
        return len(streaming.tokens) > 5

    await until("the stream flows", flows, 20.0)
    assert (await read_load(session, pair.decode)).running == 1
    assert not asking.done()
    return asking


async def leave(asking: asyncio.Task[Reply]) -> None:
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


async def read_gateway_outcome(
    session: aiohttp.ClientSession, gateway: FleetProcess, request: ClientRequest
) -> str:
    async with session.get(f"{gateway.url}/debug/requests/{request.id}") as response:
        assert response.status == 200
        outcome: str = (await response.json())["gateway"]["outcome"]
        return outcome


@pytest.mark.parametrize(
    ("transport", "stream"),
    [
        pytest.param("shared", False, id="shared-whole"),
        pytest.param("tcp", True, id="tcp-stream"),
        pytest.param("shared", True, id="shared-stream", marks=pytest.mark.every),
        pytest.param("tcp", False, id="tcp-whole", marks=pytest.mark.every),
    ],
)
def test_a_client_leaves_during_prefill(
    cluster: ChaosCluster, transport: str, stream: bool
) -> None:
    pair = cluster.pair(transport)

    async def scenario(session: aiohttp.ClientSession) -> None:
        request = ClientRequest(cluster.prompts.make(LONG), stream=stream)
        await leave(await begin_prefill(session, pair, request))
        elapsed_s = await until_idle(session, pair.prefill, pair.decode, within_s=FREE_WITHIN_S)
        print(f"{transport}: both workers were free after {elapsed_s * 1e3:.0f} ms")
        assert "client left" in await read_gateway_outcome(session, pair.gateway, request)
        traces = [
            await find_trace(session, each, request.id) for each in (pair.prefill, pair.decode)
        ]
        outcomes = {None if trace is None else trace.outcome for trace in traces}
        # Who hears of it first says so to the other, whose handoff then fails.
        assert "cancelled" in outcomes
        assert outcomes <= {"cancelled", "failed"}
        await cluster.check_handoff(session, pair)

    run(scenario)


@ONE_TRANSPORT
def test_a_client_leaves_its_stream(cluster: ChaosCluster, transport: str) -> None:
    pair = cluster.pair(transport)

    async def scenario(session: aiohttp.ClientSession) -> None:
        request = ClientRequest(cluster.prompts.make(60), num_tokens=3000, stream=True)
        await leave(await begin_stream(session, pair, request))
        elapsed_s = await until_idle(session, pair.prefill, pair.decode, within_s=FREE_WITHIN_S)
        print(f"{transport}: decode was free after {elapsed_s * 1e3:.0f} ms")
        assert "client left" in await read_gateway_outcome(session, pair.gateway, request)
        trace = await find_trace(session, pair.decode, request.id)
        assert trace is not None
        assert trace.outcome == "cancelled"
        await cluster.check_handoff(session, pair)

    run(scenario)


@ONE_TRANSPORT
def test_the_gateway_dies(cluster: ChaosCluster, transport: str) -> None:
    pair = cluster.pair(transport)

    async def scenario(session: aiohttp.ClientSession) -> None:
        stream = ClientRequest(cluster.prompts.make(60), num_tokens=3000, stream=True)
        streamed = await begin_stream(session, pair, stream)
        handed = await begin_prefill(session, pair, ClientRequest(cluster.prompts.make(LONG)))
        pair.gateway.kill()
        elapsed_s = await until_idle(session, pair.prefill, pair.decode, within_s=FREE_WITHIN_S)
        print(f"{transport}: both workers were free after {elapsed_s * 1e3:.0f} ms")
        broken = await asyncio.gather(streamed, handed, return_exceptions=True)
        assert all(isinstance(error, Exception) for error in broken), "they were under way"
        await asyncio.to_thread(pair.start_gateway)
        await cluster.check_handoff(session, pair)

    run(scenario)
