"""How long an assignment of workers to hosts takes to compute, and what it saves.

    python benchmarks/bench_plan.py --json benchmarks/results/plan.json
    python benchmarks/bench_plan.py --table benchmarks/results/plan.json

Hosts have 8 GPUs, racks 8 hosts, zones 4 racks; links have placement's default rates. Beside it,
two that know nothing of KV: `in turn` gives each host one worker after the other, prefill first,
as Ray's SPREAD does; `packed` fills one host after the other. Each sends to the nearest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from statistics import median

from baton.config.sections import HostTable
from baton.planner.assignment import Location, Needs, assign_workers, divide_traffic
from baton.planner.traffic import DISTANCES, choose_rates

GPUS = 8
HOSTS_OF_RACK, RACKS_OF_ZONE = 8, 4
FLEETS = ((4, 6, 20, 1), (16, 12, 40, 2), (32, 40, 200, 1), (64, 48, 80, 4), (64, 100, 150, 2))
"""Hosts, prefill workers, decode workers, GPUs of each."""
ROUNDS = 3
RATES = choose_rates({}, {})
BYTE_S = {distance: 1e-9 / RATES[distance].gb_per_s for distance in DISTANCES}


def make_hosts(number: int) -> list[HostTable]:
    """Full racks, then the next one."""
    return [
        HostTable(
            name=f"h{at}",
            rack=f"r{at // HOSTS_OF_RACK}",
            zone=f"z{at // (HOSTS_OF_RACK * RACKS_OF_ZONE)}",
            gpus=float(GPUS),
        )
        for at in range(number)
    ]


def cost_s(hosts: list[HostTable], placed: dict[str, HostTable]) -> tuple[float, float]:
    """Seconds of links for a GB of KV, and the share of KV that stays on its host."""
    traffic = divide_traffic([
        (
            Location.of(host.zone, host.rack, host.name),
            tuple(
                sum(its is host and name.startswith(role) for name, its in placed.items())
                for role in ("prefill", "decode")
            ),
        )
        for host in hosts
    ])
    seconds = sum(goes.share * BYTE_S[at] for at, goes in traffic.items())
    return seconds * 1e9, traffic[DISTANCES[0]].share


def measure(num_hosts: int, num_prefill: int, num_decode: int, gpus: int) -> dict[str, float]:
    """One fleet."""
    hosts = make_hosts(num_hosts)
    needs = [
        Needs(role, tuple(f"{role}-{at}" for at in range(num)), gpus=float(gpus))
        for role, num in (("prefill", num_prefill), ("decode", num_decode))
    ]
    took = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        planned = assign_workers(hosts, needs, BYTE_S)
        took.append(time.perf_counter() - begun)
    names = [name for each in needs for name in each.names]
    turns = dict(zip(names, islice(cycle(hosts), len(names)), strict=True))
    room = [host for host in hosts for _ in range(GPUS // gpus)]
    packed = dict(zip(names, room, strict=False))
    figures = {"hosts": num_hosts, "prefill": num_prefill, "decode": num_decode, "gpus": gpus}
    figures["plan_s"] = median(took)
    for kind, placed in (("planned", planned), ("in_turn", turns), ("packed", packed)):
        figures[f"{kind}_s_per_gb"], figures[f"{kind}_same_host"] = cost_s(hosts, placed)
    return figures


def show(fleets: list[dict[str, float]]) -> None:
    """As docs/clusters/plan.md has it."""
    print(
        "| hosts | workers | seconds to plan | ms of links for a GB of KV: planned | in turn "
        "| packed |"
    )
    print("|---|---|---|---|---|---|")
    for each in fleets:
        workers = f"{each['prefill']} + {each['decode']}, {each['gpus']} GPUs each"
        costs = " | ".join(
            f"{each[f'{kind}_s_per_gb'] * 1e3:.0f} ({each[f'{kind}_same_host']:.0%} same host)"
            for kind in ("planned", "in_turn", "packed")
        )
        print(f"| {each['hosts']} | {workers} | {each['plan_s']:.3f} | {costs} |")


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of such a file again")
    given = parser.parse_args()
    if given.table:
        show(json.loads(given.table.read_bytes())["fleets"])
        return
    fleets = [measure(*fleet) for fleet in FLEETS]
    show(fleets)
    if given.json:
        machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "python": sys.version}
        text = json.dumps({"machine": machine, "fleets": fleets}, indent=1)
        given.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
