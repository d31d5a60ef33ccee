"""Mode pool under fire: where a worker is held at the store, and what befalls the store itself.

By default a few that stand for the others; all of them by `make chaos`.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from baton.store.entry_format import HEADER_BYTES
from baton.testing.store_faults import flip_bit
from tests.chaos.checks import Inventory, Moved, check_outcome
from tests.chaos.clients import ClientRequest, ask
from tests.chaos.conftest import ChaosCluster, run_on
from tests.chaos.injections import END_S, Case, Kill, Leave, Pause, Restart
from tests.chaos.pool_cluster import (
    BODY_BYTES,
    ENTRY_TOKENS,
    NUM_PROMPT_TOKENS,
    PoolPair,
    open_pool_cluster,
)
from tests.chaos.process_state import TIMEOUT_S, find_trace, until
from tests.chaos.scenarios import (
    BROKEN,
    CLIENT_LEFT,
    CORRECT,
    DECODE_CANCELLED,
    DECODE_FELL_BACK,
    EITHER,
    ERROR,
    GATEWAY_FELL_BACK,
    NO_CLIENT,
    PREFILL_CANCELLED,
    REFUSED,
    SERVED,
    STREAM_BROKE,
    Scenario,
    play,
    to_params,
)
from tests.chaos.stages import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    import aiohttp

    from baton.testing.fleet import FleetProcess

STORE_FAILED = Moved("prefill", "baton_handoffs_total", (("role", "prefill"), ("result", "failed")))


@pytest.fixture(scope="module", name="standing")
def standing_fixture(
    tmp_path_factory: pytest.TempPathFactory, oracle: FleetProcess, request: pytest.FixtureRequest
) -> Iterator[tuple[ChaosCluster, tuple[PoolPair, ...]]]:
    """Both tiers, or by default the one that stays."""
    tiers = ("shared", "file") if request.config.getoption("--all-chaos") else ("file",)
    with open_pool_cluster(tmp_path_factory.mktemp("pool"), oracle, tiers) as standing:
        yield standing


@pytest.fixture(name="standing_pairs")
def pairs_fixture(standing: tuple[ChaosCluster, tuple[PoolPair, ...]]) -> tuple[PoolPair, ...]:
    """Pairs that are well, whatever the test before has done to them."""
    _, pairs = standing
    for pair in pairs:
        pair.heal()
    return pairs


# What befalls the store --------------------------------------------------------------------------


@dataclass(frozen=True)
class Evict:
    """Another user of the store has put so much that this prompt's entries had to go."""

    async def inject(self, case: Case) -> str:
        assert isinstance(case.pair, PoolPair)
        other_user = case.pair.other_user
        names = other_user.names()
        num_put = other_user.evict(names)
        assert not names & other_user.names()
        return f"{len(names)} entries had to go when {num_put} others came"

    async def settle(self, case: Case) -> None:
        await _go_on(case)


@dataclass(frozen=True)
class Spoil:
    """A bit of the entry that decode has open is another one."""

    async def inject(self, case: Case) -> str:
        assert isinstance(case.pair, PoolPair)
        (entry,) = case.pair.find_open_entries()
        before = entry.read_bytes()
        flip_bit(entry, HEADER_BYTES + BODY_BYTES // 3, 5)
        assert entry.read_bytes() != before
        return f"a bit of {entry.name} is another"

    async def settle(self, case: Case) -> None:
        assert isinstance(case.pair, PoolPair)
        (entry,) = case.pair.find_open_entries()
        await _go_on(case)
        assert not entry.exists(), "a damaged entry stays"


@dataclass(frozen=True)
class CutShort:
    """The entry that decode has open loses its second half, as after a power cut."""

    async def inject(self, case: Case) -> str:
        assert isinstance(case.pair, PoolPair)
        (entry,) = case.pair.find_open_entries()
        os.truncate(entry, HEADER_BYTES + BODY_BYTES // 2)
        assert entry.stat().st_size == HEADER_BYTES + BODY_BYTES // 2
        return f"{entry.name} has lost its second half"

    async def settle(self, case: Case) -> None:
        await _go_on(case)


@dataclass(frozen=True)
class Crowd:
    """Another user takes nearly all room while a prompt is being kept: one entry fits, not five."""

    async def inject(self, case: Case) -> str:
        assert isinstance(case.pair, PoolPair)
        other_user = case.pair.other_user
        before = other_user.num_reserved_bytes
        other_user.fill_capacity()
        taken = other_user.num_reserved_bytes - before
        assert taken > 0
        assert not other_user.names()
        return f"{taken} bytes are about to be kept, and nothing is"

    async def settle(self, case: Case) -> None:
        assert isinstance(case.pair, PoolPair)
        await _go_on(case)
        case.pair.other_user.free_capacity()


async def _go_on(case: Case) -> None:
    case.release()
    await asyncio.wait([case.asking], timeout=END_S)
    assert case.asking.done(), "the request hangs"


# The table ---------------------------------------------------------------------------------------

ALL, NOTHING = NUM_PROMPT_TOKENS, 0


@dataclass(frozen=True)
class AtTheStore(Scenario):
    """`received`: how many of the prompt's tokens decode got from the store; None: any."""

    received: int | None = None


PUTTING, KEPT, TAKING, DECODING = Stage.PUTTING, Stage.KEPT, Stage.TAKING, Stage.DECODING
SCENARIOS = (
    AtTheStore(PUTTING, Kill("prefill"), CORRECT, (GATEWAY_FELL_BACK,), received=NOTHING),
    AtTheStore(PUTTING, Pause("prefill"), CORRECT),
    AtTheStore(PUTTING, Restart("prefill"), CORRECT),
    AtTheStore(PUTTING, Kill("decode"), ERROR, (REFUSED,)),
    AtTheStore(PUTTING, Pause("decode"), CORRECT),
    AtTheStore(PUTTING, Restart("decode"), EITHER),
    AtTheStore(PUTTING, Kill("gateway"), BROKEN, (PREFILL_CANCELLED,)),
    AtTheStore(PUTTING, Pause("gateway"), CORRECT),
    AtTheStore(PUTTING, Restart("gateway"), BROKEN, (PREFILL_CANCELLED,)),
    AtTheStore(PUTTING, Leave(), NO_CLIENT, (CLIENT_LEFT, PREFILL_CANCELLED)),
    AtTheStore(PUTTING, Crowd(), CORRECT, DECODE_FELL_BACK, received=NOTHING),
    # What was kept stays: its prefill worker is of no importance any more.
    AtTheStore(KEPT, Kill("prefill"), CORRECT, (SERVED,), received=ALL),
    AtTheStore(KEPT, Pause("prefill"), CORRECT, (SERVED,), stands_for_others=True, received=ALL),
    AtTheStore(KEPT, Restart("prefill"), CORRECT, (SERVED,), received=ALL),
    AtTheStore(KEPT, Kill("decode"), ERROR, (REFUSED,)),
    AtTheStore(KEPT, Pause("decode"), CORRECT),
    AtTheStore(KEPT, Restart("decode"), EITHER),
    AtTheStore(KEPT, Kill("gateway"), BROKEN, (DECODE_CANCELLED,)),
    AtTheStore(KEPT, Pause("gateway"), CORRECT, received=ALL),
    AtTheStore(KEPT, Restart("gateway"), BROKEN, (DECODE_CANCELLED,)),
    AtTheStore(KEPT, Leave(), NO_CLIENT, (CLIENT_LEFT, DECODE_CANCELLED)),
    # The first entry is open: that much stays readable.
    AtTheStore(KEPT, Evict(), CORRECT, received=ENTRY_TOKENS),
    AtTheStore(KEPT, Spoil(), CORRECT, DECODE_FELL_BACK, received=NOTHING),
    AtTheStore(TAKING, Kill("prefill"), CORRECT, (SERVED,), received=ALL),
    AtTheStore(TAKING, Pause("prefill"), CORRECT, (SERVED,), received=ALL),
    AtTheStore(TAKING, Restart("prefill"), CORRECT, (SERVED,), received=ALL),
    AtTheStore(TAKING, Kill("decode"), ERROR, (REFUSED,)),
    AtTheStore(TAKING, Pause("decode"), CORRECT),
    AtTheStore(TAKING, Restart("decode"), EITHER),
    AtTheStore(TAKING, Kill("gateway"), BROKEN, (DECODE_CANCELLED,)),
    AtTheStore(TAKING, Pause("gateway"), CORRECT, received=ALL),
    AtTheStore(TAKING, Restart("gateway"), BROKEN, (DECODE_CANCELLED,)),
    AtTheStore(TAKING, Leave(), NO_CLIENT, (CLIENT_LEFT, DECODE_CANCELLED)),
    AtTheStore(TAKING, Evict(), CORRECT, received=3 * ENTRY_TOKENS, stands_for_others=True),
    AtTheStore(TAKING, Spoil(), CORRECT, received=2 * ENTRY_TOKENS),
    AtTheStore(TAKING, CutShort(), CORRECT, received=2 * ENTRY_TOKENS),
    AtTheStore(DECODING, Kill("prefill"), CORRECT, (SERVED,)),
    AtTheStore(DECODING, Kill("decode"), ERROR, (STREAM_BROKE,)),
    AtTheStore(DECODING, Leave(), NO_CLIENT, (CLIENT_LEFT, DECODE_CANCELLED)),
)


@pytest.mark.parametrize("scenario", to_params(SCENARIOS))
def test_pool(
    standing: tuple[ChaosCluster, tuple[PoolPair, ...]],
    standing_pairs: tuple[PoolPair, ...],
    scenario: AtTheStore,
) -> None:
    cluster, _ = standing

    async def on_pair(session: aiohttp.ClientSession, pair: PoolPair) -> None:
        case = await play(cluster, session, pair, scenario)
        if scenario.received is not None:
            trace = await find_trace(session, pair.decode, case.request.id)
            assert trace is not None
            assert trace.num_received_tokens == scenario.received
        await check_store(pair)

    run_on(standing_pairs, on_pair)


async def check_store(pair: PoolPair) -> None:
    """No room is taken for nothing, nothing is half-written, and nobody has an entry open."""
    other_user = pair.other_user

    async def settled() -> bool:
        other_user.take_back()
        return other_user.num_reserved_bytes == 0 and not pair.find_open_entries()

    await until("all room is given back", settled, TIMEOUT_S)
    assert not other_user.unfinished()


# The store as a whole ----------------------------------------------------------------------------


@pytest.mark.every
def test_a_full_store(
    standing: tuple[ChaosCluster, tuple[PoolPair, ...]], standing_pairs: tuple[PoolPair, ...]
) -> None:
    """Another user has all the room: not one entry can be kept, and the next mode is taken."""
    cluster, _ = standing

    async def on_pair(session: aiohttp.ClientSession, pair: PoolPair) -> None:
        # The next mode opens a link, which stays: the first request that takes it is not looked at.
        _, first = await begin(cluster, session, pair)
        pair.other_user.fill_capacity()
        await answer(session, pair, first)
        pair.other_user.free_capacity()
        inventory, case = await begin(cluster, session, pair)
        pair.other_user.fill_capacity()
        await answer(session, pair, case)
        assert len(pair.other_user.names()) <= 1, "there was room for more than a note"
        await check_next_mode(session, pair, case, "no room")
        await inventory.check_moved(case, (STORE_FAILED, GATEWAY_FELL_BACK))
        pair.other_user.free_capacity()
        await inventory.check_nothing_leaked(case)
        await check_store(pair)

    run_on(standing_pairs, on_pair)


@pytest.mark.every
def test_a_store_whose_lock_is_held(
    standing: tuple[ChaosCluster, tuple[PoolPair, ...]], standing_pairs: tuple[PoolPair, ...]
) -> None:
    """Another user was stopped in the middle of a change: the others do without the store."""
    cluster, _ = standing

    async def on_pair(session: aiohttp.ClientSession, pair: PoolPair) -> None:
        inventory, case = await begin(cluster, session, pair)
        with pair.other_user.hold_lock():
            names = pair.other_user.names()
            await answer(session, pair, case)
            assert pair.other_user.names() == names
        await check_next_mode(session, pair, case, "locked")
        await inventory.check_moved(case, (STORE_FAILED, GATEWAY_FELL_BACK))
        await inventory.check_nothing_leaked(case)
        await check_store(pair)

    run_on(standing_pairs, on_pair)


async def begin(
    cluster: ChaosCluster, session: aiohttp.ClientSession, pair: PoolPair
) -> tuple[Inventory, Case]:
    """A pair that is well, and a request that is not asked yet."""
    await cluster.check_handoff(session, pair)
    inventory = Inventory(session)
    await inventory.take((pair.prefill, pair.decode), pair.gateway)
    return inventory, Case(
        cluster, session, pair, ClientRequest(cluster.prompts.make(NUM_PROMPT_TOKENS))
    )


async def answer(session: aiohttp.ClientSession, pair: PoolPair, case: Case) -> None:
    case.asking = asyncio.create_task(ask(session, pair.gateway.url, case.request))
    await _go_on(case)
    await check_outcome(case, CORRECT)


async def check_next_mode(
    session: aiohttp.ClientSession, pair: PoolPair, case: Case, why: str
) -> None:
    """It was handed over otherwise, and says why not through the store."""
    trace = await find_trace(session, pair.decode, case.request.id)
    assert trace is not None
    assert (trace.mode, trace.transport) == ("push", pair.transport)
    assert trace.num_received_tokens == NUM_PROMPT_TOKENS
    async with session.get(f"{pair.gateway.url}/debug/requests/{case.request.id}") as response:
        told = await response.text()
    assert why in told, told
