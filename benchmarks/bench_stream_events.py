"""What an SSE event costs the gateway and its worker: over one connection, or one for each stream.

    python benchmarks/bench_stream_events.py [--rounds 5] [--streams 16 64 256] [--json FILE]

The gateway on the first core; a scripted worker on a Baton worker's HTTP server, which gives every
stream an event in each of its 50 steps a second, and the client on the last. `proxy` copies bytes
from the same worker (`plain_proxy.py`). `sends alone` is the least that is possible: a process that
gives its clients the same events, a `send` each, and does nothing else (`plain_sender.py`, its own
worker). Before a load, one like it opens all connections. CPU is what all threads of a process
took, over the events that the client got. Configurations alternate, in the other order every second
round; figures are medians of the rounds, with the least and most.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
from control_fleets import pin
from control_gateway import EVENT, EVENT_RATE_HZ, WHOLE, cpu_s_of, upstreams
from control_load import run_streams
from plain_proxy import plain_proxy
from plain_sender import plain_sender
from rich.console import Console
from rich.table import Table

from baton.rig.machine import describe_machine
from baton.testing.fleet import Fleet

WARM_UP_EVENTS = 20
console = Console(width=None if sys.stdout.isatty() else 150)


class Served(NamedTuple):
    """One configuration: where clients ask, and the processes that serve them."""

    url: str
    gateway: int
    worker: int


@dataclass(frozen=True)
class Sample:
    """One load. CPU in microseconds for each event."""

    configuration: str
    num_streams: int
    gateway_us: float
    worker_us: float
    gateway_share: float
    """Of its core."""


def measure(name: str, served: Served, num_streams: int, num_events: int) -> Sample:
    """One load; what its connections cost is not counted."""
    for count, is_counted in ((WARM_UP_EVENTS, False), (num_events, True)):
        fields = {**WHOLE, "stream": True, "max_tokens": count}
        before = cpu_s_of(served.gateway), cpu_s_of(served.worker)
        done = run_streams(served.url, json.dumps(fields).encode(), num_streams)
        if is_counted:
            gateway_s = cpu_s_of(served.gateway) - before[0]
            worker_s = cpu_s_of(served.worker) - before[1]
    return Sample(
        name,
        num_streams,
        gateway_us=1e6 * gateway_s / done.num_events,
        worker_us=1e6 * worker_s / done.num_events,
        gateway_share=gateway_s / done.wall_s,
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--events", type=int, default=250, help="of each stream in each load")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cores, samples = sorted(os.sched_getaffinity(0)), list[Sample]()
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = stack.enter_context(Fleet(folder, environment))
        found = start(stack, fleet, cores)
        for number in range(args.rounds):
            for num_streams in args.streams:
                for name in list(found) if number % 2 else reversed(found):
                    console.log(f"round {number + 1}, {num_streams} streams: {name}")
                    samples.append(measure(name, found[name], num_streams, args.events))
    render(samples, list(found))
    if args.json is not None:
        report = {
            "command": " ".join(sys.argv),
            "machine": msgspec.to_builtins(describe_machine()),
            "samples": [asdict(sample) for sample in samples],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def start(stack: ExitStack, fleet: Fleet, cores: list[int]) -> dict[str, Served]:
    """All configurations, pinned."""
    key, found = fleet.environment["BATON_CLUSTER_KEY"], dict[str, Served]()
    url, pid = stack.enter_context(plain_sender(EVENT, EVENT_RATE_HZ))
    found["sends alone"] = Served(url, pid, pid)
    for words, multiplexes in (("a connection each", False), ("one connection", True)):
        plain, tls, worker = stack.enter_context(upstreams(cores[-1], key, multiplexes=multiplexes))
        if not multiplexes:
            url, pid = stack.enter_context(plain_proxy(plain[0]))
            found["proxy"] = Served(url, pid, worker)
        for suffix, kind, urls in (("", "off", plain), (", TLS", "control", tls)):
            settings: dict[str, object] = {"security.tls": kind, "gateway.workers": urls[:1]}
            gateway = fleet.start_gateway([], [], settings=settings)
            found[words + suffix] = Served(gateway.url, gateway.pid, worker)
    time.sleep(1.0)
    for served in found.values():
        pin(served.gateway, {cores[0]})
    os.sched_setaffinity(0, {cores[-1]})
    stack.callback(os.sched_setaffinity, 0, set(cores))
    return found


def render(samples: list[Sample], names: list[str]) -> None:
    """A row for each configuration and number of streams."""
    table = Table(title="CPU of an SSE event, 50 a second and stream")
    for column in ("streams", "configuration", "gateway, us", "worker, us", "gateway's core"):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    for num_streams in dict.fromkeys(sample.num_streams for sample in samples):
        for name in names:
            here = [s for s in samples if (s.num_streams, s.configuration) == (num_streams, name)]
            table.add_row(
                str(num_streams),
                name,
                spread([s.gateway_us for s in here]),
                spread([s.worker_us for s in here]),
                f"{100 * median(s.gateway_share for s in here):.0f} %",
            )
    console.print(table)


def spread(values: list[float]) -> str:
    """Median, least and most."""
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
