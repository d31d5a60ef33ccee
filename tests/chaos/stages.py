"""How far a request has come when a fault strikes, each proved from outside before it does."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, assert_never

from baton.telemetry.trace import Stamp
from tests.chaos.clients import ClientRequest, ask
from tests.chaos.conftest import LONG, freeze
from tests.chaos.injections import Case
from tests.chaos.pool_cluster import NUM_ENTRIES, NUM_PROMPT_TOKENS, PoolPair
from tests.chaos.process_state import TIMEOUT_S, find_trace, is_stopped, until, until_mid_handoff

if TYPE_CHECKING:
    import aiohttp

    from tests.chaos.conftest import ChaosCluster, Pair

NUM_ANSWER_TOKENS = 240
"""An answer long enough for a fault to find it under way."""


class Stage(StrEnum):
    """Where a request stands."""

    BEFORE_GRANT = "before the grant"
    PREFILLING = "prefilling"
    MID_TRANSFER = "mid transfer"
    DECODING = "decoding"
    # Of mode pool:
    PUTTING = "putting"
    KEPT = "kept"
    TAKING = "taking"


async def reach(
    stage: Stage, cluster: ChaosCluster, session: aiohttp.ClientSession, pair: Pair
) -> Case:
    """Ask through the gateway, and return when the request stands there."""
    match stage:
        case Stage.BEFORE_GRANT:
            return await _before_grant(cluster, session, pair)
        case Stage.PREFILLING:
            return await _prefilling(cluster, session, pair)
        case Stage.MID_TRANSFER:
            return await _mid_transfer(cluster, session, pair)
        case Stage.DECODING:
            return await _decoding(cluster, session, pair)
        case Stage.PUTTING | Stage.KEPT | Stage.TAKING:
            return await _at_the_store(stage, cluster, session, pair)
        case _:
            assert_never(stage)


def _ask(case: Case) -> None:
    url = case.pair.gateway.url
    case.asking = asyncio.create_task(ask(case.session, url, case.request, case.streaming))


async def _before_grant(cluster: ChaosCluster, session: aiohttp.ClientSession, pair: Pair) -> Case:
    """Decode is kept from it (stopped): prefill has the request, and nothing was granted."""
    case = Case(cluster, session, pair, ClientRequest(cluster.prompts.make(LONG)))
    await freeze(pair.decode)
    case.keeps_decode_stopped = True
    _ask(case)

    async def waits() -> bool:
        return await find_trace(session, pair.prefill, case.request.id) is not None

    await until("prefill has it", waits, TIMEOUT_S)
    trace = await find_trace(session, pair.prefill, case.request.id)
    assert trace is not None
    assert trace.num_bytes == 0
    assert is_stopped(pair.decode)
    assert not case.asking.done()
    return case


async def _prefilling(cluster: ChaosCluster, session: aiohttp.ClientSession, pair: Pair) -> Case:
    """Prefill is computing it, by whatever mode it is to be handed over."""
    case = Case(cluster, session, pair, ClientRequest(cluster.prompts.make(LONG)))
    _ask(case)

    async def computing() -> bool:
        trace = await find_trace(session, pair.prefill, case.request.id)
        if trace is None or Stamp.FIRST_LAYER_READY not in trace.stamps:
            return False
        assert Stamp.PREFILL_DONE not in trace.stamps, "too late: prefill is done"
        assert trace.mode == pair.way[0]
        return True

    await until("it is being prefilled", computing, TIMEOUT_S)
    assert not case.asking.done()
    return case


async def _mid_transfer(cluster: ChaosCluster, session: aiohttp.ClientSession, pair: Pair) -> Case:
    case = Case(cluster, session, pair, ClientRequest(cluster.prompts.make(LONG)))
    _ask(case)
    await until_mid_handoff(session, pair.prefill, pair.decode, case.request.id)
    assert not case.asking.done()
    return case


async def _decoding(cluster: ChaosCluster, session: aiohttp.ClientSession, pair: Pair) -> Case:
    """The KV has landed and tokens come."""
    request = ClientRequest(cluster.prompts.make(60), num_tokens=NUM_ANSWER_TOKENS, stream=True)
    case = Case(cluster, session, pair, request)
    _ask(case)

    async def flows() -> bool:
        return len(case.streaming.tokens) > 5

    await until("the stream flows", flows, TIMEOUT_S)
    trace = await find_trace(session, pair.decode, request.id)
    assert trace is not None
    assert Stamp.KV_READY in trace.stamps, "it was handed over"
    assert (trace.mode, trace.transport) == pair.way
    assert not case.asking.done()
    return case


async def _at_the_store(
    stage: Stage, cluster: ChaosCluster, session: aiohttp.ClientSession, pair: Pair
) -> Case:
    """In mode pool: a worker is held where it writes an entry, or reads one.

    Putting: two entries are kept, of the third one half is written. Kept: all are, and decode, that
    was asked, has looked at the first. Taking: it has read two and looks at the third.
    """
    assert isinstance(pair, PoolPair)
    case = Case(cluster, session, pair, ClientRequest(cluster.prompts.make(NUM_PROMPT_TOKENS)))
    role, touch, num_before = {
        Stage.PUTTING: ("prefill", "put", 2),
        Stage.KEPT: ("decode", "read", 0),
        Stage.TAKING: ("decode", "read", 2),
    }[stage]
    case.held_at = point = pair.points[role]
    known = pair.other_user.names()
    point.arm(touch, num_before)
    _ask(case)

    async def is_held() -> bool:
        return point.is_held

    await until(f"{role} is held", is_held, TIMEOUT_S)
    if stage is Stage.PUTTING:
        assert len(pair.other_user.names() - known) == num_before
        pair.check_writing()
    else:
        assert len(pair.other_user.names() - known) == NUM_ENTRIES + 1, "all of it, and a note"
        assert len(pair.find_open_entries()) == 1
    on_prefill = await find_trace(session, pair.prefill, case.request.id)
    assert on_prefill is not None
    assert on_prefill.mode == "pool"
    on_decode = await find_trace(session, pair.decode, case.request.id)
    assert (on_decode is None) == (stage is Stage.PUTTING), "they never meet"
    assert not case.asking.done()
    return case
