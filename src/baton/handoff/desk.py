"""What both desks of an agent work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.authority.key import ClusterKey
    from baton.authority.ticket import WorkerRef
    from baton.clock import Clock
    from baton.handoff.footprint import ServedFace
    from baton.handoff.interface import HandoffEvent
    from baton.handoff.messages import Mover
    from baton.handoff.peers import Peer, PeerTable
    from baton.handoff.routes import RouteTable
    from baton.handoff.verification import VerificationPolicy
    from baton.transfer.interface import Transport


@dataclass(frozen=True, slots=True)
class Desk:
    """The parts of one agent. `emit` queues an event for the engine.

    `mover` is what this worker prefers as a receiver. All faces have the same number of layers.
    `lease_s` is how long this worker, as a sender, holds what was computed without a renewal.
    """

    me: WorkerRef
    key: ClusterKey
    clock: Clock
    faces: tuple[ServedFace, ...]
    mover: Mover
    peers: PeerTable
    routes: RouteTable
    transports: tuple[Transport, ...]
    timeout_s: float
    lease_s: float
    verification: VerificationPolicy
    emit: Callable[[HandoffEvent], None]

    @property
    def num_layers(self) -> int:
        """Layers of the model's KV."""
        return self.faces[0].face.layout.num_layers

    def face_to(self, peer: Peer) -> ServedFace:
        """The face of this worker that a peer sees; the peer has introduced itself."""
        return self.faces[peer.met.ours]
