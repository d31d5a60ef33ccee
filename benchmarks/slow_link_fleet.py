"""The fleet of bench_slow_link.py: a prefill worker, two decode workers, a gateway, clients."""

from __future__ import annotations

import json
import random
import threading
import urllib.request
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

import msgspec

from baton.protocol.alerts import AlertList, AlertState
from baton.testing.fleet import Fleet, FleetProcess, start_command

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from baton.testing.network_namespaces import BridgedHost

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
NO_DRIFT = {"state": "unknown", "ratio": None}


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

    def lost_shares(self) -> dict[str, float | None]:
        """Of the prefill worker's TCP segments of the last minute, by the decode worker."""
        with urllib.request.urlopen(f"{self.url}/debug/transfers", timeout=10) as reply:
            page = json.load(reply)
        return {
            each["receiver"]: each["recent"]["lost_share"]
            for each in page["segments"]
            if each["sender"] == "prefill"
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
