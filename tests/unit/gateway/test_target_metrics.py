"""Which requests count for a model's targets, and which of them missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import Instant
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.request_context import RequestContext
from baton.gateway.target_metrics import TargetMetrics
from baton.gateway.targets import NO_TARGETS, Targets, read_targets
from baton.ids import new_epoch
from baton.telemetry.trace import RequestSpan, Stamp

if TYPE_CHECKING:
    from collections.abc import Sequence

BOTH = Targets(ttft_s=1.0, tpot_s=0.1)


def ended(
    code: int,
    *,
    ttft_s: float | None = 0.5,
    num_streamed: int = 0,
    lasted_s: float = 1.0,
    gaps_s: Sequence[float] = (),
    wanted: Targets = BOTH,
) -> dict[str, tuple[int, int]]:
    """Requests and misses by objective, after one request."""
    registry = CollectorRegistry()
    counted = TargetMetrics(registry)
    span = RequestSpan(request_id="r", worker="gateway", epoch=new_epoch(), role="gateway")
    context = RequestContext(
        "r", "/", Instant(100.0), Instant(200.0), b"", span, GatewayMetrics().of("", "none")
    )
    context.model, context.num_streamed = "m", num_streamed
    if ttft_s is not None:
        span.stamp(Stamp.FIRST_TOKEN, Instant(100.0 + ttft_s))
    context.open_token_gaps().extend(gaps_s)
    for targets in (wanted, NO_TARGETS):
        context.model_targets = targets
        counted.ended(context, context.model, code, Instant(100.0 + lasted_s))
    for (model, objective), each in counted.totals.items():
        labels = {"model": model, "objective": objective}
        for name, value in (("requests", each.num), ("misses", each.num_missed)):
            assert registry.get_sample_value(f"baton_gateway_target_{name}_total", labels) == value
    return {name: (each.num, each.num_missed) for (_, name), each in counted.totals.items()}


@pytest.mark.parametrize(("ttft_s", "num_missed"), [(0.5, 0), (1.5, 1)])
def test_a_late_first_token_misses(ttft_s, num_missed):
    assert ended(200, ttft_s=ttft_s, lasted_s=2.0) == {"ttft": (1, num_missed)}


@pytest.mark.parametrize(("lasted_s", "num_missed"), [(1.39, 0), (1.41, 1)])
def test_slow_tokens_miss(lasted_s, num_missed):
    found = ended(200, num_streamed=10, lasted_s=lasted_s)
    assert found == {"ttft": (1, 0), "tpot": (1, num_missed)}


@pytest.mark.parametrize(
    ("gaps_s", "found"),
    [
        ([0.01] * 2, {}),  # too few to know
        ([0.01] * 3, {"itl": (1, 0)}),
        ([0.01, 0.3, 0.01], {"itl": (1, 1)}),
        ([0.01] * 99 + [0.3], {"itl": (1, 1)}),
        ([0.3] + [0.01] * 199, {"itl": (1, 0)}),
        ([0.3] * 3 + [0.01] * 197, {"itl": (1, 1)}),
    ],
)
def test_one_gap_of_a_hundred_may_be_longer(gaps_s, found):
    assert ended(200, gaps_s=gaps_s, wanted=Targets(itl_s=0.1)) == found


@pytest.mark.parametrize(("lasted_s", "found"), [(0.9, {"ttft": (1, 0)}), (30.0, {})])
def test_a_whole_answers_time_shows_no_late_first_token(lasted_s, found):
    assert ended(200, ttft_s=None, lasted_s=lasted_s) == found


def test_a_failure_misses_every_target():
    assert ended(503, ttft_s=None) == {"ttft": (1, 1), "tpot": (1, 1)}
    assert ended(503, ttft_s=None, wanted=Targets(itl_s=0.1)) == {"itl": (1, 1)}


@pytest.mark.parametrize("code", [400, 401, 404, 413, 429, 499])
def test_what_the_client_caused_does_not_count(code):
    assert ended(code) == {}


def test_headers_name_a_requests_own_targets():
    headers = [(b"x-baton-itl-ms", b"80"), (b"x-baton-tpot-ms", b"20.5"), (b"host", b"h")]
    assert read_targets(headers) == Targets(itl_s=0.08, tpot_s=0.0205)
