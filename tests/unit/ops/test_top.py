"""Rates and latencies of `baton top`, and its rows, without a terminal."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.metrics import GatewayMetrics
from baton.ops.gateway_pages import PageError
from baton.ops.top.pages import (
    FleetStore,
    FleetTier,
    HandoffFigures,
    Load,
    PairHandoffs,
    PairSegments,
    Quantiles,
    Request,
    RequestsPage,
    SegmentFigures,
    TierFigures,
    TransfersPage,
    Worker,
    WorkersPage,
)
from baton.ops.top.snapshot import FleetSnapshot
from baton.ops.top.tables import describe_traffic, make_tables
from baton.ops.top.window import TrafficWindow, compute_quantile, read_metrics
from baton.telemetry.metrics import FIRST_TOKEN_EDGES_S


def serve(metrics, num_requests, ttft_s, code=200):
    instruments = metrics.of("demo", "push")
    for _ in range(num_requests):
        instruments.count(code)
        instruments.time_to_first_token.observe(ttft_s)
        instruments.inter_token_latency.observe(ttft_s / 10)


def test_a_minute_of_a_gateways_own_metrics():
    metrics, window = GatewayMetrics(), TrafficWindow()
    serve(metrics, 100, 0.05)
    first = window.add(read_metrics(metrics.exposition(), 10.0))
    assert (first.window_s, first.num_requests, first.requests_per_s) == (None, 100, None)
    assert 0.04 <= first.ttft.p50_s <= 0.06
    serve(metrics, 20, 0.5)
    serve(metrics, 10, 0.5, code=503)
    second = window.add(read_metrics(metrics.exposition(), 20.0))
    assert (second.window_s, second.num_requests, second.num_failed) == (10.0, 30, 10)
    assert second.requests_per_s == 3.0
    assert 0.25 <= second.ttft.p50_s <= 0.5, "the 100 of before do not count"
    assert 0.025 < second.itl.p99_s <= 0.05
    quiet = [window.add(read_metrics(metrics.exposition(), 20.0 + s)) for s in range(1, 71)]
    assert quiet[-1].num_requests == 0
    assert quiet[-1].ttft.p50_s is None
    assert 60.0 <= quiet[-1].window_s <= 61.0


def test_a_gateway_that_was_started_again():
    metrics, window = GatewayMetrics(), TrafficWindow()
    serve(metrics, 100, 0.05)
    window.add(read_metrics(metrics.exposition(), 10.0))
    metrics = GatewayMetrics()
    serve(metrics, 5, 0.05)
    traffic = window.add(read_metrics(metrics.exposition(), 11.0))
    assert (traffic.window_s, traffic.num_requests) == (None, 5)


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"<html>", b"up 1\n"])
def test_what_is_no_gateways_page(body):
    with pytest.raises(PageError, match="gateway's URL"):
        read_metrics(body, 0.0)


@pytest.mark.parametrize(
    "line",
    [
        "baton_gateway_requests_total NaN",
        "baton_gateway_requests_total +Inf",
        "baton_gateway_time_to_first_token_seconds_bucket 3",
        'baton_gateway_time_to_first_token_seconds_bucket{le="soon"} 3',
        'baton_gateway_time_to_first_token_seconds_bucket{le="NaN"} 3',
    ],
)
def test_figures_that_no_gateway_has(line):
    with pytest.raises(PageError, match="Prometheus's format"):
        read_metrics(f"{line}\n".encode(), 0.0)


def test_a_damaged_page():
    with pytest.raises(PageError):
        read_metrics(b'baton_gateway_requests_total{code="200} 1\n', 0.0)


@given(
    st.lists(st.floats(0.0011, 2000), min_size=1, max_size=200),
    st.sampled_from([0.5, 0.9, 0.99]),
)
def test_a_quantile_is_in_the_bucket_of_the_true_one(values, share):
    edges = (*FIRST_TOKEN_EDGES_S, math.inf)
    buckets = {edge: float(sum(value <= edge for value in values)) for edge in edges}
    found = compute_quantile(buckets, share)
    true = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    above = min(edge for edge in edges if edge >= true)
    below = max((edge for edge in edges if edge < true), default=0.0)
    assert below <= found <= above


def snapshot(**parts):
    whole = {
        "gateway": "http://127.0.0.1:8000",
        "at": 0.0,
        "state": "ready",
        "missing": {},
        **dict.fromkeys((
            "traffic",
            "workers",
            "queue",
            "transfers",
            "links",
            "alerts",
            "requests",
        )),
    }
    return FleetSnapshot(**{**whole, **parts})


def table(of, title):
    return next(each for each in make_tables(of) if each.title.startswith(title))


def test_text_of_others_cannot_steer_a_terminal():
    hostile = "\x1b[2J\x1b]0;x\x07a\nb[bold]"
    of = snapshot(
        workers=WorkersPage(
            (Worker(hostile, hostile, "down", hostile, hostile * 50),), (hostile * 50,)
        ),
        requests=RequestsPage((Request(hostile, 200, hostile, None),)),
        state=hostile,
        missing={"/metrics": hostile, "/alerts": hostile},
    )
    text = [*describe_traffic(of)]
    for each in make_tables(of):
        text += [each.note, *(cell for row in each.rows.values() for cell in row)]
    assert all(line.isprintable() for line in text)
    assert max(map(len, text)) < 300
    assert "not shown" in table(of, "alerts").note


def test_a_source_of_workers_that_fails_is_shown_beside_the_workers_that_stay():
    problem = "dns://w: cannot be read (refused)"
    of = snapshot(workers=WorkersPage((Worker("http://w", "both", "up"),), (problem,)))
    assert [line for line in describe_traffic(of) if problem in line]
    assert not [line for line in describe_traffic(snapshot()) if "source" in line]


def test_workers_are_sorted_by_what_they_have_to_do():
    workers = tuple(
        Worker(
            f"http://w{n}", "both", "up", f"w{n}", load=Load(n % 3, 100, 100 - n), health="healthy"
        )
        for n in range(5)
    )
    of = snapshot(workers=WorkersPage(workers))
    orders = [[row[0] for row in make_tables(of, sort)[1].rows.values()] for sort in range(3)]
    assert orders[0] == ["w0", "w1", "w2", "w3", "w4"]
    assert orders[1] == ["w2", "w1", "w4", "w0", "w3"]
    assert orders[2] == ["w4", "w3", "w2", "w1", "w0"]
    assert [row[7] for row in make_tables(of)[1].rows.values()][:2] == ["100% of 100", "99% of 100"]


def test_what_a_pair_has_lost_is_beside_its_handoffs():
    none = Quantiles()
    figures = HandoffFigures(1, 4096, none, none, none)
    labels = ("same_rack", "tcp", "push", "WRITE")
    pairs = tuple(PairHandoffs("p", name, *labels, figures, figures) for name in ("d", "e"))
    sent = (
        PairSegments("p", "d", "tcp", SegmentFigures(0.0123)),
        PairSegments("d", "p", "tcp", SegmentFigures(0.5)),
        PairSegments("p", "e", "tcp", SegmentFigures(None)),
    )
    shown = table(snapshot(transfers=TransfersPage(60.0, pairs, sent)), "handoffs")
    lost = [column.title for column in shown.columns].index("lost")
    assert [row[lost] for row in shown.rows.values()] == ["1.23%", "-"]


def test_tiers_of_the_store():
    assert table(snapshot(), "tiers").note == "none"
    total, recent = TierFigures(90, 10, 4 << 30, 1 << 30, 0.9), TierFigures(1, 3, 4096, 0, 0.25)
    host = FleetTier("host", 2, 1 << 30, 4 << 30, total, recent)
    redis = FleetTier("redis", 2, 5 << 20, 0, total, TierFigures(0, 0, 0, 0), num_unavailable=1)
    of = snapshot(transfers=TransfersPage(60.0, store=FleetStore((host, redis))))
    shown = table(of, "tiers of the store, last 60 s").rows
    assert shown["host"] == (
        "host", "2", "25% of 4 GiB", "1", "3", "25%", "90%", "4 KiB", "0 B",
    )  # fmt: skip
    assert shown["redis"][1:6] == ("2, 1 cannot reach it", "5 MiB", "0", "0", "-")
