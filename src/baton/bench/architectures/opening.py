"""An arm's plan → its servers, Baton's or a peer's."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from baton.bench.architectures.fleet import open_fleet
from baton.bench.architectures.peers.fleet import open_peer_fleet
from baton.bench.architectures.peers.plan import PeerPlan
from baton.launch.plan import LaunchPlan

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from baton.bench.architectures.fleet import Servers, Surroundings

ArmPlan: TypeAlias = LaunchPlan | PeerPlan


def open_servers(
    plan: ArmPlan, surroundings: Surroundings, log: Path
) -> AbstractAsyncContextManager[Servers]:
    """See `open_fleet` and `open_peer_fleet`."""
    match plan:
        case LaunchPlan():
            return open_fleet(plan, surroundings, log)
        case PeerPlan():
            return open_peer_fleet(plan, surroundings, log)


def cores_of(plan: ArmPlan) -> dict[str, tuple[int, ...]]:
    """Each worker's share of the machine's cores, by name."""
    match plan:
        case LaunchPlan():
            shares = {w.name: w.settings.get("worker.cpu_affinity", ()) for w in plan.workers}
            return {name: x if isinstance(x, tuple) else () for name, x in shares.items()}
        case PeerPlan():
            return {server.name: server.cores for server in plan.servers}
