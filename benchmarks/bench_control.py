"""What the control path costs: a handoff, the gateway, the agents alone, one message.

    python benchmarks/bench_control.py --json benchmarks/results/control.json [--peers FOLDER]
        [--rows embedded vllm gateway agents link] [--rounds 5] [--short]

Real processes, a model so small that what is not computing shows (4 layers, hidden 64, 2 KiB of KV
per token), prompts of random tokens, one token back, float32, one thread for each engine. CPU is
what all threads of all processes took (/proc/PID/task/*/schedstat). Configurations alternate, in
the other order every second round; a figure is the median of the rounds, and each difference or
ratio is taken within a round. --short takes a minute: agents, gateway and embedded, fewer loads;
what can be compared between machines are its ratios.

`vllm` needs `make install ENGINE=vllm`. `--peers FOLDER` is a virtual environment with vllm-router
and sglang-router; it is made, and they are installed, where it does not exist.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from control_figures import (
    PUSH,
    TARGET_CONCURRENCY,
    TLS,
    WHOLE,
    Figure,
    GatewaySample,
    Sample,
    find_agents_figure,
    find_fleet_figures,
    find_gateway_figures,
    find_link_figures,
)
from control_fleets import (
    CONCURRENCIES,
    LENGTHS,
    MODEL,
    FleetLoad,
    start_servings,
)
from control_gateway import PEERS, GatewayLoad, RouterError, measure_gateways
from control_load import LoadError
from random_model import make_model
from rich.console import Console
from rich.table import Table

from baton.rig.machine import describe_machine
from baton.testing.fleet import Fleet, FleetError

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
ROWS = ("embedded", "vllm", "gateway", "agents", "link")
SHORT_ROWS = ("agents", "gateway", "embedded")
PINNED = (32, 64)
"""Prompt tokens and requests at once of the loads on pinned workers."""
FAILURES = (FleetError, LoadError, RouterError, subprocess.CalledProcessError)
"""One row of these leaves the others as they are."""
BEGAN_S = time.monotonic()
NUM_DIGITS = 4
LEAST_SHOWN_MS = 0.02
PEER_LIBRARIES = ("aiohttp", "fastapi", "orjson", "requests", "setproctitle", "uvicorn")
"""That the routers' launchers import."""
console = Console(width=None if sys.stdout.isatty() else 190)


@dataclass(frozen=True)
class Effort:
    """How much is measured: seconds of a load, events of a stream, repetitions of the agents.

    `gateways` are measured beside the proxy and other routers.
    """

    num_rounds: int
    duration_s: float
    num_events: int
    num_handoffs: int
    concurrencies: tuple[int, ...]
    gateways: tuple[str, ...]
    budget_s: float
    """After so much time of this process no row begins, and no round but the first one of a row."""

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return time.monotonic() - BEGAN_S > self.budget_s

    def rounds(self) -> Iterator[int]:
        """Numbers of the rounds, from 0."""
        for number in range(self.num_rounds):
            if number and self.is_over:
                return
            yield number


GATEWAYS = (WHOLE, PUSH, WHOLE + TLS, PUSH + TLS)
FULL = Effort(5, 1.5, 200, 31, CONCURRENCIES, GATEWAYS, float("inf"))
SHORT = Effort(2, 0.6, 50, 9, (TARGET_CONCURRENCY,), GATEWAYS[:2], 50.0)


@dataclass
class Findings:
    """All that was measured."""

    figures: list[Figure] = field(default_factory=list)
    fleets: list[Sample] = field(default_factory=list)
    gateways: list[GatewaySample] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Row → why nothing came of it."""


def main() -> None:
    """Measure the rows, print the tables, keep the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--peers", type=Path, help="virtual environment of the other routers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the fleets are ended, too
    effort = SHORT if options.short else FULL
    effort = replace(effort, num_rounds=options.rounds or effort.num_rounds)
    rows = options.rows or (SHORT_ROWS if options.short else ROWS)
    if options.peers is not None:
        install_peers(options.peers)
    machine, findings = describe_machine(), Findings()
    for row in rows:
        if effort.is_over:
            console.print(f"{row}: left out, as the time is over")
            continue
        try:
            measure(row, effort, options.peers, findings)
        except FAILURES as exc:
            console.print(f"{row}: failed: {exc}", style="red", markup=False, soft_wrap=True)
            findings.failed[row] = str(exc)
    took_s = time.monotonic() - BEGAN_S
    show(findings)
    console.print(
        f"load {machine.load[0]:.2f} before, {os.getloadavg()[0]:.2f} after; {took_s:.0f} s"
    )
    if options.json:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{machine.cpu}, {machine.num_cpus} cores",
            "load_before": machine.load[0],
            "load_after": os.getloadavg()[0],
            "took_s": took_s,
            "model": MODEL | {"dtype": "float32"},
            "figures": [asdict(f) | {"is_reached": f.is_reached} for f in findings.figures],
            "fleets": [asdict(sample) for sample in findings.fleets],
            "gateways": [asdict(sample) for sample in findings.gateways],
            "failed": findings.failed,
        }
        options.json.write_text(json.dumps(rounded(record), indent=1) + "\n")
    if findings.failed:
        sys.exit(1)


def rounded(value: object) -> object:
    """The same, with at most NUM_DIGITS behind the point: the file is kept with the code."""
    match value:
        case float():
            return round(value, NUM_DIGITS)
        case dict():
            return {key: rounded(each) for key, each in value.items()}
        case list() | tuple():
            return [rounded(each) for each in value]
        case _:
            return value


def install_peers(folder: Path) -> None:
    """Make the environment of the routers, unless it is there."""
    if not folder.exists():
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", *PEERS.values()], check=True)
        subprocess.run([*pip, *PEER_LIBRARIES], check=True)


def measure(row: str, effort: Effort, peers: Path | None, findings: Findings) -> None:
    """One row of ROWS, with processes of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
        match row:
            case "embedded" | "vllm":
                with Fleet(folder, environment, tls="control") as fleet:  # as it is by default
                    samples = measure_fleets(fleet, make_model(folder, MODEL), row, effort)
                findings.fleets += samples
                findings.figures += find_fleet_figures(samples)
            case "gateway":
                with Fleet(folder, environment) as fleet:
                    load = GatewayLoad(effort.duration_s, effort.num_events)
                    rounds, names = effort.rounds(), effort.gateways
                    found = measure_gateways(fleet, load, rounds, names, peers)
                findings.gateways += found
                findings.figures += find_gateway_figures(found)
            case "agents":
                findings.figures.append(measure_agents(folder / "agents.json", effort))
            case "link":
                findings.figures += measure_link(effort)


def measure_fleets(fleet: Fleet, model: Path, engine: str, effort: Effort) -> list[Sample]:
    """Each load on 1P1D and on colocated workers, in turn."""
    servings, load = start_servings(fleet, model, engine), FleetLoad(effort.duration_s)
    load.warm_up(servings)
    cells = [(tokens, at_once, False) for tokens in LENGTHS for at_once in effort.concurrencies]
    cells.append((*PINNED, True))
    samples = []
    for round_number in effort.rounds():
        console.print(f"{engine}: round {round_number + 1} of {effort.num_rounds}", style="dim")
        order = list(servings) if round_number % 2 else list(reversed(servings))
        for tokens, at_once, is_pinned in cells:
            samples += [
                load.measure(servings[name], tokens, at_once, is_pinned=is_pinned) for name in order
            ]
    return samples


def measure_agents(file: Path, effort: Effort) -> Figure:
    """CPU of two agents in one process, no engine."""
    command = [sys.executable, str(HERE / "bench_handoff_cost.py"), "--layers", "32"]
    command += ["--kv-heads", "8", "--lengths", "128", "--json", str(file)]
    command += ["--repetitions", str(effort.num_handoffs)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return find_agents_figure(json.loads(file.read_text()))


def measure_link(effort: Effort) -> list[Figure]:
    """Latency of one message between two processes."""
    command = [sys.executable, "-m", "baton.cli", "bench", "link", "--transport", "shared"]
    command += ["--sizes", "32KiB", "--rounds", str(effort.num_rounds), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return list(find_link_figures(json.loads(done.stdout)))


# Tables -------------------------------------------------------------------------------------------


def show(findings: Findings) -> None:
    """All that was measured, for people."""
    for engine in dict.fromkeys(s.engine for s in findings.fleets):
        samples = [s for s in findings.fleets if s.engine == engine]
        console.print(render_fleets(engine, samples))
        console.print(render_threads(engine, samples))
    if findings.gateways:
        console.print(render_gateways(findings.gateways))
    console.print(render_figures(findings.figures))


def render_fleets(engine: str, samples: list[Sample]) -> Table:
    """Each load on each configuration, medians of the rounds."""
    table = Table(title=f"{engine}: medians of the rounds")
    table.add_column("prompt, at once")
    table.add_column("configuration")
    for name in ("requests/s", "p50 ms", "p99 ms", "CPU ms per request", "switches per request"):
        table.add_column(name, justify="right")
    table.add_column("prefill + decode, or worker, + gateway")
    table.add_column("handed over / traced")
    groups: dict[tuple[object, ...], list[Sample]] = {}
    for s in samples:
        key = (s.num_tokens, s.concurrency, s.is_pinned, s.configuration)
        groups.setdefault(key, []).append(s)
    for key in sorted(groups, key=lambda key: (key[2], *key)):
        here = groups[key]
        parts = (
            f"{median([s.process_cpu_ms.get(name, 0.0) for s in here]):.2f}"
            for name in here[0].process_cpu_ms
        )
        table.add_row(
            f"{key[0]} tokens, {key[1]}{', pinned' if key[2] else ''}",
            str(key[3]),
            f"{median([s.requests_per_s for s in here]):,.0f}",
            f"{median([s.p50_ms for s in here]):.1f}",
            f"{median([s.p99_ms for s in here]):.1f}",
            f"{median([s.cpu_ms for s in here]):.2f}",
            f"{median([s.num_switches for s in here]):.0f}",
            " + ".join(parts),
            describe_handoffs(here) if key[3] == "1P1D" else "",
            end_section=key[3] == "colocated",
        )
    return table


def describe_handoffs(samples: list[Sample]) -> str:
    """How many of the traced requests were handed over, and by which transports."""
    transports = sum((Counter(s.transports) for s in samples), Counter())
    shares = ", ".join(f"{name} {num}" for name, num in transports.most_common())
    num, total = sum(s.num_handed_over for s in samples), sum(s.num_traced for s in samples)
    return f"{num} / {total}: {shares}"


def render_threads(engine: str, samples: list[Sample]) -> Table:
    """CPU of each thread of the shortest prompts, TARGET_CONCURRENCY at once."""
    table = Table(
        title=f"{engine}: CPU by thread, {LENGTHS[0]} tokens, {TARGET_CONCURRENCY} at once"
    )
    table.add_column("configuration")
    table.add_column("process/thread")
    table.add_column("CPU ms per request", justify="right")
    table.add_column("switches per request", justify="right")
    for configuration in dict.fromkeys(s.configuration for s in samples):
        here = [
            s for s in samples
            if s.configuration == configuration and not s.is_pinned
            and (s.num_tokens, s.concurrency) == (LENGTHS[0], TARGET_CONCURRENCY)
        ]  # fmt: skip
        names = {name for s in here for name in s.thread_cpu_ms}
        found = {name: median([s.thread_cpu_ms.get(name, 0.0) for s in here]) for name in names}
        for name, ms in sorted(found.items(), key=lambda item: -item[1]):
            if ms >= LEAST_SHOWN_MS:
                switches = median([s.thread_switches.get(name, 0.0) for s in here])
                table.add_row(configuration, name, f"{ms:.2f}", f"{switches:.1f}")
    return table


def render_gateways(samples: list[GatewaySample]) -> Table:
    """Each configuration, medians of the rounds."""
    table = Table(
        title="gateways on one core: whole requests, 32 at once; 16 streams of 50 events/s"
    )
    table.add_column("configuration")
    for name in (
        "CPU us per request",
        "requests/s",
        "p50 ms",
        "p99 ms",
        "core busy",
        "CPU us per event",
    ):
        table.add_column(name, justify="right")
    for configuration in dict.fromkeys(s.configuration for s in samples):
        here = [s for s in samples if s.configuration == configuration]
        whole = [s for s in here if s.load == "whole"]
        table.add_row(
            configuration,
            f"{median([s.cpu_us for s in whole]):.0f}",
            f"{median([s.requests_per_s for s in whole]):,.0f}",
            f"{median([s.p50_ms for s in whole]):.1f}",
            f"{median([s.p99_ms for s in whole]):.1f}",
            f"{median([s.busy_share for s in whole]):.0%}",
            f"{median([s.cpu_us for s in here if s.load == 'event']):.1f}",
        )
    return table


def render_figures(figures: list[Figure]) -> Table:
    """Each figure beside its target."""
    table = Table(title="figures: median of the rounds, least and most, and the target")
    table.add_column("row")
    table.add_column("figure")
    for name in ("median", "least", "most", "target"):
        table.add_column(name, justify="right")
    table.add_column("")
    for f in figures:
        target = f"≤ {f.at_most:g}" if f.at_most is not None else ""
        target = f"≥ {f.at_least:g}" if f.at_least is not None else target
        cells = (f"{value:,.2f}" for value in (f.median, min(f.values), max(f.values)))
        verdict = {None: "", True: "reached", False: "not reached"}[f.is_reached]
        style = {None: None, True: "green", False: "red"}[f.is_reached]
        table.add_row(f.group, f"{f.name}, {f.unit}", *cells, target, verdict, style=style)
    return table


if __name__ == "__main__":
    main()
