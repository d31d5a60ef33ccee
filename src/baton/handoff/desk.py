"""What both desks of an agent work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.authority.key import ClusterKey
    from baton.authority.ticket import WorkerRef
    from baton.clock import Clock
    from baton.handoff.interface import HandoffEvent
    from baton.handoff.peers import PeerTable
    from baton.handoff.routes import RouteTable
    from baton.kv.layout import KVLayout
    from baton.transfer.interface import PagedRegion, Transport


@dataclass(frozen=True, slots=True)
class Desk:
    """The parts of one agent. `emit` queues an event for the engine."""

    me: WorkerRef
    key: ClusterKey
    clock: Clock
    layout: KVLayout
    region: PagedRegion
    peers: PeerTable
    routes: RouteTable
    transports: tuple[Transport, ...]
    timeout_s: float
    emit: Callable[[HandoffEvent], None]
