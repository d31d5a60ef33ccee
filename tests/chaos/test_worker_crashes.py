"""SIGKILL of either worker in the middle of a handoff: right tokens or a clean error, no leak."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from baton.telemetry.trace import Stamp
from tests.chaos.clients import ClientRequest, Streaming, ask
from tests.chaos.conftest import LONG, ChaosCluster, Pair, run_on_both
from tests.chaos.process_state import (
    find_trace,
    read_memories,
    read_summary,
    until,
    until_footprint,
    until_idle,
    until_mid_handoff,
)

if TYPE_CHECKING:
    import aiohttp


def test_prefill_dies_in_mid_handoff(cluster: ChaosCluster) -> None:
    async def scenario(session: aiohttp.ClientSession, pair: Pair) -> None:
        request = ClientRequest(cluster.prompts.make(LONG))
        answering = asyncio.create_task(ask(session, pair.gateway.url, request))
        await until_mid_handoff(session, pair.prefill, pair.decode, request.id)
        pair.prefill.kill()
        assert not answering.done()
        assert await answering == await cluster.expect(session, request.prompt)

        # The fault was there: this request got nothing from prefill, and says why.
        trace = await find_trace(session, pair.decode, request.id)
        assert trace is not None
        assert Stamp.GRANTED in trace.stamps
        assert Stamp.KV_READY not in trace.stamps
        assert any("computed locally" in fallback for fallback in trace.fallbacks)
        summary = await read_summary(session, pair.gateway, request.id)
        assert summary["num_received_tokens"] == 0
        assert summary["fallbacks"]

        # Nothing of the dead peer is left.
        await until_idle(session, pair.decode, within_s=20.0)
        await until_footprint(pair.decode, pair.unlinked[pair.decode.pid], within_s=20.0)

        # Its next life is used again.
        await asyncio.to_thread(pair.restart, "prefill")
        await cluster.check_handoff(session, pair)

    run_on_both(cluster, scenario)


async def until_mapped(session: aiohttp.ClientSession, pair: Pair, request_id: str) -> None:
    """Until the prefill worker has mapped the decode worker's memory."""
    own = pair.unlinked[pair.prefill.pid].memories

    async def mapped() -> bool:
        return read_memories(pair.prefill.pid) > own

    try:
        await until("decode's memory is mapped", mapped, 20.0)
    except AssertionError as exc:
        exc.add_note(f"the handoff: {await find_trace(session, pair.prefill, request_id)}")
        raise


def test_decode_dies_in_mid_handoff_and_in_mid_stream(cluster: ChaosCluster) -> None:
    async def scenario(session: aiohttp.ClientSession, pair: Pair) -> None:
        streaming = Streaming()
        stream = ClientRequest(cluster.prompts.make(60), num_tokens=3000, stream=True)
        streamed = asyncio.create_task(ask(session, pair.gateway.url, stream, streaming))

        async def flows() -> bool:
            return len(streaming.tokens) > 5

        await until("the stream flows", flows, 20.0)
        whole = ClientRequest(cluster.prompts.make(LONG))
        opening = ClientRequest(cluster.prompts.make(LONG), stream=True)
        waiting = [
            asyncio.create_task(ask(session, pair.gateway.url, request))
            for request in (whole, opening)
        ]
        await until_mid_handoff(session, pair.prefill, pair.decode, whole.id)
        if pair.transport == "shared":
            await until_mapped(session, pair, whole.id)
        pair.decode.kill()
        assert not any(task.done() for task in (streamed, *waiting))

        async with asyncio.timeout(30.0):
            broken = await streamed
            failed = [await task for task in waiting]
        assert broken.error is not None
        assert broken.status == 200
        expected = await cluster.expect(session, stream.prompt, num_tokens=len(broken.tokens))
        assert broken.tokens == expected.tokens, "what came before the error was right"
        for reply in failed:
            assert reply.is_clean_error
            assert reply.status in {502, 503}

        await until_idle(session, pair.prefill, within_s=20.0)
        await until_footprint(pair.prefill, pair.unlinked[pair.prefill.pid], within_s=20.0)

        await asyncio.to_thread(pair.restart, "decode")
        await cluster.check_handoff(session, pair)

    run_on_both(cluster, scenario)
