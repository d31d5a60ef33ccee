"""Every fault to everybody at every stage. A new failure is a line in `SCENARIOS`.

By default a few that stand for the others; all of them by `make chaos` (`--all-chaos`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.chaos.conftest import House, Pair, run_on, run_on_both
from tests.chaos.injections import CutData, CutLink, Kill, Leave, OutliveDecode, Pause, Restart
from tests.chaos.scenarios import (
    BROKEN,
    CLIENT_LEFT,
    DECODE_CANCELLED,
    DECODE_FELL_BACK,
    EITHER,
    ERROR,
    GATEWAY_FELL_BACK,
    NOBODY,
    PREFILL_FAILED,
    REFUSED,
    RIGHT,
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
    Scenario(BEFORE, Kill("prefill"), RIGHT, (*DECODE_FELL_BACK, GATEWAY_FELL_BACK)),
    Scenario(MID, Kill("prefill"), RIGHT, (*DECODE_FELL_BACK, GATEWAY_FELL_BACK)),
    Scenario(DECODING, Kill("prefill"), RIGHT, (SERVED,)),
    Scenario(BEFORE, Kill("decode"), ERROR, (REFUSED,)),
    Scenario(MID, Kill("decode"), ERROR, (PREFILL_FAILED, REFUSED)),
    Scenario(DECODING, Kill("decode"), ERROR, (STREAM_BROKE,)),
    Scenario(BEFORE, Kill("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(MID, Kill("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(DECODING, Kill("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(BEFORE, Pause("prefill"), RIGHT, DECODE_FELL_BACK),
    Scenario(MID, Pause("prefill"), RIGHT, DECODE_FELL_BACK),
    Scenario(DECODING, Pause("prefill"), RIGHT, stands_for_others=True),
    Scenario(BEFORE, Pause("decode"), RIGHT),
    Scenario(MID, Pause("decode"), RIGHT, (PREFILL_FAILED,)),
    Scenario(DECODING, Pause("decode"), RIGHT),
    Scenario(BEFORE, Pause("gateway"), RIGHT),
    Scenario(MID, Pause("gateway"), RIGHT, stands_for_others=True),
    Scenario(DECODING, Pause("gateway"), RIGHT),
    Scenario(BEFORE, Restart("prefill"), RIGHT),
    Scenario(MID, Restart("prefill"), RIGHT, DECODE_FELL_BACK, stands_for_others=True),
    Scenario(DECODING, Restart("prefill"), RIGHT),
    Scenario(BEFORE, Restart("decode"), EITHER),
    Scenario(MID, Restart("decode"), EITHER, (PREFILL_FAILED,)),
    Scenario(DECODING, Restart("decode"), ERROR, (STREAM_BROKE,)),
    Scenario(BEFORE, Restart("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(MID, Restart("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(DECODING, Restart("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(MID, OutliveDecode(), EITHER, (PREFILL_FAILED,)),
    Scenario(BEFORE, Leave(), NOBODY, (CLIENT_LEFT,), stands_for_others=True),
    Scenario(MID, Leave(), NOBODY, (CLIENT_LEFT,)),
    Scenario(DECODING, Leave(), NOBODY, (CLIENT_LEFT, DECODE_CANCELLED)),
    Scenario(BEFORE, CutLink(), RIGHT),
    Scenario(MID, CutLink(), RIGHT, DECODE_FELL_BACK, stands_for_others=True),
    Scenario(DECODING, CutLink(), RIGHT),
    Scenario(BEFORE, CutData(), RIGHT),
    Scenario(MID, CutData(), RIGHT, stands_for_others=True),
    Scenario(DECODING, CutData(), RIGHT),
)


@pytest.mark.parametrize("scenario", to_params(SCENARIOS))
def test_matrix(house: House, scenario: Scenario) -> None:
    async def on_pair(session: aiohttp.ClientSession, pair: Pair) -> None:
        await play(house, session, pair, scenario)

    run_on_both(house, on_pair)


OF_EACH_MODE = (
    Scenario(PREFILLING, Kill("prefill"), RIGHT, (GATEWAY_FELL_BACK,)),
    Scenario(PREFILLING, Pause("prefill"), RIGHT),
    Scenario(PREFILLING, Restart("prefill"), RIGHT),
    Scenario(PREFILLING, Kill("decode"), ERROR, (REFUSED,)),
    Scenario(PREFILLING, Pause("decode"), RIGHT),
    Scenario(PREFILLING, Restart("decode"), EITHER),
    Scenario(PREFILLING, Kill("gateway"), BROKEN, (PREFILL_FAILED,)),
    Scenario(PREFILLING, Pause("gateway"), RIGHT),
    Scenario(PREFILLING, Leave(), NOBODY, (CLIENT_LEFT,)),
    Scenario(PREFILLING, CutLink(), RIGHT),
)
WHILE_BORROWED = (
    Scenario(DECODING, Kill("prefill"), RIGHT, (SERVED,)),
    Scenario(DECODING, Pause("prefill"), RIGHT, (SERVED,)),
    Scenario(DECODING, Restart("prefill"), RIGHT, (SERVED,)),
    Scenario(DECODING, Kill("decode"), ERROR, (STREAM_BROKE,)),
    Scenario(DECODING, Pause("decode"), RIGHT, (SERVED,)),
    Scenario(DECODING, Restart("decode"), ERROR, (STREAM_BROKE,)),
    Scenario(DECODING, Kill("gateway"), BROKEN, (DECODE_CANCELLED,)),
    Scenario(DECODING, Pause("gateway"), RIGHT),
    Scenario(DECODING, Leave(), NOBODY, (CLIENT_LEFT, DECODE_CANCELLED)),
    Scenario(DECODING, CutLink(), RIGHT, (SERVED,)),
    Scenario(DECODING, CutData(), RIGHT, (SERVED,)),
)
"""By reference, decode attends over prefill's memory until the answer's end."""


@pytest.mark.every
@pytest.mark.parametrize("scenario", [pytest.param(one, id=one.name) for one in OF_EACH_MODE])
def test_pull(house: House, scenario: Scenario) -> None:
    play_in_mode("pull", house, house.pairs, scenario)


@pytest.mark.every
@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, id=one.name) for one in (*OF_EACH_MODE, *WHILE_BORROWED)],
)
def test_reference(house: House, scenario: Scenario) -> None:
    play_in_mode("reference", house, (house.pair("shared"),), scenario)


def play_in_mode(mode: str, house: House, pairs: tuple[Pair, ...], scenario: Scenario) -> None:
    """The operator's mode, behind a gateway of its own; both workers know it."""

    async def on_pair(session: aiohttp.ClientSession, pair: Pair) -> None:
        usual, pair.mode = pair.gateway, mode
        await asyncio.to_thread(pair.start_gateway)
        try:
            await play(house, session, pair, scenario)
        finally:
            await asyncio.to_thread(pair.gateway.stop)
            pair.gateway, pair.mode = usual, "auto"

    run_on(pairs, on_pair)
