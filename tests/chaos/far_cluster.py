"""A prefill worker, a decode worker and a gateway on three hosts, whose transports have failpoints.

The hosts are network namespaces on one bridge; this process reaches all of them.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.testing.fleet import Fleet
from baton.testing.network_namespaces import BridgedHost, NoNamespaceError, bridged_hosts
from tests.chaos import failpoints
from tests.chaos.clients import Prompts
from tests.chaos.conftest import GATEWAY, KEY, ROLES, SEED, ChaosCluster, Pair
from tests.chaos.failpoints import Failpoint
from tests.preloaded import start_preloaded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.config.sections import Role
    from baton.testing.fleet import FleetProcess

ABANDON_AFTER_S = 3.0
HANDOFF_TIMEOUT_S = 8.0
STEP_TOKENS = 48
"""Of a prefill step: each write has three pages, so that two of them can be exchanged."""
DEADLINE_S = 25.0
"""Longest wait of any client here: every timeout that can add up, and some recomputing."""


@dataclass
class RemotePair(Pair):
    """`hosts` and `failpoints` are found by role."""

    hosts: dict[str, BridgedHost] = field(default_factory=dict)
    failpoints: dict[str, Failpoint] = field(default_factory=dict)


@contextmanager
def open_far_cluster(folder: Path, oracle: FleetProcess) -> Iterator[ChaosCluster]:
    """Start it; skips, visibly, where there can be no namespaces."""
    root = Path(__file__).parents[2]
    failpoints.install(folder)
    paths = [str(folder), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY, PYTHONPATH=os.pathsep.join(paths))
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(bridged_hosts(3))
        except NoNamespaceError as exc:
            pytest.skip(str(exc))
        by_role = dict(zip(("prefill", "decode", "gateway"), hosts, strict=True))
        fleets = {}
        for role, host in by_role.items():
            logs = folder / role
            logs.mkdir()
            fleets[role] = stack.enter_context(
                Fleet(logs, environment, start=partial(start_preloaded, namespace=host.namespace))
            )
        points = {role: Failpoint(folder / role) for role in ("prefill", "decode")}
        prefill = _start(fleets["prefill"], "prefill", by_role["prefill"], points["prefill"])
        decode = _start(fleets["decode"], "decode", by_role["decode"], points["decode"])
        pair = RemotePair(
            "tcp", fleets["gateway"], prefill, decode, hosts=by_role, failpoints=points
        )
        for worker in (prefill, decode):
            worker.wait_ready()
        address = by_role["gateway"].address
        pair.gateway = fleets["gateway"].start_gateway(
            [prefill],
            [decode],
            settings=GATEWAY
            | {
                "gateway.host": address,
                "gateway.insecure": True,
                "gateway.abandon_after_s": ABANDON_AFTER_S,
            },
        )
        print(f"seed {SEED}, logs in {folder}")
        yield ChaosCluster(oracle.wait_ready(), (pair,), Prompts(SEED))
        for fleet in reversed(fleets.values()):
            assert set(fleet.stop().values()) == {0}


def _start(fleet: Fleet, role: Role, host: BridgedHost, point: Failpoint) -> FleetProcess:
    addresses = {"worker.host": host.address, "worker.handoff_host": host.address}
    timeouts = {"handoff.timeout_s": HANDOFF_TIMEOUT_S}
    steps = {"engine.max_batch_tokens": STEP_TOKENS} if role == "prefill" else {}
    wrapped = failpoints.settings(point.folder, "tcp")
    return fleet.start_worker(
        f"far-{role}", role, ROLES[role] | steps | addresses | timeouts | wrapped
    )
