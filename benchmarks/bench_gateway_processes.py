"""What do 1, 2 and 4 gateway processes on one port carry?

    python benchmarks/bench_gateway_processes.py [--repetitions 5] [--json FILE]
    python benchmarks/bench_gateway_processes.py --table benchmarks/results/gateway-processes.json

`baton gateway --gateways N` in front of scripted workers, in processes of their own, with the two
loads of `bench_gateway.py`: requests that are answered in one chunk, and streams of events at a
fixed rate. All arms run at the same time, and are measured in turns.

What is read is the processor time of the gateway's processes alone: clients and workers, which
share the machine with them, are taken out. *For each core* is what one second of it carries. N
processes on N cores carry N times that, as far as the load is spread evenly: *busiest* is the share
of the processor time that the busiest process spent, of which 1 / N is even. Streams are measured
twice: the same number in all, so that one process of four has a fourth of them, and the same number
for each process. A process that has few streams wakes up for fewer events at once.

Hit rate: `baton route replay`, the policies' own code in virtual time, deterministic: tokens of
prompts that were cached where they were to be computed, by the number of gateways.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from control_gateway import WHOLE, upstreams
from control_load import run_load, run_streams

from baton.launch.ports import find_free_ports
from baton.telemetry.process_status import Ready, read_status

NUM_PROCESSES = (1, 2, 4)
WORKLOADS = {
    "multi-turn": ("--concurrency", "8"),
    "shared-prefix": ("--prefixes", "30", "--prefix-len", "2048", "--rate", "6"),
}
POLICIES = ("round_robin", "prefix", "cost")
NUM_REPLAYED = 1500
UNITS = {
    "request": "requests",
    "event": "SSE events of all streams",
    "event_each": "SSE events, a fourth of the streams for each process",
}
KEY = (b"k" * 32).hex()


class Gateway:
    """`baton gateway` with so many processes, in front of one worker of both roles."""

    def __init__(self, num_processes: int, worker: str) -> None:
        port, management = find_free_ports("127.0.0.1", 1)[0], find_free_ports("127.0.0.1", 8)[0]
        reading, writing = os.pipe()
        command = ["baton", "gateway", "--worker", worker, "--port", str(port)]
        command += ["--gateways", str(num_processes), "--management-port", str(management)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "baton.cli", *command[1:], "--status-fd", str(writing)],
            env={**os.environ, "BATON_CLUSTER_KEY": KEY},
            pass_fds=(writing,),
        )
        os.close(writing)
        self._statuses = os.fdopen(reading, "rb")
        found = (read_status(line) for line in self._statuses)
        ready = next((status for status in found if isinstance(status, Ready)), None)
        if ready is None:
            raise RuntimeError("the gateway ended before it was ready; its lines are above")
        self.url, self.num_processes = ready.url, num_processes

    def cpu_s(self) -> dict[int, float]:
        """User and system time of each process that serves, by its id."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {served: _cpu_s(served) for served in map(int, children or [str(pid)])}

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)
        self._statuses.close()


def _cpu_s(pid: int) -> float:
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def count_units(load: str, gateway: Gateway, args: argparse.Namespace) -> int:
    """Requests that were answered, or events that came."""
    if load == "request":
        body = json.dumps(WHOLE).encode()
        return len(run_load(gateway.url, [body], args.concurrency, args.duration).latencies_s)
    fields = {**WHOLE, "stream": True, "max_tokens": args.events}
    share = gateway.num_processes / max(NUM_PROCESSES) if load == "event_each" else 1.0
    num_streams = round(args.streams * share)
    return run_streams(gateway.url, json.dumps(fields).encode(), num_streams).num_events


def measure(gateways: list[Gateway], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run both loads in front of every arm, interleaved."""
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for repetition in range(-1, args.repetitions):  # one to warm up
        for gateway in gateways if repetition % 2 else reversed(gateways):
            for load in UNITS:
                before = gateway.cpu_s()
                units = count_units(load, gateway, args)
                spent = [after - before[pid] for pid, after in gateway.cpu_s().items()]
                if repetition >= 0:
                    sample = units / sum(spent), max(spent) / sum(spent)
                    samples.setdefault((load, gateway.num_processes), []).append(sample)
    return [
        {
            "load": load,
            "num_processes": gateway.num_processes,
            "per_core_s": [carried for carried, _ in samples[load, gateway.num_processes]],
            "busiest": [busiest for _, busiest in samples[load, gateway.num_processes]],
        }
        for load in UNITS
        for gateway in gateways
    ]


def replay(workload: str, num_gateways: int) -> dict[str, float]:
    """The share of prompt tokens that were found cached, by policy."""
    policies = [word for policy in POLICIES for word in ("--policy", policy)]
    command = ["route", "replay", "--workload", workload, *WORKLOADS[workload], *policies]
    command += ["--requests", str(NUM_REPLAYED), "--gateways", str(num_gateways), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "baton.cli", *command], check=True, capture_output=True, timeout=120
    )
    return {
        each["policy"]: each["summary"]["saved_tokens"] / each["summary"]["prompt_tokens"]
        for each in json.loads(done.stdout)["policies"]
    }


def print_table(result: dict[str, Any]) -> None:
    """As docs/benchmarks.md has it."""
    ones = {
        row["load"]: statistics.median(row["per_core_s"])
        for row in result["loads"]
        if row["num_processes"] == 1
    }
    print("| load | processes | for each core and second | of one process | N cores | busiest |")
    print("|---|---|---|---|---|---|")
    for row in result["loads"]:
        num, each = row["num_processes"], statistics.median(row["per_core_s"])
        share, busiest = each / ones[row["load"]], statistics.median(row["busiest"])
        print(
            f"| {UNITS[row['load']]} | {num} | {each:,.0f} | {share:.0%} | {num * each:,.0f} | "
            f"{busiest:.0%} |"
        )
    print(f"\n| saved prompt tokens | {' | '.join(f'gateways: {n}' for n in NUM_PROCESSES)} |")
    print("|---|" + "---|" * len(NUM_PROCESSES))
    for workload, by_number in result["saved"].items():
        for policy in POLICIES:
            found = [f"{by_number[str(num)][policy]:.1%}" for num in NUM_PROCESSES]
            print(f"| {workload}, `{policy}` | {' | '.join(found)} |")


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--duration", type=float, default=2.0, help="seconds of requests")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table:
        print_table(json.loads(args.table.read_text()))
        return
    gateways: list[Gateway] = []
    with upstreams(max(os.sched_getaffinity(0)), KEY) as (_, workers, _):
        try:
            gateways += (Gateway(num_processes, workers[0]) for num_processes in NUM_PROCESSES)
            time.sleep(2.0)  # each process has found its worker
            loads = measure(gateways, args)
        finally:
            for gateway in gateways:
                gateway.stop()
    saved = {
        workload: {str(num): replay(workload, num) for num in NUM_PROCESSES}
        for workload in WORKLOADS
    }
    result = {
        "setup": {k: v for k, v in vars(args).items() if k not in {"json", "table"}},
        "loads": loads,
        "saved": saved,
    }
    print_table(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
