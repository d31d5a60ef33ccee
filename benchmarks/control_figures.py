"""Samples of the control path, and the figures made of them, each with its target. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_CPU_MS = {
    ("embedded", 32): 0.8, ("embedded", 128): 1.0, ("embedded", 512): 1.5,
    ("vllm", 32): 1.5, ("vllm", 128): 1.5, ("vllm", 512): 2.5,
}  # fmt: skip
"""That a handoff adds, TARGET_CONCURRENCY at once, by engine and prompt tokens."""
MOST_TTFT_RATIO = {
    ("embedded", 32): 1.3, ("embedded", 128): 1.15, ("vllm", 32): 1.4, ("vllm", 128): 1.3,
}  # fmt: skip
LEAST_THROUGHPUT_RATIO = {"embedded": 0.85}
TARGET_CONCURRENCY = 16
PUSH, WHOLE = "baton, push", "baton, 2 workers"
TLS = ", TLS"
"""Behind the name of a configuration: with TLS between gateway and workers."""


@dataclass(frozen=True)
class Sample:
    """One load on one fleet. CPU in milliseconds per request."""

    engine: str
    configuration: str
    num_tokens: int
    concurrency: int
    is_pinned: bool
    num_requests: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    process_cpu_ms: dict[str, float]
    thread_cpu_ms: dict[str, float]
    """By `process/thread`; threads of one name are added up."""
    thread_switches: dict[str, float]
    """Voluntary context switches per request, by the same names."""
    num_traced: int
    num_handed_over: int
    """Of the traced requests: those whose KV decode received, all of it that it needed."""
    transports: dict[str, int]
    """That moved it: number of traced requests."""

    @property
    def cpu_ms(self) -> float:
        """Of all processes."""
        return sum(self.process_cpu_ms.values())

    @property
    def num_switches(self) -> float:
        """Voluntary context switches per request, of all threads."""
        return sum(self.thread_switches.values())


@dataclass(frozen=True)
class GatewaySample:
    """One load on one gateway. Latencies of requests; None where the load was streams."""

    configuration: str
    load: str
    cpu_us: float
    requests_per_s: float | None
    p50_ms: float | None
    p99_ms: float | None
    busy_share: float
    """CPU time over wall time: 1.0 is its whole core."""


@dataclass(frozen=True)
class Figure:
    """One row: its value in each round, and the target, if there is one."""

    group: str
    name: str
    unit: str
    values: tuple[float, ...]
    at_most: float | None = None
    at_least: float | None = None

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.values)

    @property
    def is_reached(self) -> bool | None:
        """Whether the median is where it should be; None without a target."""
        if self.at_most is not None:
            return self.median <= self.at_most
        return None if self.at_least is None else self.median >= self.at_least


def find_fleet_figures(samples: list[Sample]) -> Iterator[Figure]:
    """What 1P1D costs against colocated, round by round."""
    cells = {(s.engine, s.num_tokens, s.concurrency, s.is_pinned): None for s in samples}
    for engine, num_tokens, concurrency, is_pinned in cells:
        rounds = _pair(samples, (engine, num_tokens, concurrency, is_pinned))
        words = f"{num_tokens} tokens, {concurrency} at once"
        if is_pinned:
            yield Figure(
                engine, f"1P1D requests/s on two cores over one worker on one, {words}", "ratio",
                tuple(a.requests_per_s / b.requests_per_s for a, b in rounds),
                at_least=LEAST_THROUGHPUT_RATIO.get(engine),
            )  # fmt: skip
            continue
        is_target = concurrency == TARGET_CONCURRENCY
        yield Figure(
            engine, f"CPU that a handoff adds, {words}", "ms",
            tuple(a.cpu_ms - b.cpu_ms for a, b in rounds),
            at_most=MOST_CPU_MS[engine, num_tokens] if is_target else None,
        )  # fmt: skip
        if is_target:
            yield Figure(
                engine, f"the same over a colocated worker's CPU, {words}", "ratio",
                tuple((a.cpu_ms - b.cpu_ms) / b.process_cpu_ms["worker"] for a, b in rounds),
            )  # fmt: skip
        if concurrency == 1:
            yield Figure(
                engine, f"TTFT of 1P1D over colocated, {words}", "ratio",
                tuple(a.p50_ms / b.p50_ms for a, b in rounds),
                at_most=MOST_TTFT_RATIO.get((engine, num_tokens)),
            )  # fmt: skip


def _pair(samples: list[Sample], cell: tuple[object, ...]) -> list[tuple[Sample, Sample]]:
    """1P1D and colocated of each round of one cell."""
    here = [s for s in samples if (s.engine, s.num_tokens, s.concurrency, s.is_pinned) == cell]
    return list(
        zip(
            (s for s in here if s.configuration == "1P1D"),
            (s for s in here if s.configuration == "colocated"),
            strict=True,
        )
    )


def find_gateway_figures(samples: list[GatewaySample]) -> Iterator[Figure]:
    """What the gateway costs, alone and against the plain proxy and the routers."""

    def values(
        configuration: str, load: str, read: Callable[[GatewaySample], float | None]
    ) -> tuple[float, ...]:
        here = [s for s in samples if (s.configuration, s.load) == (configuration, load)]
        return tuple(value for value in map(read, here) if value is not None)

    yield Figure(
        "gateway", "push: CPU per request", "us", values(PUSH, "whole", _cpu_us), at_most=150
    )
    yield Figure(
        "gateway", "push: p99, 32 at once", "ms", values(PUSH, "whole", _p99_ms), at_most=6
    )
    yield Figure(
        "gateway", "push: requests/s on one core", "1/s",
        values(PUSH, "whole", _requests_per_s), at_least=6500,
    )  # fmt: skip
    yield Figure(
        "gateway", "whole requests: CPU per request", "us",
        values(WHOLE, "whole", _cpu_us), at_most=100,
    )  # fmt: skip
    yield Figure(
        "gateway", "CPU per SSE event, 50 a second and stream", "us",
        values(WHOLE, "event", _cpu_us), at_most=25,
    )  # fmt: skip
    others = {s.configuration: None for s in samples}.keys() - {PUSH, WHOLE}
    for name, configuration, load in (
        ("push, CPU per request", PUSH, "whole"),
        ("whole requests, CPU", WHOLE, "whole"),
        ("SSE event, CPU", WHOLE, "event"),
    ):
        own, tls = values(configuration, load, _cpu_us), configuration + TLS
        for other in sorted(other for other in others if not other.endswith(TLS)):
            pairs = zip(own, values(other, load, _cpu_us), strict=True)
            yield Figure(
                "gateway", f"{name} over {other}'s", "ratio", tuple(a / b for a, b in pairs)
            )
        if tls in others:
            pairs = zip(values(tls, load, _cpu_us), own, strict=True)
            yield Figure(
                "gateway", f"{name}, with TLS over without", "ratio", tuple(a / b for a, b in pairs)
            )


def _cpu_us(sample: GatewaySample) -> float:
    return sample.cpu_us


def _p99_ms(sample: GatewaySample) -> float | None:
    return sample.p99_ms


def _requests_per_s(sample: GatewaySample) -> float | None:
    return sample.requests_per_s


def find_agents_figure(record: dict) -> Figure:
    """Of the record that bench_handoff_cost.py keeps."""
    samples = [s for s in record["samples"] if s["mode"] == "push"]
    return Figure(
        "agents", "both agents alone, 32 layers, 128 tokens: CPU of a push", "ms",
        tuple(1e3 * s["cpu_s"] for s in samples), at_most=1.5,
    )  # fmt: skip


def find_link_figures(report: dict) -> Iterator[Figure]:
    """Of the report of `baton bench link --json`: each round's p50 of one message of 32 KiB."""
    for row in report["rows"]:
        if row["name"] == "shared" and row["workload"]["name"] == "32 KiB":
            yield Figure(
                "link", f"`shared`, 32 KiB, p50, {row['direction']}", "us",
                tuple(1e6 * statistics.median(each) for each in row["samples_s"]), at_most=9,
            )  # fmt: skip
