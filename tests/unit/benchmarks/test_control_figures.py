"""Figures of the control path: differences and ratios within a round, and verdicts."""

import pytest

from benchmarks.control_figures import (
    GatewaySample,
    Sample,
    find_fleet_figures,
    find_gateway_figures,
    find_link_figures,
)
from benchmarks.control_load import is_whole


def sample(configuration, cpu_ms, *, num_tokens=32, concurrency=16, is_pinned=False, rate=100.0):
    return Sample(
        engine="embedded", configuration=configuration, num_tokens=num_tokens,
        concurrency=concurrency, is_pinned=is_pinned, num_requests=100, requests_per_s=rate,
        p50_ms=1e3 / rate, p99_ms=2e3 / rate,
        process_cpu_ms={"worker": cpu_ms - 0.5, "gateway": 0.5},
        thread_cpu_ms={}, thread_switches={},
        num_traced=32, num_handed_over=32, transports={"shared": 32},
    )  # fmt: skip


def gateway_sample(configuration, load, cpu_us):
    return GatewaySample(configuration, load, cpu_us, 5000.0, 3.0, 7.0, 0.9)


def figures_of(samples):
    return {figure.name: figure for figure in find_fleet_figures(samples)}


def test_a_handoff_costs_what_1p1d_takes_beyond_colocated_in_the_same_round():
    rounds = [
        sample("1P1D", 2.0), sample("colocated", 1.5),
        sample("colocated", 3.0), sample("1P1D", 3.7),
    ]  # fmt: skip
    figures = figures_of(rounds)
    adds = figures["CPU that a handoff adds, 32 tokens, 16 at once"]
    assert adds.values == pytest.approx((0.5, 0.7))
    assert (adds.median, adds.at_most, adds.is_reached) == (pytest.approx(0.6), 0.8, True)
    over = figures["the same over a colocated worker's CPU, 32 tokens, 16 at once"]
    assert over.values == pytest.approx((0.5, 0.28))
    assert over.is_reached is None


def test_one_at_a_time_shows_ttft_and_pinned_workers_show_the_rate():
    figures = figures_of([
        sample("1P1D", 9.0, concurrency=1, rate=100.0),
        sample("colocated", 3.0, concurrency=1, rate=200.0),
        sample("1P1D", 5.0, concurrency=64, is_pinned=True, rate=900.0),
        sample("colocated", 2.0, concurrency=64, is_pinned=True, rate=1000.0),
    ])
    ttft = figures["TTFT of 1P1D over colocated, 32 tokens, 1 at once"]
    assert (ttft.median, ttft.is_reached) == (2.0, False)
    name = "1P1D requests/s on two cores over one worker on one, 32 tokens, 64 at once"
    assert (figures[name].median, figures[name].is_reached) == (0.9, True)
    assert figures["CPU that a handoff adds, 32 tokens, 1 at once"].is_reached is None


def test_the_gateway_is_compared_with_each_other_router_of_the_run():
    samples = [
        gateway_sample(name, load, cpu_us)
        for name, cpu_us in (
            ("proxy", 100.0), ("baton, 2 workers", 150.0), ("baton, push", 300.0),
            ("vllm-router", 50.0),
        )
        for load in ("whole", "event")
    ]  # fmt: skip
    figures = {figure.name: figure for figure in find_gateway_figures(samples)}
    assert figures["push, CPU per request over proxy's"].median == 3.0
    assert figures["whole requests, CPU over vllm-router's"].median == 3.0
    assert not any("over baton" in name for name in figures)
    assert figures["push: requests/s on one core"].is_reached is False


def test_of_the_link_only_the_small_message_over_shared_counts():
    def row(name, workload):
        return {
            "name": name, "workload": {"name": workload}, "direction": "pull",
            "samples_s": [[8e-6, 9e-6, 20e-6], [7e-6]],
        }  # fmt: skip

    rows = [row("shared", "32 KiB"), row("memcpy", "32 KiB"), row("shared", "pages")]
    (figure,) = find_link_figures({"rows": rows})
    assert figure.values == pytest.approx((9.0, 7.0))
    assert figure.is_reached


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-le", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", True),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n", False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", True),
    ],
)
def test_an_answer_is_whole_by_its_length_or_its_last_chunk(answer, expected):
    assert is_whole(bytearray(answer)) is expected
