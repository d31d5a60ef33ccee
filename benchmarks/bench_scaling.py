"""What does scaling two pools separately save? Traffic of a day, in virtual time.

    python benchmarks/bench_scaling.py --json benchmarks/results/scaling.json

Requests arrive independently. Their rate rises from `--low` to `--high` a second and falls again in
each of `--days` of `--day-s` (a squared sine, as nights are longer than noons), and is three times
as high for five minutes in the evening. Prompts have 256 to 4,096 tokens, answers 16 to 512
(log-uniform). Workers are simulated (`baton.sim.router`), the policy is `cost`; a worker that is
started serves `--start-s` later, and one that is taken out finishes what it has, which is paid for.

Arms:

    peak        as many as the highest rate needs, all the time
    mean        as many as the mean rate needs
    in-flight-N a pool grows and shrinks by requests under way for each worker, N of them in both
                pools, as Kubernetes' autoscalers do with such a metric; the same delays as `scaler`
    scaler      `baton.router.scaling`, prefill and decode workers
    scaler-both the same, workers of both roles

*Good*: answers within `--ttft-s` and `--tpot-s`. *Worker-hours*: paid time over one hour.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from run_record import write_record

from baton.auth.ticket import WorkerRef
from baton.ids import Epoch, WorkerId
from baton.protocol.demand import DemandReport
from baton.protocol.worker_http import Role
from baton.router.cost import CostOptions, CostPolicy
from baton.router.demand import Demand, Limits
from baton.router.demand_report import report_demand
from baton.router.fleet import Fleet, WorkerView
from baton.router.scaling import RoleBounds, Scaler, ScalingOptions, Size, find_size
from baton.sim.router.costs import SimulatedCosts
from baton.sim.router.sessions import Session, TokenRun, Turn
from baton.sim.router.simulation import Simulation

MODEL = "demo"
LOOK_EVERY_S = 5.0
BURST_S = 300.0
COSTS = SimulatedCosts(handoff_token_s=1e-6, block_size=64)
MOST = 64
FIRST_S = 120.0
"""Answers that begin before are not counted: nothing is learned yet."""


@dataclass(frozen=True)
class Run:
    """What one arm gave."""

    arm: str
    num_requests: int
    good: float
    ttft_p99_s: float
    tpot_p99_s: float
    worker_hours: float
    num_resizes: int
    least: int
    most: int


def view(name: str, role: Role) -> WorkerView:
    """A worker that nothing is known of."""
    ref = WorkerRef(WorkerId(name), Epoch("0" * 32), "127.0.0.1:1")
    return WorkerView(ref, role, MODEL, "f", frozenset({"tcp"}), available=True)


def rate_at(at: float, options: argparse.Namespace) -> float:
    """Requests a second."""
    share = (0.5 - 0.5 * math.cos(2 * math.pi * at / options.day_s)) ** 2
    rate = options.low + (options.high - options.low) * share
    burst_at = 0.8 * options.day_s
    is_burst = burst_at <= at % options.day_s < burst_at + BURST_S
    return rate * 3 if is_burst else rate


def draw_sessions(options: argparse.Namespace) -> Iterator[Session]:
    """A Poisson process whose rate changes, by thinning."""
    draw, at, highest = random.Random(options.seed), 0.0, 3 * options.high
    end_s = options.days * options.day_s
    for number in count():
        at += draw.expovariate(highest)
        if at >= end_s:
            return
        num_prompt = round(math.exp(draw.uniform(math.log(256), math.log(4096))))
        num_answer = round(math.exp(draw.uniform(math.log(16), math.log(512))))
        if draw.random() * highest < rate_at(at, options):
            yield Session((Turn((TokenRun(str(number), num_prompt),), num_answer),), arrival_s=at)


class World:
    """A fleet whose size changes, and what that costs."""

    def __init__(self, size: Size, options: argparse.Namespace) -> None:
        self._options, self._names = options, count()
        self._limits = Limits(options.ttft_s, options.tpot_s)
        self._roles = (Role.PREFILL, Role.DECODE, Role.BOTH)
        first = [
            self._new(role) for role, num in zip(self._roles, size, strict=True) for _ in range(num)
        ]
        policy = CostPolicy(CostOptions(ttft_s=options.ttft_s, tpot_s=options.tpot_s))
        self.simulation = Simulation([policy], first, COSTS, options.seed)
        self.simulation.replay(draw_sessions(options))
        self._starting: list[tuple[float, WorkerView]] = []
        self._leaving: dict[WorkerId, float] = {}
        self.paid_s, self.num_resizes, self.sizes = 0.0, 0, [sum(size)]

    def _new(self, role: Role) -> WorkerView:
        return view(f"{role}-{next(self._names)}", role)

    @property
    def views(self) -> list[WorkerView]:
        """The workers that serve."""
        served = self.simulation.fleet.models[MODEL]
        return [*served.prefills, *served.decodes]

    def count(self) -> tuple[Size, Size]:
        """Workers by role, with those that start, and those alone."""
        starting = [each for _, each in self._starting]
        return self._by_role([*self.views, *starting]), self._by_role(starting)

    def _by_role(self, views: list[WorkerView]) -> Size:
        return Size(*(sum(each.role is role for each in views) for role in self._roles))

    def num_under_way(self, role: Role) -> int:
        """Requests that workers of a role have."""
        load = self.simulation.load
        return sum(load.of(each.id, MODEL).num_requests for each in self.views if each.role is role)

    def resize(self, wanted: Size) -> None:
        """Start what lacks; take out those with the least to do."""
        present, _ = self.count()
        now, load = self.simulation.now, self.simulation.load
        self.num_resizes += wanted != present
        for role, num, had in zip(self._roles, wanted, present, strict=True):
            for _ in range(num - had):
                self._starting.append((now + self._options.start_s, self._new(role)))
            own = sorted(
                (each for each in self.views if each.role is role),
                key=lambda each: load.of(each.id, MODEL).num_requests,
            )
            for each in own[: max(0, had - num)]:
                self._leaving[each.id] = now
                self.simulation.fleet = Fleet.of(x for x in self.views if x.id != each.id)

    def advance(self, until_s: float) -> None:
        """Go on until then, and count what is paid."""
        began_at = self.simulation.now
        while self._starting and self._starting[0][0] <= until_s:
            at, new = self._starting.pop(0)
            self.simulation.run(at)
            self.simulation.add_worker(new)
        self.simulation.run(until_s)
        load = self.simulation.load
        self._leaving = {
            each: at for each, at in self._leaving.items() if load.of(each, MODEL).num_requests
        }
        num_paid = len(self.views) + len(self._starting) + len(self._leaving)
        self.paid_s += num_paid * (until_s - began_at)
        self.sizes.append(num_paid)

    def finish(self, arm: str) -> Run:
        """What clients saw."""
        self.simulation.run()
        seen = [each for each in self.simulation.outcomes if each.began_at >= FIRST_S]
        ttfts = sorted(each.ttft_s for each in seen)
        tpots = sorted(each.tpot_s for each in seen)
        good = sum(
            each.ttft_s <= self._limits.ttft_s and each.tpot_s <= self._limits.tpot_s
            for each in seen
        )
        at = int(0.99 * len(seen))
        return Run(
            arm, len(seen), good / len(seen), ttfts[at], tpots[at], self.paid_s / 3600,
            self.num_resizes, min(self.sizes), max(self.sizes),
        )  # fmt: skip


Decide = Callable[[World], Size | None]


def by_scaler(scaler: Scaler) -> Decide:
    """The product's policy, with what a gateway reports."""

    def decide(world: World) -> Size | None:
        simulation = world.simulation
        demand = report_demand(world.views, simulation.load, 0, simulation.now)
        present, starting = world.count()
        found = scaler.decide(
            {"gateway": DemandReport("one", (demand,))}, present, starting, simulation.now
        )
        return None if found is None else found.size

    return decide


def by_in_flight(target: float, grow_every_s: float, shrink_after_s: float) -> Decide:
    """`ceil(under way / target)` for each pool; shrinks to the most of the last while."""
    needs: list[tuple[float, Size]] = []
    grew_at = [-math.inf]

    def decide(world: World) -> Size | None:
        now = world.simulation.now
        present, _ = world.count()
        need = Size(
            *(
                min(MOST, max(1, math.ceil(world.num_under_way(role) / target)))
                for role in (Role.PREFILL, Role.DECODE)
            )
        )
        needs.append((now, need))
        needs[:] = [each for each in needs if each[0] >= now - shrink_after_s]
        more = Size(*map(max, need, present))
        if more != present and now - grew_at[0] >= grow_every_s:
            grew_at[0] = now
            return more
        most = Size(*(max(sizes) for sizes in zip(*(size for _, size in needs), strict=True)))
        return Size(*map(min, most, present)) if now >= shrink_after_s else None

    return decide


def mean_demand() -> Demand:
    """What requests cost on the average, as the simulation has them."""
    num_tokens = (4096 - 256) / math.log(4096 / 256)
    num_answer = (512 - 16) / math.log(512 / 16)
    prefill_s = COSTS.prefill_s + COSTS.prefill_token_s * num_tokens
    return Demand(1, prefill_s, prefill_s, COSTS.handoff_s, COSTS.handoff_s, num_answer,
                  (COSTS.step_s, COSTS.step_answer_s))  # fmt: skip


def main() -> None:
    """Run all arms, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--low", type=float, default=1.0, help="requests a second at night")
    parser.add_argument("--high", type=float, default=16.0, help="and at noon")
    parser.add_argument("--day-s", type=float, default=2400.0)
    parser.add_argument("--days", type=int, default=1)
    parser.add_argument("--start-s", type=float, default=60.0, help="until a new worker serves")
    parser.add_argument("--ttft-s", type=float, default=2.0)
    parser.add_argument("--tpot-s", type=float, default=0.05)
    parser.add_argument("--in-flight", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--shrink-after-s", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    none, some = RoleBounds(0, 0), RoleBounds(1, MOST)
    wanted = ScalingOptions(
        Limits(options.ttft_s, options.tpot_s), some, some, none,
        shrink_after_s=options.shrink_after_s,
    )  # fmt: skip
    alike = replace(wanted, prefill=none, decode=none, both=some)
    demand = mean_demand()
    peak, _ = find_size(demand, options.high * 1.2, wanted)
    mean, _ = find_size(demand, (options.low + 0.375 * (options.high - options.low)) * 1.2, wanted)
    first, _ = find_size(demand, options.low * 1.2, wanted)
    first_alike, _ = find_size(demand, options.low * 1.2, alike)
    arms: dict[str, tuple[Size, Decide]] = {
        "peak": (peak, lambda _: None),
        "mean": (mean, lambda _: None),
        **{
            f"in-flight-{num}": (
                first,
                by_in_flight(num, wanted.grow_every_s, options.shrink_after_s),
            )
            for num in options.in_flight
        },
        "scaler": (first, by_scaler(Scaler(MODEL, wanted))),
        "scaler-both": (first_alike, by_scaler(Scaler(MODEL, alike))),
    }
    runs = []
    for arm, (size, decide) in arms.items():
        began_at, world = time.monotonic(), World(size, options)
        for tick in range(1, int(options.days * options.day_s / LOOK_EVERY_S) + 1):
            world.advance(tick * LOOK_EVERY_S)
            if (resized := decide(world)) is not None:
                world.resize(resized)
        runs.append(world.finish(arm))
        print(f"{time.monotonic() - began_at:.0f} s: {runs[-1]}", flush=True)
    table = Table("arm", "good", "TTFT p99, s", "TPOT p99, ms", "worker-hours", "workers",
                  "resizes", box=box.MARKDOWN)  # fmt: skip
    for run in runs:
        table.add_row(
            run.arm, f"{run.good:.1%}", f"{run.ttft_p99_s:.2f}", f"{run.tpot_p99_s * 1e3:.0f}",
            f"{run.worker_hours:.1f}", f"{run.least} to {run.most}", str(run.num_resizes),
        )  # fmt: skip
    Console(width=110).print(table)
    shown = {key: value for key, value in vars(options).items() if key != "json"}
    write_record(options.json, options=shown, runs=runs)


if __name__ == "__main__":
    main()
