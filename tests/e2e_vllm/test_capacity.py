"""Servers short of room: what they hold gives way, and the gateway knows how full they are.

Decode's pool has 511 blocks for requests, prefill's 255; prompts here fill both.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from baton.engines.stall_detector import STALL_REASON
from tests.e2e_vllm.client import (
    ask,
    ask_all,
    ask_one,
    check_same,
    get_text,
    make_body,
    make_prompts,
    open_session,
    read_request,
    wait_idle,
    wait_until,
)
from tests.e2e_vllm.cluster import BLOCK_SIZE, POOL_TOKENS
from tests.e2e_vllm.tickets import Handoff, Server, read_prefill_result, read_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import aiohttp

    from tests.e2e_vllm.client import Answer, Json
    from tests.e2e_vllm.cluster import ClusterFactory, VllmCluster

pytestmark = pytest.mark.vllm

NUM_BLOCKS = POOL_TOKENS // BLOCK_SIZE - 1
NUM_HOLDERS, HELD_TOKENS = 4, 3960
NUM_LEFT = NUM_BLOCKS - NUM_HOLDERS * -(-HELD_TOKENS // BLOCK_SIZE)
SOON_S = 30.0
NUM_OFFERED, OFFERED_TOKENS, LATE_TOKENS = 8, 992, 500
"""KV of so many prompts leaves prefill no room for one more. They are many and short: a token costs
the more the longer its prompt is."""


def read_load(server: Server) -> Json:
    """How full vLLM is, as its control server says."""
    return json.loads(get_text(f"{server.info['control_urls'][0]}/health"))["load"]


def test_computed_kv_that_nobody_takes_gives_way_to_who_has_no_room(cluster: VllmCluster) -> None:
    """Decode has no room for what prefill holds for it, and prefill none for anybody else."""
    prefill, decode = Server.of(cluster.prefill), Server.of(cluster.decode)
    wait_idle(cluster.prefill, cluster.decode)
    (late,) = make_prompts(1, seed=42, shortest=LATE_TOKENS, longest=LATE_TOKENS)
    length = OFFERED_TOKENS
    prompts = make_prompts(NUM_OFFERED, seed=41, shortest=length, longest=length)
    handoffs = [Handoff.make(prefill, decode, prompt, valid_s=240) for prompt in prompts]

    async def run() -> Answer:
        async with filled(prefill, decode):
            asked = [handoff.ask_decode() for handoff in handoffs]
            await until(lambda: read_load(decode)["num_waiting"] == len(handoffs))
            for leg in [handoff.ask_prefill() for handoff in handoffs]:
                verdict = read_prefill_result(await asyncio.wrap_future(leg))
                assert verdict["status"] == "offered"
            assert read_load(prefill)["num_free_blocks"] * BLOCK_SIZE < len(late), "there is room"
            answer = await asyncio.to_thread(ask_one, cluster.prefill, late)
            assert not any(each.done() for each in asked)
        answers.extend([read_tokens(await asyncio.wrap_future(each)) for each in asked])
        return answer

    answers: list[Answer] = []
    check_same([asyncio.run(run())], ask_all(cluster.oracle, [late]))
    traces = [handoff.read_decode_trace() for handoff in handoffs]
    withdrawn = [n for n, trace in enumerate(traces) if trace.fallbacks]
    assert len(withdrawn) == 1, "one was enough"
    (fallback,) = traces[withdrawn[0]].fallbacks
    assert STALL_REASON in fallback
    chosen = [withdrawn[0], withdrawn[0] - 1]  # one that was computed twice, one that was not
    expected = ask_all(cluster.oracle, [prompts[n] for n in chosen])
    check_same([answers[n] for n in chosen], expected)
    wait_idle(cluster.prefill, cluster.decode)


def test_auto_pulls_where_a_vllm_server_is_full_and_says_how_full(
    cluster: VllmCluster, cluster_factory: ClusterFactory
) -> None:
    prefill, decode = Server.of(cluster.prefill), Server.of(cluster.decode)
    changes = {"gateway.mode": "auto", "gateway.probe_interval_s": 0.2}
    gateway = cluster_factory.start_gateway([cluster.prefill], [cluster.decode], **changes)
    wait_idle(cluster.decode)
    wait_until(lambda: read_load(decode)["num_free_blocks"] == NUM_BLOCKS, SOON_S)
    roomy, tight = make_prompts(2, seed=43, shortest=600, longest=600)

    def is_known(expected: Json) -> bool:
        workers = json.loads(get_text(f"{gateway.url}/debug/workers"))["workers"]
        (known,) = (worker["load"] for worker in workers if worker["worker"] == "decode")
        return known is not None and expected.items() <= known.items()

    async def run() -> list[Answer]:
        async with open_session() as session:
            await until(lambda: is_known({"num_free_blocks": NUM_BLOCKS, "num_waiting": 0}))
            first = await ask(session, gateway.url, roomy)
            async with filled(prefill, decode):
                await until(lambda: is_known({"num_free_blocks": NUM_LEFT}))
                asked = asyncio.create_task(ask(session, gateway.url, tight))
                await until(lambda: is_known({"num_waiting": 1}))
                assert not asked.done()
            return [first, await asked]

    answers = asyncio.run(run())
    check_same(answers, ask_all(cluster.oracle, [roomy, tight]))
    first, second = (read_request(gateway, answer.request_id) for answer in answers)
    assert (first["summary"]["mode"], second["summary"]["mode"]) == ("push", "pull")
    assert first["placement"] == ["decode has room, as far as is known"]
    (reason,) = second["placement"]
    assert reason.startswith(
        f"decode has {NUM_LEFT} of {NUM_BLOCKS} blocks free, too few for about "
    )
    assert second["summary"]["fallbacks"] == []
    # Told by a step of its own: the server has nothing to compute any more.
    wait_until(lambda: is_known({"num_free_blocks": NUM_BLOCKS, "num_waiting": 0}), SOON_S)
    cluster_factory.end(gateway)


@asynccontextmanager
async def filled(prefill: Server, decode: Server) -> AsyncIterator[None]:
    """All but `NUM_LEFT` blocks of a decode server wait for KV that nobody is asked to compute."""
    prompts = make_prompts(NUM_HOLDERS, seed=44, shortest=HELD_TOKENS, longest=HELD_TOKENS)
    async with open_session() as session:
        handoffs = [Handoff.make(prefill, decode, prompt) for prompt in prompts]
        holders = [asyncio.create_task(hold(session, handoff)) for handoff in handoffs]
        try:
            await until(lambda: read_load(decode)["num_free_blocks"] == NUM_LEFT)
            yield
            assert not any(holder.done() for holder in holders)
        finally:
            for holder in holders:
                holder.cancel()


async def hold(session: aiohttp.ClientSession, handoff: Handoff) -> None:
    """A decode leg whose prefill leg nobody asks for: its blocks wait for KV."""
    params = {"baton_ticket": handoff.text, "do_remote_prefill": True}
    body = make_body(handoff.prompt, kv_transfer_params=params)
    async with session.post(f"{handoff.decode.process.url}/v1/completions", json=body) as response:
        raise AssertionError(f"it did not wait: {response.status}")


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition, SOON_S)
