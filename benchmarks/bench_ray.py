"""A fleet on a Ray cluster of three hosts: until it serves, until a lost worker is back?

    python benchmarks/bench_ray.py kill [--json benchmarks/results/ray.json]
    python benchmarks/bench_ray.py one_way …
    python benchmarks/bench_ray.py two_way …
    python benchmarks/bench_ray.py upgrade …
    python benchmarks/bench_ray.py head …
    python benchmarks/bench_ray.py --table benchmarks/results/ray.json

Needs root, iproute2 and Ray. The hosts are namespaces on this machine (baton.testing.ray_hosts):
one has Ray's head, the gateway and the prefill worker, each of the others a decode worker (embedded
engine, float32, the demo model). Each run starts all of it anew: `first_token_s` counts from the
first `ray start` to the first token of the first stream.

Then, under two clients that ask without a pause, one of the decode workers' hosts

    kill     loses power
    one_way  is cut off in one direction: nothing that it sends reaches another host
    two_way  is cut off in both

or, with `upgrade`, each process is replaced by `baton upgrade`, which takes `moved_s`; or, with
`head`, Ray's head (its GCS) is killed, for `HEAD_AWAY_S`, and a decode worker too, which is back
after `moved_s`.

`moved_s`: from the fault until the gateway uses the worker on another host. A partition is healed
`HEAL_AFTER_S` after that; `old_gone_s`: from there until the old worker's port refuses connections.
A client error is any answer but 200, a stream without its end, or other tokens than were known.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import sys
import time
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from baton.protocol.members import decode_members
from baton.testing.greedy_load import GreedyLoad
from baton.testing.ray_hosts import ray_cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.testing.ray_hosts import IsolatedHost, RayCluster

LABELS = (
    {"rack": "r1", "host": "h1", "kind": "head"},
    {"rack": "r2", "host": "h2", "kind": "worker"},
    {"rack": "r3", "host": "h3", "kind": "worker"},
)
FLEET = "bench"
FAULTS = ("kill", "one_way", "two_way", "upgrade", "head")
PROMPTS = tuple(f"{word} by the sea, and those who lived in it, " * 6 for word in "AB")
MAX_TOKENS = 64
SETTINGS = (
    "engine.dtype=float32",
    "engine.num_threads=1",
    'ray.gateway_labels=["kind=head"]',
    'ray.workers.prefill.labels=["kind=head"]',
    'ray.workers.decode.labels=["kind=worker"]',
    "ray.workers.decode.placement=spread",
)
UP_TIMEOUT_S = 120.0
MOVED_TIMEOUT_S = 90.0
GONE_TIMEOUT_S = 60.0
HEAL_AFTER_S = 5.0
HEAD_AWAY_S = 75.0
"""Longer than Ray's default, after which it ends on all hosts."""


@dataclass
class Result:
    """One run; seconds, and None for what did not come about in time."""

    fault: str
    ray_s: float
    fleet_s: float
    first_token_s: float
    moved_s: float | None = None
    old_gone_s: float | None = None
    num_answers: int = 0
    num_errors: int = 0
    errors: tuple[str, ...] = ()
    longest_gap_s: float = 0.0


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float | None:
    """Seconds until it holds."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > timeout_s:
            return None
        time.sleep(0.05)
    return time.monotonic() - begun


def start_fleet(cluster: RayCluster) -> str:
    """Start it as a user does: its gateway's URL."""
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    done = cluster.head.run(
        *(sys.executable, "-m", "baton.cli", "up", "--on", "ray", "--fleet", FLEET),
        *("--ray-address", cluster.address, "--decode", "2", "--insecure", *words),
        timeout_s=UP_TIMEOUT_S,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return next(word for word in done.stdout.split() if word.startswith("http://"))


def workers_in_use(cluster: RayCluster, url: str) -> set[str]:
    """The workers that the gateway's file names, and that are up as the gateway finds them."""
    path = cluster.head.folder / f"baton/ray-{FLEET}-gateway-0/members.json"
    listed = {each.url for each in decode_members(path.read_bytes()).workers}
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    up = [line for line in lines if line.startswith("baton_gateway_worker_up{")]
    return {
        worker for worker in listed if any(worker in line and line.endswith(" 1.0") for line in up)
    }


def is_listening(url: str) -> bool:
    """Whether a port takes connections, from this process, which no partition concerns."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), 1.0).close()
    except OSError:
        return False
    return True


def run_fault(cluster: RayCluster, fault: str, result: Result, load: GreedyLoad) -> None:
    """Have it happen under load, and wait for what follows."""
    if fault == "upgrade":
        run_upgrade(cluster, result, load)
        return
    if fault == "head":
        run_without_head(cluster, result, load)
        return
    before = workers_in_use(cluster, load.url)
    host, lost = _choose(cluster, before)
    with load.running(), ExitStack() as partition:
        wait_until(lambda: load.num_answers >= len(PROMPTS), MOVED_TIMEOUT_S)
        if fault == "kill":
            host.cut_power()
        else:
            partition.enter_context(cluster.partitioned(host, both_ways=fault == "two_way"))
        result.moved_s = wait_until(
            lambda: bool(workers_in_use(cluster, load.url) - before), MOVED_TIMEOUT_S
        )
        time.sleep(HEAL_AFTER_S)
        partition.close()
        result.old_gone_s = wait_until(lambda: not is_listening(lost), GONE_TIMEOUT_S)
        answered = load.num_answers
        wait_until(lambda: load.num_answers > answered + len(PROMPTS), MOVED_TIMEOUT_S)


def run_upgrade(cluster: RayCluster, result: Result, load: GreedyLoad) -> None:
    """Replace each process while clients ask."""
    words = (sys.executable, "-m", "baton.cli", "upgrade", "--on", "ray", "--fleet", FLEET)
    cluster.head.environment["RAY_ADDRESS"] = cluster.address
    with load.running():
        begun = time.monotonic()
        done = cluster.head.run(*words, timeout_s=UP_TIMEOUT_S)
        result.moved_s = time.monotonic() - begun
    print(done.stdout + done.stderr, file=sys.stderr)
    if done.returncode:
        raise SystemExit("the upgrade failed")


def run_without_head(cluster: RayCluster, result: Result, load: GreedyLoad) -> None:
    """Kill Ray's head and then a worker, while clients ask."""
    before = workers_in_use(cluster, load.url)
    with load.running():
        begun = time.monotonic()
        _kill("gcs_server", cluster.head.folder)
        _kill("baton.cli\0worker", cluster.hosts[-1].folder)
        wait_until(lambda: workers_in_use(cluster, load.url) != before, MOVED_TIMEOUT_S)
        result.moved_s = wait_until(
            lambda: workers_in_use(cluster, load.url) == before, MOVED_TIMEOUT_S
        )
        time.sleep(max(0.0, begun + HEAD_AWAY_S - time.monotonic()))
        if workers_in_use(cluster, load.url) != before:
            raise SystemExit("workers are missing")


def _kill(program: str, folder: Path) -> None:
    """End the one process with these words in its command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes()
            if program.encode() in line and f"{folder}/".encode() in line:
                found.append(int(path.parent.name))
    if len(found) != 1:
        raise SystemExit(f"{len(found)} processes are {program!r}")
    os.kill(found[0], signal.SIGKILL)


def _choose(cluster: RayCluster, urls: set[str]) -> tuple[IsolatedHost, str]:
    """The last host with a worker, and that worker's URL."""
    for host in reversed(cluster.hosts):
        for url in urls:
            if urlsplit(url).hostname == host.address:
                return host, url
    raise SystemExit("no host has a worker")


def measure(fault: str) -> Result:
    """One run."""
    with ray_cluster(LABELS) as cluster:
        begun = time.monotonic()
        cluster.start_ray()
        ray_s = time.monotonic() - begun
        url = start_fleet(cluster)
        fleet_s = time.monotonic() - begun - ray_s
        load = GreedyLoad(url, PROMPTS, MAX_TOKENS)
        load.learn()
        first_token_s = ray_s + fleet_s + load.first_token_s
        result = Result(fault, round(ray_s, 2), round(fleet_s, 2), round(first_token_s, 2))
        print(f"first token after {first_token_s:.1f} s", file=sys.stderr)
        run_fault(cluster, fault, result, load)
        result.num_answers, result.num_errors = load.num_answers, len(load.failures)
        result.errors = tuple(sorted(set(load.failures)))[:5]
        result.longest_gap_s = load.longest_gap_s
        return result


def table(results: list[dict[str, object]]) -> str:
    """The page's table: one row for the start, one for each fault."""
    starts = sorted(float(str(each["first_token_s"])) for each in results)
    rows = [f"| from `ray start` on 3 hosts to the first token | {_range(starts)} | |"]
    names = {
        "kill": "a host loses power: its worker serves on another host",
        "one_way": "a host is cut off in one direction: the same",
        "two_way": "a host is cut off in both: the same",
        "head": "Ray's head is away for 75 s, and a decode worker is killed: it serves again",
        "upgrade": "`baton upgrade` of four processes, one after the other",
    }
    for each in results:
        errors = f"{each['num_errors']} of {each['num_answers']}"
        rows.append(f"| {names[str(each['fault'])]} | {_seconds(each['moved_s'])} | {errors} |")
        if each["fault"] in {"one_way", "two_way"}:
            gone = _seconds(each["old_gone_s"])
            rows.append(f"| … from its end until the old worker is gone | {gone} | |")
    return "\n".join(rows)


def _range(values: list[float]) -> str:
    return " to ".join(f"{value:.1f}" for value in dict.fromkeys((values[0], values[-1])))


def _seconds(value: object) -> str:
    return "not in time" if value is None else f"{float(str(value)):.1f}"


def main() -> None:
    """Measure one fault, or print the table of what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("fault", nargs="?", choices=FAULTS)
    parser.add_argument("--json", type=Path, help="replace this fault's result in that file")
    parser.add_argument("--table", type=Path, help="print the table of that file's results")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.table.read_text("utf-8"))["results"]))
        return
    if given.fault is None:
        parser.error("name a fault, or --table FILE")
    result = asdict(measure(given.fault))
    print(json.dumps(result, indent=1))
    if given.json:
        old = json.loads(given.json.read_text("utf-8"))["results"] if given.json.exists() else []
        results = [each for each in old if each["fault"] != given.fault] + [result]
        results.sort(key=lambda each: FAULTS.index(each["fault"]))
        machine = {"python": platform.python_version(), "kernel": platform.release()}
        text = json.dumps({"machine": machine, "results": results}, indent=1)
        given.json.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
