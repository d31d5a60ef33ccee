"""One link of two becomes slower: its alert is raised, and no other one.

A prefill worker and two decode workers, each in a network namespace of its own, embedded engine,
`tcp`, behind one gateway (`round_robin`). htb gives each of the two links `--rate` Mbit/s. Requests
of 64 tokens keep both in use. Once both links' usual times are known, one of them

    bandwidth   gets a tenth of its rate
    latency     gets 20 ms more (netem; left out where the kernel has none)

until `BatonLinkDrift` of that link is firing on `/alerts`, and for `--quiet` seconds more; then it
is as before until the alert is resolved. That the fault happened is read from the slowed link's own
transfers. Exit status 1: the alert was not raised within `--within`, or another one was.
Needs root and iproute2.

    python benchmarks/bench_slow_link.py --json benchmarks/results/slow-link.json   (2 to 3 minutes)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
from random_model import make_model
from run_record import write_record

from baton.protocol.alerts import AlertList, AlertName, AlertState
from baton.testing.fleet import Fleet, start_command
from baton.testing.network_namespaces import BridgedHost, NoNamespaceError, bridged_hosts, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NAMES = ("prefill", "decode-a", "decode-b")
STEADY, SLOWED = NAMES[1:]
MODEL = {"layers": 4, "hidden": 256, "heads": 8, "kv-heads": 8}
PROMPT_TOKENS = 64
SETTINGS: dict[str, object] = {
    "engine.num_threads": 1,
    "engine.dtype": "float32",
    "engine.num_blocks": 256,
    "transfer.transports": ["tcp"],
    "handoff.layer_batch_bytes": 0,
}
LEARN_WITHIN_S = 150.0
RESOLVED_WITHIN_S = 120.0
NUM_CLIENTS = 1
FAULT_RATIO = 1.5
"""At least so much slower are the transfers of a link that was slowed."""


@dataclass(frozen=True)
class Outcome:
    """What one fault did. `ratio`: the slowed link's times over what they were."""

    fault: str
    fired_after_s: float | None
    ratio: float | None
    others: list[str]
    resolved_after_s: float | None

    @property
    def is_right(self) -> bool:
        """Whether that alert was raised, and no other."""
        happened = self.ratio is not None and self.ratio >= FAULT_RATIO
        return happened and self.fired_after_s is not None and not self.others


def shape(hosts: Sequence[BridgedHost], rate: int) -> None:
    """One class of the prefill host for each decode host: 1:1, 1:2."""
    tc = ("tc", "-n", hosts[0].namespace)
    run(*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "9")
    run(*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:9", *limit(1000))
    for number, host in enumerate(hosts[1:], start=1):
        parent = ("dev", "eth0", "parent", "1:")
        run(*tc, "class", "add", *parent, "classid", f"1:{number}", *limit(rate))
        match = ("u32", "match", "ip", "dst", f"{host.address}/32", "flowid", f"1:{number}")
        run(*tc, "filter", "add", *parent, "protocol", "ip", *match)


def limit(rate: int) -> tuple[str, ...]:
    """Of one class, Mbit/s."""
    return ("htb", "rate", f"{rate}mbit", "burst", "16kb", "cburst", "16kb")


@contextmanager
def less_bandwidth(host: BridgedHost, rate: int) -> Iterator[None]:
    """A tenth of the slowed link's."""
    change = ("tc", "-n", host.namespace, "class", "change", "dev", "eth0", "parent", "1:")
    run(*change, "classid", "1:2", *limit(rate // 10))
    try:
        yield
    finally:
        run(*change, "classid", "1:2", *limit(rate))


@contextmanager
def more_latency(host: BridgedHost) -> Iterator[None]:
    """20 ms for each packet of the slowed link."""
    tc = ("tc", "-n", host.namespace, "qdisc")
    run(*tc, "add", "dev", "eth0", "parent", "1:2", "handle", "12:", "netem", "delay", "20ms")
    try:
        yield
    finally:
        run(*tc, "del", "dev", "eth0", "parent", "1:2", "handle", "12:")


def start_fleet(fleet: Fleet, hosts: Sequence[BridgedHost], model: Path) -> str:
    """The gateway's URL."""
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
    for worker in workers:
        worker.wait_ready()
    settings = {"router.policy": "round_robin", "gateway.mode": "push", "alerts.interval_s": 1}
    return fleet.start_gateway(workers[:1], workers[1:], settings=settings).url


class Clients:
    """Ask for one token of random prompts, until they are stopped."""

    def __init__(self, url: str) -> None:
        self._url, self._stop = url, threading.Event()
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
            prompt = [rng.randrange(300, 4000) for _ in range(PROMPT_TOKENS)]
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

    def links(self) -> dict[str, dict[str, object]]:
        """Drift of the prefill worker's links, by the decode worker."""
        with urllib.request.urlopen(f"{self.url}/debug/transfers", timeout=10) as reply:
            page = json.load(reply)
        return {
            each["peer"]: each["drift"] for each in page["links"] if each["worker"] == "prefill"
        }

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


EXPECTED = f"{AlertName.LINK_DRIFT} {SLOWED}"


def play(
    fault: str, slow: Iterator[None], gateway: Gateway, options: argparse.Namespace
) -> Outcome:
    """One fault, from its beginning to the end of its alert."""
    others: set[str] = set()

    def is_firing() -> bool:
        found = gateway.firing()
        others.update(found.keys() - {EXPECTED})
        return EXPECTED in found

    with slow:
        fired_after_s = wait_until(is_firing, options.within)
        wait_until(lambda: not is_firing() and fired_after_s is None, options.quiet)
        ratio = gateway.links()[SLOWED]["ratio"]
    resolved_after_s = wait_until(lambda: not is_firing(), RESOLVED_WITHIN_S)
    outcome = Outcome(
        fault,
        fired_after_s,
        ratio if isinstance(ratio, float) else None,
        sorted(others),
        resolved_after_s,
    )
    print(outcome, "as it should be" if outcome.is_right else "WRONG", flush=True)
    return outcome


def measure(options: argparse.Namespace) -> dict[str, object]:
    """The fleet, and its faults."""
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model(folder, MODEL)
        hosts = stack.enter_context(bridged_hosts(len(NAMES)))
        fleet = stack.enter_context(Fleet(folder, environment))
        shape(hosts, options.rate)
        gateway = Gateway(start_fleet(fleet, hosts, model))
        clients = stack.enter_context(Clients(gateway.url))

        def are_steady() -> bool:
            states = {peer: drift["state"] for peer, drift in gateway.links().items()}
            return states == {STEADY: "steady", SLOWED: "steady"}

        learned_after_s = wait_until(are_steady, LEARN_WITHIN_S)
        if learned_after_s is None:
            sys.exit(f"the links are not learned: {gateway.links()}; {clients.problem}")
        print(f"learned after {learned_after_s:.0f} s, {clients.num_answered} requests", flush=True)
        time.sleep(options.quiet)
        before = gateway.firing()
        outcomes = [
            play("bandwidth / 10", less_bandwidth(hosts[0], options.rate), gateway, options)
        ]
        try:
            outcomes.append(play("+20 ms", more_latency(hosts[0]), gateway, options))
        except subprocess.CalledProcessError as exc:
            print(f"left out: +20 ms: {exc.stderr.decode(errors='replace').strip()}")
        return {
            "learned_after_s": learned_after_s,
            "firing_before": sorted(before),
            "outcomes": outcomes,
        }


def main() -> None:
    """Measure; exit status 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=int, default=400, help="Mbit/s of each link")
    parser.add_argument("--within", type=float, default=60.0, help="seconds until the alert")
    parser.add_argument("--quiet", type=float, default=8.0, help="seconds without another alert")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        found = measure(options)
    except NoNamespaceError as exc:
        sys.exit(f"skipped: {exc}; run it as root, with iproute2")
    write_record(options.json, **found)
    outcomes = found["outcomes"]
    assert isinstance(outcomes, list)
    if found["firing_before"] or not all(each.is_right for each in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
