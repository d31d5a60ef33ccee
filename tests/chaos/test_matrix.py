"""Every fault to everybody at every stage. A new failure is a line in `SCENARIOS`.

By default a few that stand for the others; all of them by `make chaos` (`--all-chaos`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.chaos.conftest import ChaosCluster, Pair, run_on, run_on_both
from tests.chaos.injections import CutData, CutLink, Kill, Leave, OutliveDecode, Pause, Restart
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
    PREFILL_FAILED,
    REFUSED,
    SERVED,
    STREAM_BROKE,
    Scenario,
    play,
    to_params,
)
from tests.chaos.stages import Stage

if TYPE_CHECKING:
    import aiohttp

BEFORE, MID, DECODING = Stage.BEFORE_GRANT, Stage.MID_TRANSFER, Stage.DECODING
PREFILLING = Stage.PREFILLING

SCENARIOS = (
    Scenario(BEFORE, Kill("prefill"), CORRECT, (*DECODE_FELL_BACK, GATEWAY_FELL_BACK)),
    Scenario(MID, Kill("prefill"), CORRECT, (*DECODE_FELL_BACK, GATEWAY_FELL_BACK)),
    Scenario(DECODING, Kill("prefill"), CORRECT, (SERVED,)),
    Scenario(BEFORE, Kill("decode"), ERROR, (REFUSED,)),
    Scenario(MID, Kill("decode"), ERROR, (PREFILL_FAILED, REFUSED)),
    Scenario(DECODING, Kill("decode"), ERROR, (STREAM_BROKE,)),
    Scenario(BEFORE, Kill("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(MID, Kill("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(DECODING, Kill("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(BEFORE, Pause("prefill"), CORRECT, DECODE_FELL_BACK),
    Scenario(MID, Pause("prefill"), CORRECT, DECODE_FELL_BACK),
    Scenario(DECODING, Pause("prefill"), CORRECT),
    Scenario(BEFORE, Pause("decode"), CORRECT),
    Scenario(MID, Pause("decode"), CORRECT, (PREFILL_FAILED,)),
    Scenario(DECODING, Pause("decode"), CORRECT),
    Scenario(BEFORE, Pause("gateway"), CORRECT),
    Scenario(MID, Pause("gateway"), CORRECT, stands_for_others=True),
    Scenario(DECODING, Pause("gateway"), CORRECT),
    Scenario(BEFORE, Restart("prefill"), CORRECT),
    Scenario(MID, Restart("prefill"), CORRECT, DECODE_FELL_BACK, stands_for_others=True),
    Scenario(DECODING, Restart("prefill"), CORRECT),
    Scenario(BEFORE, Restart("decode"), EITHER),
    Scenario(MID, Restart("decode"), EITHER, (PREFILL_FAILED,)),
    Scenario(DECODING, Restart("decode"), ERROR, (STREAM_BROKE,)),
    Scenario(BEFORE, Restart("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(MID, Restart("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(DECODING, Restart("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(MID, OutliveDecode(), EITHER, (PREFILL_FAILED,)),
    Scenario(BEFORE, Leave(), NO_CLIENT, (CLIENT_LEFT,), stands_for_others=True),
    Scenario(MID, Leave(), NO_CLIENT, (CLIENT_LEFT,)),
    Scenario(DECODING, Leave(), NO_CLIENT, (CLIENT_LEFT, DECODE_CANCELLED)),
    Scenario(BEFORE, CutLink(), CORRECT),
    Scenario(MID, CutLink(), CORRECT, DECODE_FELL_BACK, stands_for_others=True),
    Scenario(DECODING, CutLink(), CORRECT),
    Scenario(BEFORE, CutData(), CORRECT),
    Scenario(MID, CutData(), CORRECT, stands_for_others=True),
    Scenario(DECODING, CutData(), CORRECT),
)


@pytest.mark.parametrize("scenario", to_params(SCENARIOS))
def test_matrix(cluster: ChaosCluster, scenario: Scenario) -> None:
    async def on_pair(session: aiohttp.ClientSession, pair: Pair) -> None:
        await play(cluster, session, pair, scenario)

    run_on_both(cluster, on_pair)


OF_EACH_MODE = (
    Scenario(PREFILLING, Kill("prefill"), CORRECT, (GATEWAY_FELL_BACK,)),
    Scenario(PREFILLING, Pause("prefill"), CORRECT),
    Scenario(PREFILLING, Restart("prefill"), CORRECT),
    Scenario(PREFILLING, Kill("decode"), ERROR, (REFUSED,)),
    Scenario(PREFILLING, Pause("decode"), CORRECT),
    Scenario(PREFILLING, Restart("decode"), EITHER),
    Scenario(PREFILLING, Kill("gateway"), BROKEN, (PREFILL_FAILED,)),
    Scenario(PREFILLING, Pause("gateway"), CORRECT),
    Scenario(PREFILLING, Leave(), NO_CLIENT, (CLIENT_LEFT,)),
    Scenario(PREFILLING, CutLink(), CORRECT),
)
WHILE_BORROWED = (
    Scenario(DECODING, Kill("prefill"), CORRECT, (SERVED,)),
    Scenario(DECODING, Pause("prefill"), CORRECT, (SERVED,)),
    Scenario(DECODING, Restart("prefill"), CORRECT, (SERVED,)),
    Scenario(DECODING, Kill("decode"), ERROR, (STREAM_BROKE,)),
    Scenario(DECODING, Pause("decode"), CORRECT, (SERVED,)),
    Scenario(DECODING, Restart("decode"), ERROR, (STREAM_BROKE,)),
    Scenario(DECODING, Kill("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(DECODING, Pause("gateway"), CORRECT),
    Scenario(DECODING, Leave(), NO_CLIENT, (CLIENT_LEFT, DECODE_CANCELLED)),
    Scenario(DECODING, CutLink(), CORRECT, (SERVED,)),
    Scenario(DECODING, CutData(), CORRECT, (SERVED,)),
)
"""By reference, decode attends over prefill's memory until the answer's end."""


@pytest.mark.every
@pytest.mark.parametrize("scenario", [pytest.param(one, id=one.name) for one in OF_EACH_MODE])
def test_pull(cluster: ChaosCluster, scenario: Scenario) -> None:
    play_in_mode("pull", cluster, cluster.pairs, scenario)


@pytest.mark.every
@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, id=one.name) for one in (*OF_EACH_MODE, *WHILE_BORROWED)],
)
def test_reference(cluster: ChaosCluster, scenario: Scenario) -> None:
    play_in_mode("reference", cluster, (cluster.pair("shared"),), scenario)


def play_in_mode(
    mode: str, cluster: ChaosCluster, pairs: tuple[Pair, ...], scenario: Scenario
) -> None:
    """The operator's mode, behind a gateway of its own; both workers know it."""

    async def on_pair(session: aiohttp.ClientSession, pair: Pair) -> None:
        usual, pair.mode = pair.gateway, mode
        await asyncio.to_thread(pair.start_gateway)
        try:
            await play(cluster, session, pair, scenario)
        finally:
            await asyncio.to_thread(pair.gateway.stop)
            pair.gateway, pair.mode = usual, "auto"

    run_on(pairs, on_pair)
