"""One link of two becomes worse: its alert is raised, and no other one.

A prefill worker and two decode workers, each in a network namespace of its own, embedded engine,
`tcp`, behind one gateway (`round_robin`). htb gives each of the two links `--rate` Mbit/s. Requests
of `--prompt-tokens` keep both in use. Once both links' usual times are known, one of them gets

    bandwidth   a tenth of its rate
    delay       20 ms more, by a TCP relay through which all its connections go from the start
    loss        1 % of the packets lost at its receiver (nftables), without segmentation offload

until that link's alert is firing on `/alerts` (`BatonLinkLoss` for loss, else `BatonLinkDrift`),
and for `--quiet` seconds more; then it is as before until the alert is resolved, as far as
`--limit` allows. That the fault happened is measured on connections beside the fleet's, or by the
kernel's counters (`link_faults.py`).

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
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dashboard_pictures import take_picture
from link_faults import (
    DelayRelay,
    Evidence,
    Link,
    less_bandwidth,
    lost_packets,
    shape,
)
from random_model import make_model
from run_record import write_record
from slow_link_fleet import (
    MODEL,
    NAMES,
    SLOWED,
    STEADY,
    Clients,
    Gateway,
    LinkTimes,
    start_far_fleet,
    start_near_fleet,
)

from baton.protocol.alerts import AlertName
from baton.testing.fleet import Fleet
from baton.testing.network_namespaces import NoNamespaceError, bridged_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    Fault = AbstractContextManager[Callable[[], Evidence]]

STARTED_AT = time.monotonic()
REPORTED_WITHIN_S = 6.0
"""The gateway reads workers' reports every 5 s."""
WHEN = ("before", "during")
PICTURED_AFTER_S = 65.0
"""Then the last minute, of which the page shows medians, is all of the fault."""
PICTURED = {
    AlertName.LINK_DRIFT: "drift of links",
    AlertName.LINK_LOSS: "lost TCP segments",
    AlertName.TRANSPORT_MISMATCH: "measured latency",
}


@dataclass(frozen=True)
class Outcome:
    """What one fault did.

    Periods in which a link was in use: means in ms, since the start and during the fault, and
    quantiles in seconds of the last minute, before the fault and at its end, as well as the share
    of TCP segments that were lost.
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
    lost_share_before: dict[str, float | None]
    lost_share_during: dict[str, float | None]
    others: list[str]
    resolved_after_s: float | None = None

    @property
    def is_right(self) -> bool:
        """Whether that alert was raised, and no other."""
        return self.evidence.happened and self.fired_after_s is not None and not self.others


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
    before, lost_before = gateway.times(), gateway.lost_shares()
    with fault as measure:
        began = time.monotonic()
        wait_until(is_firing, REPORTED_WITHIN_S)
        at_first = gateway.times()
        fired = wait_until(is_firing, min(options.within, left_s(options)))
        fired_after_s = None if fired is None else time.monotonic() - began
        evidence = measure()
        if options.screenshots and fired is not None:
            time.sleep(max(0.0, began + PICTURED_AFTER_S - time.monotonic()))
            path = options.screenshots / f"alert-{options.fault}.png"
            asyncio.run(take_picture(gateway.url, path, name, PICTURED[name]))
        ends_at = time.monotonic() + options.quiet
        while time.monotonic() < ends_at:
            is_firing()
            time.sleep(0.5)
        latest, lost_latest = gateway.times(), gateway.lost_shares()
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
        lost_before,
        lost_latest,
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
    alert = AlertName.LINK_LOSS if options.fault == "loss" else AlertName.LINK_DRIFT
    outcome = play(alert, fault, gateway, options)
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
            link.sender.send_single_packets()
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


def print_table(paths: list[Path]) -> None:
    """Of records, as docs/observability/alerts.md has it."""
    print("| fault | KV of a prompt | that it happened | alert after | other alerts |", end="")
    print(" segments lost | p50 of the link's use | p99 |")
    print("|---|---|---|---|---|---|---|---|")
    for path in paths:
        record = json.loads(path.read_text("utf-8"))
        it, evidence = record["outcome"], record["outcome"]["evidence"]
        fired = it["fired_after_s"]
        cells = (
            it["fault"],
            f"{8 * record['prompt_tokens']} KiB",
            f"{evidence['what']}: {evidence['before']:.3g} → {evidence['during']:.3g}",
            f"none in {record['within_s']:.0f} s" if fired is None else f"{fired:.0f} s",
            ", ".join(map(str.strip, it["others"])) or "none",
            _loss(it),
            _change(it, "p50"),
            _change(it, "p99"),
        )
        print("|", " | ".join(cells), "|")


def _change(outcome: dict[str, dict[str, dict[str, float]]], quantile: str) -> str:
    seconds = [outcome[f"recent_s_{when}"].get(SLOWED, {}).get(quantile) for when in WHEN]
    shown = (
        "-" if each is None else f"{each * 1e3:.{0 if each > 0.1 else 1}f}" for each in seconds
    )
    return " → ".join(shown) + " ms"


def _loss(outcome: dict[str, dict[str, float]]) -> str:
    shares = [outcome.get(f"lost_share_{when}", {}).get(SLOWED) for when in WHEN]
    return " → ".join("-" if each is None else f"{each:.2%}" for each in shares)


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
    parser.add_argument("--table", type=Path, nargs="+", help="print a table of such JSON files")
    options = parser.parse_args()
    if options.table:
        print_table(options.table)
        return
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    measure = measure_near if options.fault == "transport" else measure_far
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            fleet = Fleet(folder, environment)
            found = measure(stack, fleet, make_model(folder, MODEL), options)
            # Before the fleet ends: that takes seconds on a busy machine, and may fail.
            sizes = {"prompt_tokens": options.prompt_tokens, "within_s": options.within}
            write_record(options.json, **sizes, **found)
    except NoNamespaceError as exc:
        sys.exit(f"skipped: {exc}; run it as root, with iproute2")
    outcome = found["outcome"]
    assert isinstance(outcome, Outcome)
    if found["firing_before"] or not outcome.is_right:
        sys.exit(1)


if __name__ == "__main__":
    main()
