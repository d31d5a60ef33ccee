"""What `baton doctor --gateway` suggests where a worker is down."""

from types import SimpleNamespace

import pytest

from baton.gateway.metrics import GatewayMetrics
from baton.ops.doctor.fleet import check_counters
from baton.protocol.worker_http import Role


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
