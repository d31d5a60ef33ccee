"""One handoff into this worker, as its desk keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.handoff.carriage import Carriage
from baton.handoff.named import NamedPages
from baton.handoff.parcels import Inspector
from baton.kv.planning import CopyPlanner
from baton.telemetry.trace import Stamp
from baton.transfer.interface import Window

if TYPE_CHECKING:
    from baton.clock import Instant
    from baton.handoff.footprint import Footprint
    from baton.handoff.messages import Finished, Notice
    from baton.handoff.peers import Peer
    from baton.handoff.sampler import Sampler
    from baton.handoff.session.receive import ReceiveSession
    from baton.kv.copies import PageCopies
    from baton.transfer.interface import Transport
    from baton.transfer.links.choosing import Choice


@dataclass(slots=True, eq=False)
class Incoming:
    """A session, its peer, its pages, and the transports that admit writes into them.

    `peer` is None until the prefill worker was dialed, `footprint` until the terms are settled.
    `named` and `planner` keep what the layers of its reads have in common. `is_moved`: it was to be
    handed over by reference, and cannot.
    """

    session: ReceiveSession
    peer: Peer | None = None
    footprint: Footprint | None = None
    carriage: Carriage = field(default_factory=Carriage)
    named: NamedPages = field(default_factory=NamedPages)
    planner: CopyPlanner = field(default_factory=CopyPlanner)
    unreadable: set[str] = field(default_factory=set)
    sampler: Sampler | None = None
    is_moved: bool = False
    _opened: dict[str, Transport] = field(default_factory=dict)
    _fencing: set[str] = field(default_factory=set)
    _unsettled: set[str] = field(default_factory=set)
    _fenced: list[str] = field(default_factory=list)

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
            self._opened[transport.kind] = transport

    def admits(self, transport: Transport) -> bool:
        """Whether what a transport says to have brought counts: its window is not closed."""
        return transport.kind in self._opened

    def has_other(self, transport: Transport) -> bool:
        """Whether the peer could write over another transport."""
        if self.peer is None:
            return False
        theirs = {region.transport for region in self.peer.met.theirs.regions}
        return bool((self._opened.keys() & theirs) - {transport.kind})

    def fence(self, kind: str) -> bool:
        """Close one transport's window; whether that is all, and nothing can land over it now.

        Its writer has said that no hand of its is in the pages through it. So only a transport that
        posts writes, which no side can recall, is waited for.
        """
        transport = self._opened.pop(kind, None)
        self._fenced.append(kind)
        if transport is None:
            return True
        transport.close_window(self.session.ticket)
        if transport.capabilities.posts:
            self._fencing.add(kind)
            return False
        return True

    def close_windows(self) -> bool:
        """Admit no more; whether `falls_quiet` is to be asked when a transport says so."""
        opened, self._opened = self._opened, {}
        self._unsettled = {*opened, *self._fencing}
        for transport in opened.values():
            transport.close_window(self.session.ticket)
        return bool(self._unsettled)

    def is_fenced(self, transport: Transport) -> bool:
        """A transport says that nothing can land over it: whether that was waited for, alone."""
        kind = transport.kind
        if kind not in self._fencing:
            return False
        self._fencing.discard(kind)
        return True

    def falls_quiet(self, transport: Transport) -> bool:
        """A transport says that nothing can land over it: whether the last of those closed has."""
        if transport.kind not in self._unsettled:
            return False
        self._unsettled.discard(transport.kind)
        return not self._unsettled

    def is_intact(self, notice: Notice, transport: str, sampler: Sampler | None) -> bool:
        """Whether the bytes that a notice names are in the pages, as their sender had them.

        With a sampler: as far as it looks. What was compared is noted in the trace.
        """
        if self.peer is None:
            raise AssertionError("nothing is noticed before a peer was dialed")
        pages = self._laid
        inspector = Inspector(pages.face.region, pages.sequence, self.peer.met.theirs.layout)
        seen = inspector.inspect(notice, sampler)
        trace, num_bytes = self.session.order.trace, seen.num_tokens * self._layer_bytes
        trace.verified(transport, num_bytes, is_intact=seen.is_intact)
        return seen.is_intact

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

    def note_read(self, choice: Choice, copies: PageCopies) -> None:
        """Note in the trace what is read, and over what."""
        trace = self.session.order.trace
        trace.num_bytes += copies.num_bytes
        trace.num_pages += copies.num_pages
        self.carriage.note(choice)
        self.carriage.write_into(trace)

    def note_arrival(self, transport: Transport, notice: Notice) -> None:
        """Note what brought some of the KV: the proof of what was used."""
        num_tokens = notice.stop - notice.start
        self.carriage.came_over(transport.kind, num_tokens * self._layer_bytes)
        if self._fenced:
            self.carriage.took_over(self._fenced[0], transport.kind)

    def is_reversed_from(self, kind: str) -> None:
        """Reading is over, and what it used to be done with."""
        self._fenced.append(kind)

    def note_sender(self, message: Finished) -> None:
        """Note in the trace what only the sender knows."""
        if self.peer is None or self.session.terms is None:
            return
        order, trace = self.session.order, self.session.order.trace
        to_local = self.peer.to_local
        trace.peer_stamps = {stamp: to_local(at) for stamp, at in message.stamps.items()}
        if self.session.terms.mover != "prefill":
            return  # the reader counts for itself; what is lent does not move
        layout = self._laid.face.layout
        trace.num_bytes = (order.num_tokens - order.start) * layout.bytes_per_token
        trace.num_pages = len(order.blocks.blocks) * layout.num_layers
        if message.transport and message.transport != message.expected_transport:
            self.carriage.took_over(message.expected_transport, message.transport)

    def write_trace(self) -> None:
        """Say in the trace what carried it."""
        self.carriage.write_into(self.session.order.trace)

    @property
    def _layer_bytes(self) -> int:
        """Of one token, on the average of all layers."""
        layout = self._laid.face.layout
        return layout.bytes_per_token // layout.num_layers

    @property
    def _laid(self) -> Footprint:
        if self.footprint is None:
            raise AssertionError("it has no pages before its terms are settled")
        return self.footprint
