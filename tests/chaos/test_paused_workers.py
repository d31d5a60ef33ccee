"""SIGSTOP: a worker that is neither dead nor alive, and may write again when nobody expects it."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

from baton.telemetry.trace import Stamp
from tests.chaos.clients import ClientRequest, ask
from tests.chaos.conftest import (
    LIVENESS_TIMEOUT_S,
    LONG,
    ChaosCluster,
    Pair,
    freeze,
    run,
    run_on_both,
)
from tests.chaos.process_state import (
    find_trace,
    is_stopped,
    read_footprint,
    read_load,
    read_memories,
    read_samples,
    until,
    until_footprint,
    until_idle,
    until_mid_handoff,
)

if TYPE_CHECKING:
    import aiohttp

NOTICE_S = 10.0
"""From the liveness timeout to the first recomputed step, on a busy machine."""


async def answer_past_frozen_prefill(
    cluster: ChaosCluster, session: aiohttp.ClientSession, pair: Pair
) -> ClientRequest:
    """A request whose prefill worker was stopped in mid-handoff, and that was answered rightly."""
    request = ClientRequest(cluster.prompts.make(LONG))
    answering = asyncio.create_task(ask(session, pair.gateway.url, request))
    await until_mid_handoff(session, pair.prefill, pair.decode, request.id)
    await freeze(pair.prefill)
    frozen_at = time.monotonic()  # the workers' traces are on this clock too
    assert not answering.done()
    assert await answering == await cluster.expect(session, request.prompt)
    assert is_stopped(pair.prefill)
    trace = await find_trace(session, pair.decode, request.id)
    assert trace is not None
    assert Stamp.KV_READY not in trace.stamps
    assert any("computed locally" in fallback for fallback in trace.fallbacks)
    noticed_s = trace.stamps[Stamp.PREFILL_STARTED] - frozen_at
    print(f"{pair.transport}: decode began to recompute after {noticed_s:.2f} s")
    assert noticed_s < LIVENESS_TIMEOUT_S + NOTICE_S
    return request


def test_prefill_is_stopped_and_comes_back_as_a_zombie(cluster: ChaosCluster) -> None:
    async def scenario(session: aiohttp.ClientSession, pair: Pair) -> None:
        request = await answer_past_frozen_prefill(cluster, session, pair)
        load = await read_load(session, pair.decode)
        assert load.reserved == load.awaiting_kv == 0
        if pair.transport == "shared":
            # Its hand may still be on these pages: nobody else gets them.
            assert load.quarantined >= LONG // 16
        else:
            assert load.quarantined == 0, "a socket can be closed: nothing lands after that"

        # Nearly all other blocks get content that late writes could damage.
        others = [ClientRequest(cluster.prompts.make(LONG)) for _ in range(2)]
        before = [await ask(session, pair.decode.url, other) for other in others]
        assert before == [await cluster.expect(session, other.prompt) for other in others]

        pair.prefill.send(signal.SIGCONT)
        await until_idle(session, pair.decode, pair.prefill, within_s=20.0)
        for prompt, reply in zip(
            [request.prompt, *(other.prompt for other in others)],
            [await cluster.expect(session, request.prompt), *before],
            strict=True,
        ):
            again = ClientRequest(prompt)
            assert await ask(session, pair.decode.url, again) == reply
            trace = await find_trace(session, pair.decode, again.id)
            assert trace is not None
            assert trace.num_cached_tokens > LONG // 2, "the pages were not looked at again"
        await cluster.check_handoff(session, pair)

    run_on_both(cluster, scenario)


def test_quarantine_ends_with_the_death_of_the_stopped_writer(cluster: ChaosCluster) -> None:
    pair = cluster.pair("shared")

    async def scenario(session: aiohttp.ClientSession) -> None:
        await answer_past_frozen_prefill(cluster, session, pair)
        assert (await read_load(session, pair.decode)).quarantined >= LONG // 16
        pair.prefill.kill()
        await until_idle(session, pair.decode, within_s=20.0)
        await until_footprint(pair.decode, pair.unlinked[pair.decode.pid], within_s=20.0)
        await asyncio.to_thread(pair.restart, "prefill")
        await cluster.check_handoff(session, pair)

    run(scenario)


def test_decode_is_stopped_in_mid_handoff(cluster: ChaosCluster) -> None:
    async def scenario(session: aiohttp.ClientSession, pair: Pair) -> None:
        await cluster.check_handoff(session, pair)
        linked = {worker: read_footprint(worker) for worker in (pair.prefill, pair.decode)}
        request = ClientRequest(cluster.prompts.make(2 * LONG))
        answering = asyncio.create_task(ask(session, pair.gateway.url, request))
        await until_mid_handoff(session, pair.prefill, pair.decode, request.id)
        await freeze(pair.decode)
        elapsed_s = await until_idle(session, pair.prefill, within_s=LIVENESS_TIMEOUT_S + NOTICE_S)
        assert is_stopped(pair.decode)
        assert not answering.done()
        print(f"{pair.transport}: prefill was idle {elapsed_s:.2f} s after decode stopped")
        trace = await find_trace(session, pair.prefill, request.id)
        assert trace is not None
        assert trace.outcome == "failed"

        alone = pair.unlinked[pair.prefill.pid]
        assert read_memories(pair.prefill.pid) == alone.memories, "decode's memory is given up"

        pair.decode.send(signal.SIGCONT)
        assert await answering == await cluster.expect(session, request.prompt)
        await until_idle(session, pair.decode, within_s=20.0)

        async def serving() -> bool:
            samples = await read_samples(session, pair.gateway)
            return (
                sum(v for (name, _), v in samples.items() if name == "baton_gateway_worker_up") > 0
            )

        await until("the gateway sees decode again", serving, 20.0)
        await cluster.check_handoff(session, pair)
        for worker, footprint in linked.items():
            await until_footprint(worker, footprint, within_s=20.0)

    run_on_both(cluster, scenario)
