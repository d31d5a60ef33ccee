"""Configurations, loads and the order of trials. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, assert_never

from baton.bench.load.plan import Closed, Limits, Load, LoadPlan, Open, Replay
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.bench.load.records import Slo
    from baton.bench.load.server_check import RequestOptions
    from baton.bench.workloads.requests import Workload
    from baton.router.cost_parts import Objective

Peer: TypeAlias = Literal["nixl", "vllm-router"]
"""nixl: vLLM's NixlConnector behind a simple proxy; vllm-router: replicated vLLM behind it."""

PEERS: Final[tuple[Peer, ...]] = ("nixl", "vllm-router")
SINGLE: Final = "single"
REPLICATED: Final = "replicated"
ADAPTIVE: Final = "adaptive"
OBJECTIVES: Final[tuple[Objective, ...]] = ("throughput", "goodput")
MOST_WORKERS: Final = 64


@dataclass(frozen=True, slots=True)
class Configuration:
    """One use of the workers: all do `both`, or some prefill and others decode.

    `peer`: the project of the servers; None: Baton's. `policy`: how its gateway chooses workers.
    `objective`: of the policy `cost`; None: as configured.
    """

    name: str
    num_both: int
    num_prefill: int = 0
    num_decode: int = 0
    peer: Peer | None = None
    policy: str = "round_robin"
    objective: Objective | None = None

    @property
    def num_workers(self) -> int:
        """Workers that it uses."""
        return self.num_both + self.num_prefill + self.num_decode

    @property
    def is_disaggregated(self) -> bool:
        """Whether KV has to move."""
        return self.num_prefill > 0

    @property
    def is_compared(self) -> bool:
        """Whether it is compared with Baton's replication."""
        return self.is_disaggregated or self.peer is not None or self.policy == "cost"

    @property
    def folder(self) -> str:
        """Its name in the folder of results."""
        return self.name.replace(":", "-")


def choose_configurations(
    num_workers: int, wanted: Sequence[str] = (), peers: Sequence[Peer] = ()
) -> tuple[Configuration, ...]:
    """One worker, all as replicas, and every split, and those of the peers; or the `wanted` ones.

    The replicas of `adaptive` prefill for each other where the router's costs are less that way;
    `adaptive-throughput` and `adaptive-goodput` do so for that objective.

    Raises:
        ConfigError: an unknown name, or too few workers to compare anything.
    """
    if not 2 <= num_workers <= MOST_WORKERS:  # noqa: PLR2004 - one prefill, one decode
        raise ConfigError(f"--workers {num_workers}: 2 to {MOST_WORKERS} can be compared")
    configurations = (
        Configuration(SINGLE, 1),
        Configuration(REPLICATED, num_workers),
        *_splits(num_workers),
    )
    others = (
        Configuration(ADAPTIVE, num_workers, policy="cost"),
        *(
            Configuration(
                f"{ADAPTIVE}-{objective}", num_workers, policy="cost", objective=objective
            )
            for objective in OBJECTIVES
        ),
        *(each for peer in PEERS for each in _peer_configurations(num_workers, peer)),
    )
    known = {
        configuration.name.lower(): configuration for configuration in (*configurations, *others)
    }
    for name in wanted:
        if name.lower() not in known:
            names = ", ".join(configuration.name for configuration in known.values())
            raise ConfigError(f"--arm {name}: with {num_workers} workers there are {names}")
    chosen = {name.lower() for name in wanted} or {
        configuration.name.lower() for configuration in configurations
    }
    return tuple(
        configuration
        for name, configuration in known.items()
        if name in chosen or (configuration.peer and configuration.peer in peers)
    )


def _splits(num_workers: int) -> Iterator[Configuration]:
    for num in range(1, num_workers):
        yield Configuration(f"{num}P{num_workers - num}D", 0, num, num_workers - num)


def _peer_configurations(num_workers: int, peer: Peer) -> Iterator[Configuration]:
    match peer:
        case "nixl":
            for split in _splits(num_workers):
                yield replace(split, name=f"peer:nixl-{split.name}", peer=peer)
        case "vllm-router":
            yield Configuration("peer:vllm-router", num_workers, peer=peer)
        case other:
            assert_never(other)


RECORDED: Final = "recorded"
"""The `--rate` of a trace's own arrival times."""

MOST_AT_ONCE: Final = 4096
MOST_REPETITIONS: Final = 1000
MOST_WARM_UP: Final = 8
"""Before each load; the servers have answered the largest request by then."""


@dataclass(frozen=True, slots=True)
class Level:
    """One load: a closed loop, an open one with Poisson arrivals, or a trace's own arrivals."""

    load: Load

    @property
    def key(self) -> str:
        """A name for files: `c8`, `r2.5`."""
        match self.load:
            case Closed(concurrency):
                return f"c{concurrency}"
            case Open(rate):
                return f"r{rate:g}"
            case Replay():
                return RECORDED

    @property
    def words(self) -> str:
        """In sentences and tables."""
        match self.load:
            case Closed(concurrency):
                return f"{concurrency} at once"
            case Open(rate):
                return f"{rate:g} requests/s"
            case Replay():
                return f"{RECORDED} arrivals"


@dataclass(frozen=True, slots=True)
class Effort:
    """How long each load lasts, and the repetitions. `num_requests` None: no limit.

    A load runs for `settle_s` before it is measured: closed loops only.
    """

    num_repetitions: int
    duration_s: float
    num_requests: int | None
    request_timeout_s: float
    settle_s: float = 0.0

    def plan_load(self, level: Level) -> LoadPlan:
        """One cell's run. Requests in flight at its end may finish."""
        at_once = level.load.concurrency if isinstance(level.load, Closed) else 1
        timeout_s = self.request_timeout_s
        limits = Limits(self.num_requests, self.duration_s, timeout_s, timeout_s)
        return LoadPlan(level.load, limits, min(at_once, MOST_WARM_UP), self.settle_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole benchmark. `slo` None: derived from the lowest load (see analysis.py)."""

    num_workers: int
    engine: str
    model: str
    configurations: tuple[Configuration, ...]
    levels: tuple[Level, ...]
    workload: Workload
    request_options: RequestOptions
    effort: Effort
    seed: str
    slo: Slo | None
    cost_per_worker_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """Start a configuration's servers, run all loads in this order, stop the servers."""

    repetition: int
    configuration: Configuration
    levels: tuple[Level, ...]


def plan_trials(plan: Plan) -> tuple[Trial, ...]:
    """All trials, repetition by repetition; within one, configurations in random order by the seed.

    The order of the loads is random too, the same for all configurations of a repetition: drift of
    the machine affects them alike.
    """
    rng = random.Random(f"{plan.seed}/order")  # noqa: S311 - no secret
    trials = []
    for repetition in range(1, plan.effort.num_repetitions + 1):
        levels = tuple(rng.sample(plan.levels, len(plan.levels)))
        configurations = rng.sample(plan.configurations, len(plan.configurations))
        trials += [Trial(repetition, configuration, levels) for configuration in configurations]
    return tuple(trials)


def prompt_seed(plan: Plan, repetition: int, level: Level) -> str:
    """All configurations get the same prompts; no cell has prompts that an earlier one cached."""
    return f"{plan.seed}/{repetition}/{level.key}"


def read_levels(concurrency: str | None, rate: str | None) -> tuple[Level, ...]:
    """From `1,2,4`, and `0.5,1` or `recorded`.

    Raises:
        ConfigError: no such numbers.
    """
    closed = [Level(Closed(number)) for number in _read_counts(concurrency)]
    words = [word.strip() for word in rate.split(",")] if rate else []
    replays = [Level(Replay()) for word in words if word == RECORDED]
    numbers = ",".join(word for word in words if word != RECORDED)
    rates = [Level(Open(number)) for number in _read_rates(numbers)]
    if not (closed or rates or replays):
        raise ConfigError("no load at all: give --concurrency, or --rate")
    return tuple(dict.fromkeys((*closed, *rates, *replays)))


def _read_counts(text: str | None) -> Sequence[int]:
    words = [] if not text else text.split(",")
    for word in words:
        if not word.strip().isdigit() or not 1 <= int(word) <= MOST_AT_ONCE:
            raise ConfigError(
                f"--concurrency {text}: whole numbers in [1, {MOST_AT_ONCE}], such as 1,2,4"
            )
    return sorted(int(word) for word in words)


def _read_rates(text: str | None) -> Sequence[float]:
    try:
        rates = [float(word) for word in text.split(",")] if text else []
    except ValueError:
        rates = [-1.0]
    if not all(0 < rate < float("inf") for rate in rates):
        raise ConfigError(f"--rate {text}: requests a second above 0, such as 0.5,1,2, or recorded")
    return sorted(rates)
