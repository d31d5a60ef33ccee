"""One handoff into this worker, as its desk keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.handoff.parcels import Inspector
from baton.telemetry.trace import Stamp
from baton.transfer.interface import Window

if TYPE_CHECKING:
    from baton.clock import Instant
    from baton.handoff.footprint import Footprint
    from baton.handoff.messages import Finished, Notice
    from baton.handoff.peers import Peer
    from baton.handoff.session.receive import ReceiveSession
    from baton.transfer.interface import Transport


@dataclass(slots=True, eq=False)
class Incoming:
    """A session, its peer, its pages, and the transports that admit writes into them.

    `peer` is None until the prefill worker was dialed, `footprint` until the terms are settled.
    """

    session: ReceiveSession
    peer: Peer | None = None
    footprint: Footprint | None = None
    _opened: list[Transport] = field(default_factory=list)
    _num_unsettled: int = 0

    def open_windows(self, transports: tuple[Transport, ...]) -> None:
        """Admit the peer's writes into the pages, over each transport.

        Raises:
            TransferError: one of them refuses; what was opened before is to be closed.
        """
        pages = self._laid
        window = Window(
            id=self.session.ticket,
            region=pages.face.region.handle,
            writer=self.session.order.ticket.prefill.epoch,
            pages=pages.pages.blocks,
        )
        for transport in transports:
            transport.open_window(window)
            self._opened.append(transport)

    def close_windows(self) -> bool:
        """Admit no more; whether `is_quiescent` is to be asked when a transport says so."""
        opened, self._opened = self._opened, []
        self._num_unsettled = len(opened)
        for transport in opened:
            transport.close_window(self.session.ticket)
        return bool(opened)

    def is_quiescent(self) -> bool:
        """One more transport says that nothing can land: whether all have."""
        self._num_unsettled -= 1
        return self._num_unsettled == 0

    def is_intact(self, notice: Notice) -> bool:
        """Whether the bytes that a notice names are in the pages, as their sender had them."""
        if self.peer is None:
            raise AssertionError("nothing is noticed before a peer was dialed")
        pages = self._laid
        peer_layout = self.peer.met.theirs.layout
        return Inspector(pages.face.region, pages.sequence, peer_layout).is_intact(notice)

    def scatter(self, notice: Notice) -> None:
        """Bring what a notice names, which is intact, into the engine's blocks."""
        self._laid.scatter(notice.layer, notice.start, notice.stop)

    def stamp_progress(self, now: Instant) -> None:
        """Note in the trace how far it came."""
        trace, coverage = self.session.order.trace, self.session.coverage
        if coverage.num_complete_layers:
            trace.stamp(Stamp.FIRST_LAYER_LANDED, now)
        if coverage.complete:
            trace.stamp(Stamp.LAST_LAYER_LANDED, now)

    def note_sender(self, message: Finished) -> None:
        """Note in the trace what only the sender knows."""
        if self.peer is None or self.session.terms is None:
            return
        order, trace = self.session.order, self.session.order.trace
        to_local = self.peer.to_local
        trace.peer_stamps = {stamp: to_local(at) for stamp, at in message.stamps.items()}
        if self.session.terms.mover == "decode":
            return  # the reader counts for itself
        layout = self._laid.face.layout
        trace.transport = message.transport
        trace.expected_transport = message.expected_transport
        trace.num_bytes = (order.num_tokens - order.start) * layout.bytes_per_token
        trace.num_pages = len(order.blocks.blocks) * layout.num_layers

    @property
    def _laid(self) -> Footprint:
        if self.footprint is None:
            raise AssertionError("it has no pages before its terms are settled")
        return self.footprint
