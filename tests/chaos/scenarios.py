"""A fault at a stage of a request, what may come of it, and how it is played.

A table of scenarios is a test (test_matrix.py, test_pool.py): a new failure is a line in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.chaos.checks import Inventory, Moved, Outcome, check_outcome
from tests.chaos.stages import Stage, reach

if TYPE_CHECKING:
    from collections.abc import Iterable

    import aiohttp

    from tests.chaos.conftest import ChaosCluster, Pair
    from tests.chaos.injections import Case, Injection

DECODE_FELL_BACK = (
    Moved("decode", "baton_handoffs_total", (("role", "decode"), ("result", "failed"))),
    Moved("decode", "baton_handoff_fallbacks_total"),
)
PREFILL_FAILED = Moved(
    "prefill", "baton_handoffs_total", (("role", "prefill"),), without=(("result", "completed"),)
)
"""Or was aborted by the gateway: whoever heard first of the end."""
GATEWAY_FELL_BACK = Moved("gateway", "baton_gateway_fallbacks_total")
CLIENT_LEFT = Moved("gateway", "baton_gateway_client_disconnects_total")
STREAM_BROKE = Moved("gateway", "baton_gateway_broken_streams_total")
DECODE_CANCELLED = Moved("decode", "baton_worker_requests_total", (("outcome", "cancelled"),))
PREFILL_CANCELLED = Moved("prefill", "baton_worker_requests_total", (("outcome", "cancelled"),))
SERVED = Moved("gateway", "baton_gateway_requests_total", (("code", "200"),))
REFUSED = Moved("gateway", "baton_gateway_requests_total", without=(("code", "200"),))

CORRECT, ERROR, BROKEN, NO_CLIENT = (
    Outcome.CORRECT,
    Outcome.ERROR,
    Outcome.BROKEN,
    Outcome.NO_CLIENT,
)
EITHER = Outcome.CORRECT_OR_ERROR


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


def to_params(scenarios: Iterable[Scenario]) -> list[object]:
    """Of a parametrized test: by default those run that stand for others."""
    return [
        pytest.param(one, id=one.name, marks=() if one.stands_for_others else pytest.mark.every)
        for one in scenarios
    ]


async def play(
    cluster: ChaosCluster, session: aiohttp.ClientSession, pair: Pair, scenario: Scenario
) -> Case:
    """One scenario on one pair."""
    await cluster.check_handoff(session, pair)
    inventory = Inventory(session)
    await inventory.take((pair.prefill, pair.decode), pair.gateway)
    case = await reach(scenario.stage, cluster, session, pair)
    proof = await scenario.injection.inject(case)
    await scenario.injection.settle(case)
    await check_outcome(case, scenario.outcome)
    await inventory.check_moved(case, scenario.moved)
    elapsed_s = await inventory.check_nothing_leaked(case)
    print(f"{pair.transport}: {proof}; all idle {elapsed_s:.2f} s after the request")
    return case
