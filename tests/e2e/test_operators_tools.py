"""Grafana's board, `baton debug bundle` and `baton top`, against real workers and gateways."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import tarfile
import time
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families

from baton.auth.issuing import Order, issue, issue_derived
from baton.testing.fleet import Fleet
from scripts.grafana_board import BOARD, ROWS, make_board, to_text
from tests.e2e.client import KEY, TLS, ask_all, make_prompts
from tests.forked_module import run_forked
from tests.preloaded import start_preloaded
from tests.prometheus_server import PROGRAM, Job, prometheus

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator
    from pathlib import Path

    from baton.testing.fleet import FleetProcess
    from tests.e2e.conftest import WorkerCluster

PANELS = [panel for row in ROWS for panel in row.panels]
QUERIES = [(panel.title, query) for panel in PANELS for query in panel.queries]
SELECTOR = re.compile(r"\b(baton_\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\b(?:by|ignoring) \(([^)]*)\)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")
SUFFIXES = ("_bucket", "_count", "_sum")
TIMEOUT_S = 100


@dataclass(frozen=True)
class Watched:
    """A gateway that looks at caches, the workers behind it, and one that an intruder tried."""

    gateway: FleetProcess
    workers: tuple[FleetProcess, ...]
    environment: dict[str, str]


@pytest.fixture(scope="module", name="watched")
def watched_fixture(
    cluster: WorkerCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY.key.secret.hex())
    environment["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    with Fleet(tmp_path_factory.mktemp("logs"), environment, start=start_preloaded) as fleet:
        settings = {
            "security.tls": "control",
            "gateway.mode": "push",
            "router.policy": "prefix",
        }
        gateway = fleet.start_gateway([cluster.prefill], [cluster.decode], settings=settings)
        answers = ask_all(gateway.url, make_prompts(6, seed=19, longest=400))
        assert all(answer.tokens for answer in answers)
        # Links are measured between these two, and none between the others.
        ask_all(cluster.tcp_gateway.url, make_prompts(2, seed=19, longest=400))
        intrude(cluster.colocated)
        yield Watched(gateway, (cluster.prefill, cluster.decode, cluster.colocated), environment)
        assert set(fleet.stop().values()) == {0}


def fetch(url: str, tls: ssl.SSLContext = TLS) -> str:
    with urllib.request.urlopen(url, timeout=30, context=tls) as reply:
        return reply.read().decode()


def intrude(worker: FleetProcess) -> None:
    """Connect to where peers hand over, without a proof: the worker counts a warning."""
    address = json.loads(fetch(f"{worker.url}/baton/v1/info"))["handoff_address"]
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as intruder:
        intruder.sendall(b"x" * 4096)
        deadline = time.monotonic() + 30
        while "baton_warnings_total{" not in fetch(f"{worker.url}/metrics"):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def read_families(url: str, tls: ssl.SSLContext = TLS) -> dict[str, set[str]]:
    """Names of samples, each with the labels that some of its series have."""
    text = fetch(f"{url}/metrics", tls)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module", name="live")
def live_fixture(watched: Watched, cluster: WorkerCluster) -> dict[str, set[str]]:
    families = [read_families(each.url) for each in (watched.gateway, *watched.workers)]
    families.append(read_families(cluster.tcp_prefill.url, cluster.tcp_client))
    found: dict[str, set[str]] = {}
    for name, labels in (item for each in families for item in each.items()):
        found.setdefault(name, set()).update(labels)
    return found


def assert_kept(given: object, found: object) -> None:
    if isinstance(given, dict):
        assert given.keys() <= found.keys(), given.keys() - found.keys()
        for name, value in given.items():
            assert_kept(value, found[name])
    elif isinstance(given, list):
        assert len(given) == len(found)
        for one, other in zip(given, found, strict=True):
            assert_kept(one, other)
    else:
        assert given == found


def test_the_board_is_the_one_that_the_panels_make() -> None:
    assert BOARD.read_text("utf-8") == to_text(make_board()), "run scripts/grafana_board.py"
    panels = make_board()["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not covered & cells, f"{panel['title']} lies on another panel"
        assert place["x"] + place["w"] <= 24
        cells |= covered
        if panel["type"] != "row":
            assert panel["description"]
    # Grafana's own types read it, lose nothing of it, and add defaults.
    register_default_plugins()
    read = Dashboard.from_json(make_board())
    assert_kept(make_board(), json.loads(JSONEncoder().encode(read)))
    assert "instance" not in BOARD.read_text("utf-8"), "a worker that starts again is a new line"


def test_the_panel_of_cached_tokens_explains_each_of_its_lines() -> None:
    (panel,) = (each for each in PANELS if "cached_tokens" in each.queries[0].expr)
    for kind in ("predicted", "actual", "found"):
        assert f"{kind}:" in panel.text


@pytest.mark.parametrize("number", range(len(QUERIES)), ids=lambda n: f"{n}-{QUERIES[n][0]}")
def test_names_and_labels_of_the_board_are_live(number: int, live: dict[str, set[str]]) -> None:
    _, query = QUERIES[number]
    selectors = SELECTOR.findall(query.expr)
    assert selectors
    available: set[str] = set()
    for name, given in selectors:
        assert name in live, f"no gateway and no worker has {name}"
        wanted = {part.partition("=")[0].rstrip("!") for part in given.split('",') if part}
        assert wanted <= live[name], f"{name} has the labels {live[name]}"
        available |= live[name]
    for group in GROUPED.findall(query.expr):
        assert {label.strip() for label in group.split(",")} <= available
    assert set(LEGEND.findall(query.legend)) <= available


@pytest.mark.skipif(PROGRAM is None, reason="Debian's package prometheus is not installed")
def test_prometheus_answers_every_query_of_the_board(
    watched: Watched, cluster: WorkerCluster, tmp_path: Path
) -> None:
    issue_derived(Order("monitor", "prometheus"), [KEY.key], tmp_path / "derived")
    issue(Order("monitor", "prometheus"), cluster.authority, tmp_path / "issued")
    by_scheme: dict[str, list[str]] = {"http": [], "https": []}
    for worker in watched.workers:
        scheme, _, address = worker.url.partition("://")
        by_scheme[scheme].append(address)
    jobs = [
        Job("gateways", [watched.gateway.url.removeprefix("http://")]),
        Job("workers", by_scheme["http"]),
        Job("workers-tls", by_scheme["https"], tmp_path / "derived"),
        Job("tcp", [cluster.tcp_prefill.url.removeprefix("https://")], tmp_path / "issued"),
    ]
    with prometheus(tmp_path, jobs) as server:
        targets = 2 + len(watched.workers)
        server.wait_for(f"sum(max_over_time(up[1m])) == {targets}")
        for gateway in (watched.gateway, cluster.pool_gateway, cluster.tcp_gateway):
            ask_all(gateway.url, make_prompts(8, seed=23, longest=400))
        server.wait_for("sum(rate(baton_gateway_requests_total[20s])) > 0")
        server.wait_for('sum(rate(baton_handoffs_total{result="completed"}[20s])) > 0')
        server.wait_for("sum(rate(baton_store_leases_total[20s])) > 0")
        server.wait_for("sum(rate(baton_link_segments_total[20s])) > 0")
        empty = [
            f"{title}: {query.expr}"
            for title, query in QUERIES
            if not server.query(_fill_in(query.expr))
        ]
    assert empty == []


def _fill_in(expr: str) -> str:
    """Grafana's variables, as the board has them at first."""
    filled = expr.replace("$__rate_interval", "20s").replace("$model", ".*")
    assert "$" not in filled
    return filled


def test_a_bundle_has_the_metrics_of_workers_with_tls(watched: Watched, tmp_path: Path) -> None:
    output = tmp_path / "bundle.tar.gz"
    command = [sys.executable, "-m", "baton.cli", "debug", "bundle", "--no-doctor"]
    command += ["--gateway", watched.gateway.url, "-o", str(output)]
    done = run_forked(command, watched.environment, TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    with tarfile.open(output) as archive:
        files = {entry.name: archive.extractfile(entry).read().decode() for entry in archive}
    for number in range(2):
        metrics = files[f"baton-bundle/gateway-0/workers/{number:03}-metrics.txt"]
        assert "baton_handoffs_total{" in metrics
    traces = [json.loads(text) for name, text in files.items() if "/requests/0" in name]
    # On a busy machine one may have been computed by the decode worker after all.
    handed = [trace for trace in traces if trace["summary"]["transport"] == "shared"]
    assert handed[0]["decode"]["stamps"]["kv_ready"] > 0
    assert KEY.key.secret.hex() not in "".join(files.values())


def test_a_gateway_shows_its_workers_tiers(watched: Watched, cluster: WorkerCluster) -> None:
    url = cluster.pool_gateway.url
    ask_all(url, make_prompts(8, seed=31, longest=400))
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        store = json.loads(fetch(f"{url}/debug/transfers"))["store"]
        if any(tier["total"]["num_hits"] for tier in store["tiers"]):
            break
        assert time.monotonic() < deadline, store
        time.sleep(0.2)
    (tier,) = store["tiers"]
    assert tier["tier"] == "shared"
    assert 0 < tier["used_bytes"] <= tier["capacity_bytes"]
    assert tier["total"]["read_bytes"] > 0
    assert 0 < tier["total"]["hit_share"] <= 1
    workers = {each["worker"] for each in store["worker_tiers"]}
    assert tier["fullest"] in workers
    assert tier["num_workers"] == len(workers) == 2
    command = [sys.executable, "-m", "baton.cli", "top", "--gateway", url, "--once"]
    text = run_forked(command, watched.environment, TIMEOUT_S).stdout
    assert re.search(r"\bshared +2 +\d+% of ", text)


def test_top_shows_workers_and_handoffs(watched: Watched) -> None:
    command = [sys.executable, "-m", "baton.cli", "top", "--gateway", watched.gateway.url]
    done = run_forked([*command, "--json"], watched.environment, TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    snapshot = json.loads(done.stdout)
    assert {each["worker"] for each in snapshot["workers"]["workers"]} == {"prefill", "decode"}
    assert all(each["load"]["num_free_blocks"] > 0 for each in snapshot["workers"]["workers"])
    assert snapshot["traffic"]["num_requests"] >= 6
    assert snapshot["transfers"]["window_s"] > 0
    text = run_forked([*command, "--once"], watched.environment, TIMEOUT_S).stdout
    assert re.search(r"\bprefill +prefill +healthy\b", text)


def test_an_answer_in_one_piece_has_its_workers_first_token(watched: Watched) -> None:
    url, body = watched.gateway.url, {"model": "demo", "prompt": "one piece", "max_tokens": 64}
    headers = {"content-type": "application/json", "x-request-id": "whole"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] > 1
    command = [sys.executable, "-m", "baton.cli", "explain", "whole", "--gateway", url, "--json"]
    trace = json.loads(run_forked(command, watched.environment, TIMEOUT_S).stdout)
    own, decode = trace["gateway"]["stamps"], trace["decode"]["stamps"]  # all on one clock
    assert decode["first_token"] <= own["first_token"] < decode["finished"] <= own["finished"]
