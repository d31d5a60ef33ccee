"""This worker's scratch memory: who may land probes in it, one at a time."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

from baton.clock import Instant
from baton.errors import BatonError, ProtocolError
from baton.handoff.messages import (
    ProbeEnd,
    ProbeReady,
    ProbeRequest,
    ProbeResult,
    decode_probe_notification,
)
from baton.transfer.interface import Arrived, GrantQuiescent, WriteGrant
from baton.transfer.links.probes import TARGET_PAGES, ProbeBuffer
from baton.transfer.region import release_region

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.handoff.peers import Peer, PeerTable
    from baton.ids import TicketId
    from baton.transfer.interface import (
        PagedRegion,
        RegionDescriptor,
        TransferEvent,
        Transport,
    )

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 256
MAX_BACKOFF_S: Final = 2.0
"""For how long one probe may use the pages: others wait."""


@dataclass(frozen=True, slots=True)
class _ProbeGrant:
    peer: Peer
    transport: Transport


@dataclass(slots=True)
class _Held:
    """Which probe holds the probe buffer. `asked` is None for this side's own."""

    grant: TicketId
    until: Instant
    asked: _ProbeGrant | None = None
    is_closing: bool = False


class ProbeTarget:
    """Owner: the agent's thread. Without a probe buffer no probe is admitted."""

    def __init__(
        self, probe_buffer: ProbeBuffer | None, transports: tuple[Transport, ...], clock: Clock
    ) -> None:
        self._probe_buffer, self._clock = probe_buffer, clock
        self._transports = {transport.kind: transport for transport in transports}
        self._peers: PeerTable | None = None
        self._waiting: OrderedDict[TicketId, _ProbeGrant] = OrderedDict()
        self._held: _Held | None = None

    @property
    def has_memory(self) -> bool:
        """Whether links are measured from here: not where the operator listed their order."""
        return self._probe_buffer is not None

    @property
    def region(self) -> PagedRegion:
        """The scratch memory."""
        if self._probe_buffer is None:
            raise AssertionError("there is no scratch memory")
        return self._probe_buffer.region

    def expose(self) -> tuple[RegionDescriptor, ...]:
        """Its descriptors for peers; a transport that cannot expose such memory is not measured."""
        found: list[RegionDescriptor] = []
        for transport in self._transports.values() if self._probe_buffer else ():
            try:
                found.append(transport.expose(self.region))
            except BatonError as exc:
                logger.info("handoff: %s will not be measured: %s", transport.kind, exc)
        return tuple(found)

    def connect(self, peers: PeerTable) -> None:
        """Where answers are sent. Call before the first message."""
        self._peers = peers

    def try_take(self, grant: TicketId) -> bool:
        """For this side's own probe; whether the pages were free."""
        if self._held is not None:
            return self._held.grant == grant
        self._held = _Held(grant, self._latest())
        return True

    def release_window(self, grant: TicketId) -> None:
        """This side's own probe is over."""
        if self._held is not None and self._held.grant == grant:
            self._held = None
            self._serve()

    def is_intact(self, num_pages: int, digest: bytes) -> bool:
        """Whether so many pages have landed with this digest; they are wiped."""
        return self._probe_buffer is not None and self._probe_buffer.try_take(num_pages, digest)

    def handle_message(self, peer: Peer, message: ProbeRequest | ProbeEnd) -> None:
        """A peer wants to land probes, or is done.

        Raises:
            ProtocolError: over a transport that is not here, or with an id that is in use.
        """
        match message:
            case ProbeRequest(grant, kind):
                transport = self._transports.get(kind)
                in_use = grant in self._waiting or (self._held and self._held.grant == grant)
                if transport is None or in_use or len(self._waiting) >= MAX_WAITING:
                    raise ProtocolError(f"a probe over {kind}, which cannot be made here")
                self._waiting[grant] = _ProbeGrant(peer, transport)
                self._serve()
            case ProbeEnd(grant):
                self._waiting.pop(grant, None)
                held = self._held
                if held and held.grant == grant and held.asked and held.asked.peer is peer:
                    self._close(held)
                    if not held.asked.transport.capabilities.late_writes:
                        self._held = None  # its writer has no write in flight
                        self._serve()
            case _:
                assert_never(message)

    def handle_transfer_event(self, transport: Transport, event: TransferEvent) -> bool:
        """Handle a transport's event: whether it belongs to a probe."""
        held = self._held
        match event:
            case Arrived(grant, notification) if held and held.asked and held.grant == grant:
                self._answer(held.asked, grant, notification)
            case GrantQuiescent(grant) if held and held.grant == grant and held.asked:
                if held.asked.transport is transport:
                    self._held = None
                    self._serve()
            case _:
                return False
        return True

    def forget(self, peer: Peer) -> None:
        """The link to a peer ended: its grant is closed, and waited for."""
        for grant, asked in tuple(self._waiting.items()):
            if asked.peer is peer:
                del self._waiting[grant]
        if self._held and self._held.asked and self._held.asked.peer is peer:
            self._close(self._held)

    def release(self) -> None:
        """Give the memory back, once every transport is closed."""
        if self._probe_buffer is not None:
            release_region(self._probe_buffer.region)

    def tick(self) -> None:
        """Close the grant of a peer that takes too long."""
        held = self._held
        if held is not None and held.asked is not None and self._clock.now() > held.until:
            self._close(held)

    def _answer(self, asked: _ProbeGrant, grant: TicketId, raw: bytes) -> None:
        try:
            notification = decode_probe_notification(raw)
        except ProtocolError:
            is_intact = False
        else:
            is_intact = self.is_intact(notification.num_pages, notification.digest)
        if self._peers is not None:
            self._peers.send(asked.peer, ProbeResult(grant, is_intact))

    def _serve(self) -> None:
        while self._held is None and self._waiting:
            grant, asked = self._waiting.popitem(last=False)
            hello = asked.peer.hello
            if self._peers is None or hello is None:
                continue
            try:
                asked.transport.open_grant(
                    WriteGrant(grant, self.region.handle, hello.epoch, TARGET_PAGES)
                )
            except BatonError as exc:
                logger.info("handoff: %s cannot be probed: %s", asked.transport.kind, exc)
                continue
            self._held = _Held(grant, self._latest(), asked)
            self._peers.send(asked.peer, ProbeReady(grant))

    def _close(self, held: _Held) -> None:
        if held.asked is not None and not held.is_closing:
            held.is_closing = True
            held.asked.transport.close_grant(held.grant)

    def _latest(self) -> Instant:
        return Instant(self._clock.now() + MAX_BACKOFF_S)
