from __future__ import annotations

import logging

from baton.clock import Instant
from baton.gateway.fallbacks import FallbackCause
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.request_context import LOG_AGAIN_AFTER_S, Fallbacks, RequestContext
from baton.ids import RequestId
from baton.telemetry.trace import RequestSpan
from baton.testing.clocks import ManualClock


def test_each_is_counted_and_traced_but_a_cause_is_logged_once_in_a_while(caplog):
    metrics, clock = GatewayMetrics(), ManualClock()
    fallbacks = Fallbacks(metrics, clock)
    context = RequestContext(
        id=RequestId("r"),
        path="/v1/completions",
        received_at=Instant(0.0),
        deadline=Instant(1.0),
        forwarded_headers=b"",
        trace=RequestSpan(request_id="r", worker="gateway", epoch="e", role="gateway"),
        metrics=metrics.of("", "none"),
    )
    with caplog.at_level(logging.WARNING):
        for cause in (FallbackCause.PREFILL_LOST, FallbackCause.PREFILL_LOST):
            fallbacks.note(context, cause, "gone")
        fallbacks.note(context, FallbackCause.DECODE_LOST, "gone too")
        clock.advance(LOG_AGAIN_AFTER_S)
        fallbacks.note(context, FallbackCause.PREFILL_LOST, "gone again")
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "falling back (prefill_lost)",
        "falling back (decode_lost)",
        "falling back (prefill_lost)",
    ]
    assert len(context.trace.fallbacks) == 4
    sample = metrics.registry.get_sample_value
    assert sample("baton_gateway_fallbacks_total", {"cause": "prefill_lost"}) == 3
