"""What the sender and the receiver of an agent share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.auth.key import ClusterKey
    from baton.auth.ticket import WorkerRef
    from baton.clock import Clock
    from baton.handoff.interface import HandoffEvent
    from baton.handoff.mapped_pages import RegisteredView
    from baton.handoff.messages import TransferOp
    from baton.handoff.peer_transport_table import PeerTransportTable
    from baton.handoff.peers import Peer, PeerTable
    from baton.handoff.verification import VerificationPolicy
    from baton.transfer.interface import Transport


@dataclass(frozen=True, slots=True)
class AgentContext:
    """The parts of one agent. `emit` queues an event for the engine.

    `op` is the operation that this worker prefers as a receiver. All views have as many layers.
    `lease_s` is how long this worker, as a sender, holds what was computed without a renewal.
    """

    me: WorkerRef
    key: ClusterKey
    clock: Clock
    views: tuple[RegisteredView, ...]
    preferred_op: TransferOp
    peers: PeerTable
    peer_transports: PeerTransportTable
    transports: tuple[Transport, ...]
    timeout_s: float
    lease_s: float
    verification: VerificationPolicy
    emit: Callable[[HandoffEvent], None]

    @property
    def num_layers(self) -> int:
        """Layers of the model's KV."""
        return self.views[0].view.layout.num_layers

    def view_to(self, peer: Peer) -> RegisteredView:
        """The KV view of this worker that a peer sees; the peer has sent its Hello."""
        return self.views[peer.negotiated.ours]
