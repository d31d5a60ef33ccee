"""One link of two becomes worse: its alert is raised, and no other one.

A prefill worker and two decode workers, each in a network namespace of its own, embedded engine,
`tcp`, behind one gateway (`round_robin`). htb gives each of the two links `--rate` Mbit/s. Requests
of `--prompt-tokens` keep both in use. Once both links' usual times are known, one of them has the fault

    bandwidth   a tenth of its rate
    delay       20 ms more, by a TCP relay through which all its connections go from the start
    loss        1 % of the packets lost at its receiver (nftables), without segmentation offload

until `BatonLinkDrift` of that link is firing on `/alerts`, and for `--quiet` seconds more; then it
is as before until the alert is resolved, as far as `--limit` allows. That the fault happened is
measured on connections beside the fleet's, or by the kernel's counters (`link_faults.py`).

    transport   no namespaces: workers of one host, and one of the two decode workers has only
                `tcp`, until `BatonTransportMismatch` of that pair is firing

Exit status 1: the alert was not raised within `--within`, or another one was, or no fault happened.
Needs root, iproute2 and, for delay and loss, nftables; `--screenshots` needs chromium.

    python benchmarks/bench_slow_link.py --fault bandwidth \
        --json benchmarks/results/slow-link-bandwidth.json   (under 3 minutes)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
from dashboard_pictures import take_picture
from link_faults import (
    DelayRelay,
    Evidence,
    Link,
    less_bandwidth,
    lost_packets,
    send_single_packets,
    shape,
)
from random_model import make_model
from run_record import write_record

from baton.protocol.alerts import AlertList, AlertName, AlertState
from baton.testing.fleet import Fleet, FleetProcess, start_command
from baton.testing.network_namespaces import BridgedHost, NoNamespaceError, bridged_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    Fault = AbstractContextManager[Callable[[], Evidence]]

STARTED_AT = time.monotonic()
NAMES = ("prefill", "decode-a", "decode-b")
STEADY, SLOWED = NAMES[1:]
MODEL = {"layers": 4, "hidden": 256, "heads": 8, "kv-heads": 8}
SETTINGS: dict[str, object] = {
    "engine.num_threads": 1,
    "engine.dtype": "float32",
    "engine.num_blocks": 256,
    "transfer.transports": ["tcp"],
    "handoff.layer_batch_bytes": 0,
}
NUM_CLIENTS = 1
REPORTED_WITHIN_S = 6.0
"""The gateway reads workers' reports every 5 s."""
NO_DRIFT = {"state": "unknown", "ratio": None}


PICTURED = {
    AlertName.LINK_DRIFT: "drift of links",
    AlertName.TRANSPORT_MISMATCH: "time for each MiB, p50",
}


@dataclass(frozen=True)
class LinkTimes:
    """Transfers of one link. `ratio`: time of the latest ones over that of the first ones.

    `recent_s`: quantiles of the last minute.
    """

    num: int
    seconds: float
    ratio: float | None
    recent_s: dict[str, float | None]

    def mean_ms_since(self, before: LinkTimes) -> float | None:
        """Of transfers that ended since."""
        num = self.num - before.num
        return 1e3 * (self.seconds - before.seconds) / num if num else None


@dataclass(frozen=True)
class Outcome:
    """What one fault did.

    Times of transfers: means in ms, since the start and during the fault, and quantiles in seconds
    of the last minute, before the fault and at its end.
    """

    fault: str
    evidence: Evidence
    alert: str
    fired_after_s: float | None
    ratios: dict[str, float | None]
    mean_ms_before: dict[str, float | None]
    mean_ms_during: dict[str, float | None]
    recent_s_before: dict[str, dict[str, float | None]]
    recent_s_during: dict[str, dict[str, float | None]]
    others: list[str]
    resolved_after_s: float | None = None

    @property
    def is_right(self) -> bool:
        """Whether that alert was raised, and no other."""
        return self.evidence.happened and self.fired_after_s is not None and not self.others


def start_far_fleet(fleet: Fleet, hosts: Sequence[BridgedHost], model: Path) -> str:
    """Each worker on a host of its own; the gateway's URL."""
    workers = []
    for name, host in zip(NAMES, hosts, strict=True):
        own: dict[str, object] = {
            "worker.host": host.address,
            "worker.handoff_host": host.address,
            "worker.topology": f"zone/rack/{name}",
            "worker.model": str(model),
        }
        fleet.start = partial(start_command, prefix=host.prefix)
        workers.append(fleet.start_worker(name, name.partition("-")[0], SETTINGS | own))
    fleet.start = start_command
    return start_gateway(fleet, workers)


def start_near_fleet(fleet: Fleet, model: Path) -> str:
    """All on one host, where the slowed one has only `tcp`; the gateway's URL."""
    workers = []
    for name in NAMES:
        own: dict[str, object] = {
            "worker.topology": "zone/rack/host",
            "worker.model": str(model),
            "transfer.transports": ["tcp"] if name == SLOWED else ["shared", "tcp"],
            "transfer.choice": "listed",
        }
        workers.append(fleet.start_worker(name, name.partition("-")[0], SETTINGS | own))
    return start_gateway(fleet, workers)


def start_gateway(fleet: Fleet, workers: list[FleetProcess]) -> str:
    """Its URL, once all are ready."""
    for worker in workers:
        worker.wait_ready()
    settings = {"router.policy": "round_robin", "gateway.mode": "push", "alerts.interval_s": 1}
    return fleet.start_gateway(workers[:1], workers[1:], settings=settings).url


class Clients:
    """Ask for one token of random prompts, until they are stopped."""

    def __init__(self, url: str, prompt_tokens: int) -> None:
        self._url, self._stop = url, threading.Event()
        self._prompt_tokens = prompt_tokens
        self._threads = [
            threading.Thread(target=self._ask, args=(seed,), daemon=True)
            for seed in range(NUM_CLIENTS)
        ]
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as reply:
            self._model = json.load(reply)["data"][0]["id"]
        self.num_answered = 0
        self.problem = ""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            prompt = [rng.randrange(300, 4000) for _ in range(self._prompt_tokens)]
            body = {"model": self._model, "prompt": prompt, "max_tokens": 1}
            request = urllib.request.Request(
                f"{self._url}/v1/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=30) as reply:
                    reply.read()
                self.num_answered += 1
            except OSError as exc:
                self.problem = str(exc)


class Gateway:
    """What the gateway reports of links and alerts."""

    def __init__(self, url: str) -> None:
        self.url = url

    def links(self) -> dict[str, tuple[str, LinkTimes]]:
        """State and times of the prefill worker's links, by the decode worker."""
        with urllib.request.urlopen(f"{self.url}/debug/transfers", timeout=10) as reply:
            page = json.load(reply)
        found = {}
        for each in page["links"]:
            if each["worker"] == "prefill":
                total, drift = each["total"], each["drift"] or NO_DRIFT
                times = LinkTimes(
                    total["num"],
                    total["observed_s"],
                    drift["ratio"],
                    each["recent"]["transfer_s"],
                )
                found[each["peer"]] = drift["state"], times
        return found

    def transports(self) -> dict[str, set[str]]:
        """What carried KV to each decode worker."""
        with urllib.request.urlopen(f"{self.url}/debug/transfers", timeout=10) as reply:
            page = json.load(reply)
        found: dict[str, set[str]] = {}
        for each in page["handoffs"]:
            found.setdefault(each["decode"], set()).add(each["transport"])
        return found

    def times(self) -> dict[str, LinkTimes]:
        """Of both links."""
        return {peer: times for peer, (_, times) in self.links().items()}

    def firing(self) -> dict[str, str]:
        """Names and summaries of the alerts that are firing, by their label `to`, or name."""
        with urllib.request.urlopen(f"{self.url}/alerts", timeout=10) as reply:
            page = msgspec.json.decode(reply.read(), type=AlertList)
        return {
            f"{each.alert} {each.labels.get('to', '')}": each.summary
            for each in page.alerts
            if each.state is AlertState.FIRING
        }


def wait_until(condition: Callable[[], bool], within_s: float) -> float | None:
    """Seconds until it holds; None: it did not."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > within_s:
            return None
        time.sleep(0.5)
    return time.monotonic() - began


def left_s(options: argparse.Namespace) -> float:
    """Of `--limit`."""
    return max(0.0, STARTED_AT + options.limit - time.monotonic())


def play(name: AlertName, fault: Fault, gateway: Gateway, options: argparse.Namespace) -> Outcome:
    """One fault, from its beginning to the end of its alert."""
    expected, others = f"{name} {SLOWED}", set[str]()

    def is_firing() -> bool:
        found = gateway.firing()
        others.update(found.keys() - {expected})
        return expected in found

    nothing = LinkTimes(0, 0.0, None, {})
    before = gateway.times()
    with fault as measure:
        began = time.monotonic()
        wait_until(is_firing, REPORTED_WITHIN_S)
        at_first = gateway.times()
        fired = wait_until(is_firing, min(options.within, left_s(options)))
        fired_after_s = None if fired is None else time.monotonic() - began
        evidence = measure()
        if options.screenshots and fired is not None:
            path = options.screenshots / f"alert-{options.fault}.png"
            asyncio.run(take_picture(gateway.url, path, name, PICTURED[name]))
        ends_at = time.monotonic() + options.quiet
        while time.monotonic() < ends_at:
            is_firing()
            time.sleep(0.5)
        latest = gateway.times()
    outcome = Outcome(
        options.fault,
        evidence,
        expected,
        fired_after_s,
        {peer: times.ratio for peer, times in latest.items()},
        {peer: times.mean_ms_since(nothing) for peer, times in before.items()},
        {peer: times.mean_ms_since(at_first.get(peer, nothing)) for peer, times in latest.items()},
        {peer: times.recent_s for peer, times in before.items()},
        {peer: times.recent_s for peer, times in latest.items()},
        sorted(others),
    )
    print(outcome, "as it should be" if outcome.is_right else "WRONG", flush=True)
    return outcome


def measure_far(
    stack: ExitStack, fleet: Fleet, model: Path, options: argparse.Namespace
) -> dict[str, object]:
    """A link in a namespace that becomes worse."""
    hosts = stack.enter_context(bridged_hosts(len(NAMES)))
    link = shape(hosts, options.rate)[NAMES.index(SLOWED) - 1]
    fault = prepare_fault(options.fault, link, stack)
    stack.enter_context(fleet)
    gateway = Gateway(start_far_fleet(fleet, hosts, model))
    clients = stack.enter_context(Clients(gateway.url, options.prompt_tokens))

    def are_steady() -> bool:
        states = {peer: state for peer, (state, _) in gateway.links().items()}
        return states == {STEADY: "steady", SLOWED: "steady"}

    learned_after_s = wait_until(are_steady, left_s(options) / 2)
    if learned_after_s is None:
        sys.exit(f"the links are not learned: {gateway.links()}; {clients.problem}")
    print(f"learned after {learned_after_s:.0f} s, {clients.num_answered} requests", flush=True)
    time.sleep(options.quiet)
    before = gateway.firing()
    outcome = play(AlertName.LINK_DRIFT, fault, gateway, options)
    if outcome.fired_after_s is not None:
        expected = outcome.alert
        resolved = wait_until(lambda: expected not in gateway.firing(), left_s(options))
        outcome = replace(outcome, resolved_after_s=resolved)
    return {
        "learned_after_s": learned_after_s,
        "firing_before": sorted(before),
        "outcome": outcome,
    }


def prepare_fault(name: str, link: Link, stack: ExitStack) -> Fault:
    """What the link needs before its connections are made, and the fault."""
    match name:
        case "bandwidth":
            return less_bandwidth(link)
        case "delay":
            return stack.enter_context(DelayRelay(link)).delayed()
        case _:
            send_single_packets(link)
            return lost_packets(link)


def measure_near(
    stack: ExitStack, fleet: Fleet, model: Path, options: argparse.Namespace
) -> dict[str, object]:
    """TCP between two workers that share memory."""
    stack.enter_context(fleet)
    gateway = Gateway(start_near_fleet(fleet, model))
    before = gateway.firing()
    stack.enter_context(Clients(gateway.url, options.prompt_tokens))
    outcome = play(AlertName.TRANSPORT_MISMATCH, forced_tcp(gateway), gateway, options)
    return {"firing_before": sorted(before), "outcome": outcome}


@contextmanager
def forced_tcp(gateway: Gateway) -> Iterator[Callable[[], Evidence]]:
    """It is there from the start; the transports are what the workers report of their handoffs."""

    def measure() -> Evidence:
        used = gateway.transports()
        is_forced = used == {STEADY: {"shared"}, SLOWED: {"tcp"}}
        return Evidence(f"transports {used}", 0.0, 1.0, is_forced)

    yield measure


def main() -> None:
    """Measure; exit status 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    faults = ("bandwidth", "delay", "loss", "transport")
    parser.add_argument("--fault", choices=faults, default="bandwidth")
    parser.add_argument("--rate", type=int, default=400, help="Mbit/s of each link")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="8 KiB of KV for each")
    parser.add_argument("--within", type=float, default=60.0, help="seconds until the alert")
    parser.add_argument("--quiet", type=float, default=8.0, help="seconds without another alert")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds in all")
    parser.add_argument("--screenshots", type=Path, help="folder for a picture of the dashboard")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    measure = measure_near if options.fault == "transport" else measure_far
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            fleet = Fleet(folder, environment)
            found = measure(stack, fleet, make_model(folder, MODEL), options)
            # Before the fleet ends: that takes seconds on a busy machine, and may fail.
            write_record(options.json, **found)
    except NoNamespaceError as exc:
        sys.exit(f"skipped: {exc}; run it as root, with iproute2")
    outcome = found["outcome"]
    assert isinstance(outcome, Outcome)
    if found["firing_before"] or not outcome.is_right:
        sys.exit(1)


if __name__ == "__main__":
    main()
