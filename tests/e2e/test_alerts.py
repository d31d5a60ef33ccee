"""Alerts of real fleets; what Prometheus' rules are made of exists there."""

from __future__ import annotations

import re
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import yaml

from baton.protocol.alerts import AlertList, AlertName, AlertState
from tests.e2e.client import TLS, ask_all, make_prompts

if TYPE_CHECKING:
    import ssl

    from tests.e2e.conftest import WorkerCluster

RULES = Path(__file__).parents[2] / "deploy/prometheus/rules.yaml"
MISMATCH_WITHIN_S = 30.0
SILENT_FOR_S = 1.0


def read(url: str, context: ssl.SSLContext = TLS) -> bytes:
    with urllib.request.urlopen(url, timeout=30, context=context) as reply:
        return reply.read()


def firing(gateway: str) -> set[tuple[AlertName, frozenset[tuple[str, str]]]]:
    page = msgspec.json.decode(read(f"{gateway}/alerts"), type=AlertList)
    return {
        (each.alert, frozenset(each.labels.items()))
        for each in page.alerts
        if each.state is AlertState.FIRING
    }


def test_tcp_between_two_workers_of_one_host_is_a_mismatch(cluster: WorkerCluster) -> None:
    """They share memory, and were configured for TCP alone; the others use what they share."""
    wanted = (
        AlertName.TRANSPORT_MISMATCH,
        frozenset(
            {"expected": "shared", "from": "tcp-prefill", "to": "tcp-decode", "used": "tcp"}.items()
        ),
    )
    for gateway in (cluster.tcp_gateway, cluster.shared_gateway):
        ask_all(gateway.url, make_prompts(4, seed=19))
    deadline = time.monotonic() + MISMATCH_WITHIN_S
    while wanted not in firing(cluster.tcp_gateway.url):
        assert time.monotonic() < deadline, firing(cluster.tcp_gateway.url)
        time.sleep(0.2)
    time.sleep(SILENT_FOR_S)
    assert AlertName.TRANSPORT_MISMATCH not in dict(firing(cluster.shared_gateway.url))


def test_metrics_of_workers_that_prometheus_rules_name_exist(cluster: WorkerCluster) -> None:
    """Those of the gateway: `tests/integration/test_alerts.py`."""
    rules = yaml.safe_load(RULES.read_text("utf-8"))["groups"][0]["rules"]
    named = {name for rule in rules for name in re.findall(r"\bbaton_\w+", rule["expr"])}
    of_workers = {name for name in named if name.startswith(("baton_handoff_", "baton_link_"))}
    assert len(of_workers) >= 4
    text = read(f"{cluster.prefill.url}/metrics").decode()
    assert of_workers <= set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
