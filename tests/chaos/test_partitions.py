"""Three hosts: partitions, also one-way, and bytes or notices that a transport gets wrong.

By default a few that stand for the others; all of them by `make chaos`.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from baton.testing.faulty_transport import Fault
from baton.testing.network_namespaces import dropping_packets_from
from tests.chaos.checks import Inventory, Moved, Outcome, check_outcome
from tests.chaos.clients import ClientRequest, ask
from tests.chaos.conftest import LIVENESS_TIMEOUT_S, ChaosCluster, run
from tests.chaos.far_cluster import DEADLINE_S, RemotePair, open_far_cluster
from tests.chaos.injections import END_S, Case
from tests.chaos.process_state import find_trace
from tests.chaos.stages import Stage, reach

if TYPE_CHECKING:
    from collections.abc import Iterator

    import aiohttp

    from baton.testing.fleet import FleetProcess

DECODE_FELL_BACK = Moved("decode", "baton_handoff_fallbacks_total")
DIGEST_FAILED = Moved("decode", "baton_handoff_digest_failures_total")
HEALS_AFTER_S = LIVENESS_TIMEOUT_S + 2.0


@pytest.fixture(scope="module")
def far_cluster(
    tmp_path_factory: pytest.TempPathFactory, oracle: FleetProcess
) -> Iterator[ChaosCluster]:
    with open_far_cluster(tmp_path_factory.mktemp("far"), oracle) as cluster:
        yield cluster


@pytest.fixture
def pair(far_cluster: ChaosCluster) -> RemotePair:
    (pair,) = far_cluster.pairs
    assert isinstance(pair, RemotePair)
    return pair


# Partitions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Partition:
    """`deaf` are pairs (listener, speaker): what the one says does not reach the other.

    It strikes at `stage`, and heals while the request is under way, or when it has ended.
    """

    name: str
    deaf: tuple[tuple[str, str], ...]
    stage: Stage
    outcome: Outcome
    moved: tuple[Moved, ...] = ()
    stands_for_others: bool = False


def both_ways(one: str, other: str) -> tuple[tuple[str, str], ...]:
    return ((one, other), (other, one))


MID, DECODING = Stage.MID_TRANSFER, Stage.DECODING
CORRECT, EITHER = Outcome.CORRECT, Outcome.CORRECT_OR_ERROR
LOST = (DECODE_FELL_BACK,)
PARTITIONS = (
    Partition("decode-deaf-to-prefill", (("decode", "prefill"),), MID, CORRECT, LOST, True),
    Partition("prefill-deaf-to-decode", (("prefill", "decode"),), MID, CORRECT, LOST),
    Partition("prefill-and-decode", both_ways("prefill", "decode"), MID, CORRECT, LOST),
    Partition("prefill-and-decode-later", both_ways("prefill", "decode"), DECODING, CORRECT),
    Partition("gateway-deaf-to-prefill", (("gateway", "prefill"),), MID, CORRECT),
    Partition("prefill-and-gateway", both_ways("gateway", "prefill"), MID, CORRECT),
    Partition("gateway-deaf-to-decode", (("gateway", "decode"),), MID, EITHER),
    Partition("decode-deaf-to-gateway", (("decode", "gateway"),), MID, EITHER),
    Partition("decode-and-gateway", both_ways("gateway", "decode"), MID, EITHER),
    Partition("decode-and-gateway-later", both_ways("gateway", "decode"), DECODING, EITHER),
    Partition(
        "everybody",
        both_ways("prefill", "decode") + both_ways("gateway", "prefill"),
        MID,
        CORRECT,
        LOST,
    ),
)


@pytest.mark.parametrize(
    "partition",
    [
        pytest.param(one, id=one.name, marks=() if one.stands_for_others else pytest.mark.every)
        for one in PARTITIONS
    ],
)
@pytest.mark.parametrize("heals", ["soon", pytest.param("at-last", marks=pytest.mark.every)])
def test_partition(
    far_cluster: ChaosCluster, pair: RemotePair, partition: Partition, heals: str
) -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        await far_cluster.check_handoff(session, pair)
        inventory = Inventory(session)
        await inventory.take((pair.prefill, pair.decode), pair.gateway)
        case = await reach(partition.stage, far_cluster, session, pair)
        with ExitStack() as cuts:
            for listener, speaker in partition.deaf:
                # Proved inside: a datagram that should not arrive did not.
                cuts.enter_context(dropping_packets_from(pair.hosts[listener], pair.hosts[speaker]))
            patience_s = HEALS_AFTER_S if heals == "soon" else DEADLINE_S
            await asyncio.wait([case.asking], timeout=patience_s)
        await asyncio.wait([case.asking], timeout=END_S)
        assert case.asking.done(), "the request hangs"
        await check_outcome(case, partition.outcome)
        await inventory.check_moved(case, partition.moved)
        elapsed_s = await inventory.check_nothing_leaked(case)
        print(f"{partition.name}: all idle {elapsed_s:.2f} s after the request")

    run(scenario)


# Bytes and notices -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """What the transport of one worker does wrong, how often, and what must have been counted.

    `recomputed`: nobody else could bring the KV.
    """

    fault: Fault
    on: str
    count: int = 1
    recomputed: bool = True
    moved: tuple[Moved, ...] = ()
    stands_for_others: bool = True


FOUND = (DIGEST_FAILED, DECODE_FELL_BACK)
WRONGS = (
    Wrong(Fault.FLIP_BIT, "decode", moved=FOUND),
    Wrong(Fault.ZERO_PAGE, "decode", moved=FOUND, stands_for_others=False),
    Wrong(Fault.SWAP_PAGES, "prefill", moved=FOUND, stands_for_others=False),
    Wrong(Fault.TRUNCATE, "prefill", moved=FOUND),
    Wrong(Fault.TRUNCATE, "prefill", count=1000, moved=FOUND, stands_for_others=False),
    Wrong(Fault.FAIL_SUBMIT, "prefill", moved=LOST),
    Wrong(Fault.DUPLICATE_NOTIFICATION, "decode", moved=LOST),
    Wrong(Fault.REORDER_NOTIFICATION, "decode", recomputed=False),
    Wrong(Fault.DROP_NOTIFICATION, "decode", moved=LOST, stands_for_others=False),
)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(
            one,
            id=f"{one.fault}-{one.count}",
            marks=() if one.stands_for_others else pytest.mark.every,
        )
        for one in WRONGS
    ],
)
def test_a_transport_that_is_wrong(
    far_cluster: ChaosCluster, pair: RemotePair, wrong: Wrong
) -> None:
    point = pair.failpoints[wrong.on]

    async def scenario(session: aiohttp.ClientSession) -> None:
        await far_cluster.check_handoff(session, pair)
        inventory = Inventory(session)
        await inventory.take((pair.prefill, pair.decode), pair.gateway)
        before = point.count(wrong.fault)
        point.arm(wrong.fault, wrong.count)
        case = Case(far_cluster, session, pair, ClientRequest(far_cluster.prompts.make(300)))
        case.asking = asyncio.create_task(ask(session, pair.gateway.url, case.request))
        await asyncio.wait([case.asking], timeout=END_S)
        assert case.asking.done(), "the request hangs"
        point.disarm()
        injected = point.count(wrong.fault) - before
        assert injected > 0, "it was no fault at all"
        await check_outcome(case, CORRECT)
        trace = await find_trace(session, pair.decode, case.request.id)
        assert trace is not None
        assert (trace.num_received_tokens == 0) == wrong.recomputed
        assert any("computed locally" in reply for reply in trace.fallbacks) == wrong.recomputed
        await inventory.check_moved(case, wrong.moved)
        await inventory.check_nothing_leaked(case)
        print(f"{wrong.fault}: struck {injected} times")

    run(scenario)


@pytest.mark.every
def test_completions_that_come_after_the_end(far_cluster: ChaosCluster, pair: RemotePair) -> None:
    """A notice that was held back until its handoff was over, and its window closed."""
    point = pair.failpoints["decode"]

    async def scenario(session: aiohttp.ClientSession) -> None:
        await far_cluster.check_handoff(session, pair)
        before = point.count(Fault.DELAY_NOTIFICATION)
        point.arm(Fault.DELAY_NOTIFICATION, 1, holds=True)
        case = Case(far_cluster, session, pair, ClientRequest(far_cluster.prompts.make(300)))
        case.asking = asyncio.create_task(ask(session, pair.gateway.url, case.request))
        await asyncio.wait([case.asking], timeout=END_S)
        assert point.count(Fault.DELAY_NOTIFICATION) == before + 1
        await check_outcome(case, CORRECT)
        trace = await find_trace(session, pair.decode, case.request.id)
        assert trace is not None
        assert any("deadline" in reply for reply in trace.fallbacks), "it was not late enough"
        inventory = Inventory(session)
        await inventory.take((pair.prefill, pair.decode), pair.gateway)
        point.disarm()  # now it comes
        await asyncio.sleep(0.5)
        await inventory.check_nothing_leaked(case)

    run(scenario)
