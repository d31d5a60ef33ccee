"""What `baton doctor --gateway` finds where a worker is down."""

from types import SimpleNamespace

import msgspec
import pytest

from baton.gateway.metrics import GatewayMetrics
from baton.ops.doctor.fleet import NUM_TRACES, check_counters, check_handoffs
from baton.protocol.worker_http import Role
from baton.testing.clocks import ManualClock


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("http://127.0.0.1:8101", "curl -sS http://127.0.0.1:8101/health"),
        # It asks for a certificate, which curl has not: the gateway shows why it is down.
        ("https://127.0.0.1:8101", "baton top --once --gateway 'http://g:1;x'"),
    ],
)
def test_how_to_look_at_a_worker_that_is_down(url, fix):
    metrics = GatewayMetrics()
    metrics.worker_up(url, Role.DECODE, up=False)
    gateway = SimpleNamespace(url="http://g:1;x", get=lambda _: (200, metrics.exposition()))
    assert check_counters(gateway)[0].fix == fix


def test_handoffs_are_judged_by_the_traces_that_were_read_in_time():
    clock, summary = ManualClock(), {"transport": "tcp", "expected_transport": "nixl"}
    started = clock.now()

    def get(path):
        if path == "/debug/requests":
            listed = [{"id": str(at)} for at in range(NUM_TRACES)]
            return 200, msgspec.json.encode({"requests": listed})
        clock.advance(2.0)  # as long as a gateway waits for a worker that is unreachable
        return 200, msgspec.json.encode({"summary": summary})

    (finding,) = check_handoffs(SimpleNamespace(url="http://g:1", get=get), clock)
    assert finding.name == "transport mismatch"
    assert finding.found.startswith(
        "2 of the latest 2 handoffs used tcp where nixl was expected (30 more requests were not"
    )
    assert clock.now() - started <= 4.0
