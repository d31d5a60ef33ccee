"""Every fault to everybody at every stage. A new failure is a line in `SCENARIOS`.

By default a few that stand for the others; all of them by `make chaos` (`--all-chaos`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.chaos.checks import Inventory, Moved, Outcome, check_outcome
from tests.chaos.conftest import House, Pair, run_on_both
from tests.chaos.injections import CutData, CutLink, Kill, Leave, OutliveDecode, Pause, Restart
from tests.chaos.stages import Stage, reach

if TYPE_CHECKING:
    import aiohttp

    from tests.chaos.injections import Injection

DECODE_FELL_BACK = (
    Moved("decode", "baton_handoffs_total", (("leg", "decode"), ("result", "failed"))),
    Moved("decode", "baton_handoff_fallbacks_total"),
)
PREFILL_FAILED = Moved(
    "prefill", "baton_handoffs_total", (("leg", "prefill"),), without=(("result", "completed"),)
)
"""Or was aborted by the gateway: whoever heard first of the end."""
GATEWAY_FELL_BACK = Moved("gateway", "baton_gateway_fallbacks_total")
CLIENT_LEFT = Moved("gateway", "baton_gateway_client_disconnects_total")
STREAM_BROKE = Moved("gateway", "baton_gateway_broken_streams_total")
DECODE_CANCELLED = Moved("decode", "baton_worker_requests_total", (("outcome", "cancelled"),))


SERVED = Moved("gateway", "baton_gateway_requests_total", (("code", "200"),))
REFUSED = Moved("gateway", "baton_gateway_requests_total", without=(("code", "200"),))

BEFORE, MID, DECODING = Stage.BEFORE_GRANT, Stage.MID_TRANSFER, Stage.DECODING


@dataclass(frozen=True)
class Scenario:
    """`injection` strikes at `stage`; then the client may see `outcome`, and counters moved.

    `stands_for_others`: it runs by default.
    """

    stage: Stage
    injection: Injection
    outcome: Outcome
    moved: tuple[Moved, ...] = ()
    stands_for_others: bool = False

    @property
    def name(self) -> str:
        what = type(self.injection).__name__.lower()
        whom = getattr(self.injection, "victim", "")
        return f"{what} {whom} {self.stage}".replace("  ", " ").replace(" ", "-")


RIGHT, ERROR, BROKEN, NOBODY = Outcome.RIGHT, Outcome.ERROR, Outcome.BROKEN, Outcome.NOBODY
EITHER = Outcome.RIGHT_OR_ERROR

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


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(one, id=one.name, marks=() if one.stands_for_others else pytest.mark.every)
        for one in SCENARIOS
    ],
)
def test_matrix(house: House, scenario: Scenario) -> None:
    async def on_pair(session: aiohttp.ClientSession, pair: Pair) -> None:
        await play(house, session, pair, scenario)

    run_on_both(house, on_pair)


PREFILLING = Stage.PREFILLING
MODES = ("pull", "reference")
OF_EACH_MODE = (
    Scenario(PREFILLING, Kill("prefill"), RIGHT, (GATEWAY_FELL_BACK,)),
    Scenario(PREFILLING, Pause("prefill"), RIGHT),
    Scenario(PREFILLING, Restart("prefill"), RIGHT),
    Scenario(PREFILLING, Kill("decode"), ERROR, (REFUSED,)),
    Scenario(PREFILLING, Pause("decode"), RIGHT),
    Scenario(PREFILLING, Leave(), NOBODY, (CLIENT_LEFT,)),
    Scenario(PREFILLING, CutLink(), RIGHT),
)


@pytest.mark.every
@pytest.mark.parametrize("scenario", [pytest.param(one, id=one.name) for one in OF_EACH_MODE])
@pytest.mark.parametrize("mode", MODES)
def test_other_modes(house: House, mode: str, scenario: Scenario) -> None:
    """The operator's mode, where both workers know it; a pair that does not takes another."""

    async def on_pair(session: aiohttp.ClientSession, pair: Pair) -> None:
        usual = pair.gateway
        await asyncio.to_thread(pair.start_gateway, mode=mode)
        try:
            await play(house, session, pair, scenario)
        finally:
            await asyncio.to_thread(pair.gateway.stop)
            pair.gateway = usual

    run_on_both(house, on_pair)


async def play(
    house: House, session: aiohttp.ClientSession, pair: Pair, scenario: Scenario
) -> None:
    """One scenario on one pair."""
    await house.check_handoff(session, pair)
    inventory = Inventory(session)
    await inventory.take((pair.prefill, pair.decode), pair.gateway)
    case = await reach(scenario.stage, house, session, pair)
    proof = await scenario.injection.strike(case)
    await scenario.injection.settle(case)
    await check_outcome(case, scenario.outcome)
    await inventory.check_moved(case, scenario.moved)
    elapsed_s = await inventory.check_nothing_leaked(case)
    print(f"{pair.transport}: {proof}; all idle {elapsed_s:.2f} s after the request")
