"""A client that leaves frees both workers within a second, whatever was going on."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import pytest

from baton.gateway.prefill_request import PrefillRequest
from baton.gateway.request import CompletionBody
from baton.gateway.request_context import RequestContext
from baton.net.http_exchange import HttpExchange
from baton.net.http_protocol import BoundedHttpProtocol
from tests.integration.gateway_cluster import PROMPT, STREAM, Cluster, run, until, until_true
from tests.integration.scripted_worker import (
    never_answer,
    one_token_and_wait,
    prefill_at_once,
    recompute_when_aborted,
    start_and_wait,
)


async def leave_after(cluster: Cluster, body: object, ready) -> None:
    """Ask, wait until `ready` is true, and close the connection."""

    async def ask() -> None:
        async with cluster.post(body) as response:
            await response.content.readany()
            await asyncio.Event().wait()

    client = asyncio.create_task(ask())
    await until(ready)
    await asyncio.sleep(0.05)
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)


async def both_freed(cluster: Cluster) -> None:
    for worker in (cluster.prefills[0], cluster.decodes[0]):
        await until(lambda worker=worker: worker.visits[0].left_at)


async def counted(cluster: Cluster, phase: str) -> None:
    name = f'baton_gateway_client_disconnects_total{{phase="{phase}"}}'

    async def is_counted() -> bool:
        return await cluster.metric(name) == 1

    await until_true(is_counted)
    assert await cluster.metric('baton_gateway_requests_total{code="499"') == 1
    assert await cluster.metric("baton_gateway_inflight_requests") == 0


@pytest.mark.parametrize("body", [STREAM, PROMPT])
@pytest.mark.parametrize("script", [never_answer, start_and_wait])
def test_before_the_first_token(body, script):
    async def scenario(cluster: Cluster):
        cluster.prefills[0].script = never_answer
        cluster.decodes[0].script = script
        await leave_after(cluster, body, lambda: cluster.decodes[0].visits)
        await both_freed(cluster)
        await counted(cluster, "prefill")

    run(scenario)


def test_in_mid_stream():
    async def scenario(cluster: Cluster):
        cluster.prefills[0].script = never_answer
        cluster.decodes[0].script = one_token_and_wait
        await leave_after(cluster, STREAM, lambda: cluster.decodes[0].visits)
        await both_freed(cluster)
        await counted(cluster, "decode")

    run(scenario)


def test_while_decode_is_told_of_an_abort():
    async def scenario(cluster: Cluster):
        cluster.prefills[0].kill()
        cluster.decodes[0].script = never_answer
        await leave_after(cluster, STREAM, lambda: cluster.decodes[0].aborts)
        await until(lambda: cluster.decodes[0].visits[0].left_at)
        await counted(cluster, "prefill")

    run(scenario)


def test_while_the_request_is_being_sent():
    async def scenario(cluster: Cluster):
        host, port = cluster.url.removeprefix("http://").split(":")
        _reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
        )
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await counted(cluster, "queued")
        assert not cluster.decodes[0].visits

    run(scenario)


def test_a_client_that_does_not_read_is_let_go_at_its_deadline():
    async def flood(visit):
        await visit.start_stream()
        while True:
            await visit.write(b"data: " + b"x" * 60_000 + b"\n\n")
            await asyncio.sleep(0)

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = flood
        cluster.prefills[0].script = never_answer
        host, port = cluster.url.removeprefix("http://").split(":")
        _reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = b'{"model":"demo","stream":true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await until(lambda: cluster.decodes[0].visits and cluster.decodes[0].visits[0].left_at)
        assert cluster.prefills[0].visits[0].left_at
        writer.close()

    run(scenario, request_timeout_s=0.5)


def test_a_worker_frees_its_place_when_the_leg_lingers_too_long():
    async def scenario(cluster: Cluster):
        cluster.prefills[0].script = never_answer
        async with cluster.post(STREAM) as response:
            assert (await response.text()).endswith("[DONE]\n\n")
        await until(lambda: cluster.prefills[0].visits[0].left_at)

    run(scenario, prefill_grace_period_s=0.2)


def test_other_clients_notice_nothing():
    async def scenario(cluster: Cluster):
        cluster.prefills[0].script = never_answer
        cluster.decodes[0].script = recompute_when_aborted
        async with cluster.post(STREAM) as response:
            await leave_after(cluster, STREAM, lambda: len(cluster.decodes[0].visits) == 2)
            await until(lambda: cluster.decodes[0].visits[1].left_at)
            cluster.decodes[0].visits[0].aborted.set()
            assert (await response.text()).endswith("[DONE]\n\n")

    run(scenario)


@pytest.mark.parametrize("prefill", [never_answer, prefill_at_once])
@pytest.mark.parametrize("decode", [never_answer, start_and_wait, one_token_and_wait])
def test_nothing_of_a_client_that_left_is_kept_for_the_garbage_collector(decode, prefill):
    """Its body would be, too: clients that leave could fill the memory."""
    kinds = (CompletionBody, RequestContext, PrefillRequest, HttpExchange, BoundedHttpProtocol)

    def held() -> Counter[str]:
        return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)

    async def scenario(cluster: Cluster):
        async def ask_and_leave() -> None:
            async with cluster.post(STREAM) as response:
                await response.content.readany()
                await asyncio.Event().wait()

        cluster.decodes[0].script, cluster.prefills[0].script = decode, prefill
        gc.collect()
        before = held()
        gc.disable()
        try:
            clients = [asyncio.create_task(ask_and_leave()) for _ in range(5)]
            await until(lambda: len(cluster.decodes[0].visits) == 5)
            await asyncio.sleep(0.05)
            for client in clients:
                client.cancel()
            await asyncio.wait(clients)
            await until(lambda: held() <= before, why=lambda: f"{held()}, {before} before")
        finally:
            gc.enable()

    run(scenario)
