"""Bugs to plant: each is a small patch of production code, of a kind that has been shipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.auth.replay import TicketUse, UsedTickets
from baton.auth.ticket import unseal
from baton.engines.stall_detector import StallDetector
from baton.engines.transformers.pinned_blocks import PinnedBlocks
from baton.engines.transformers.sequence import Sequence
from baton.handoff import grants
from baton.handoff.decode_receiver import DecodeReceiver
from baton.handoff.grants import EarlyGrants, LeaseRenewer, Tombstones
from baton.handoff.incoming import IncomingHandoff
from baton.handoff.interface import KVLanded
from baton.handoff.kv_views import RegisteredView
from baton.handoff.peers import NegotiatedViews, PeerTable, negotiate
from baton.handoff.prefill_sender import PrefillSender
from baton.handoff.session.actions import Emit
from baton.handoff.session.lease import Lease, LeaseHolder
from baton.handoff.session.receive import ReceiveSession
from baton.handoff.session.send import SendSession
from baton.handoff.token_ranges import Coverage
from tests.property.sim.planted_in_loans import PLANTED_IN_EXPORTS
from tests.property.sim.planted_in_pool import PLANTED_IN_POOL

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a failed handoff are free at once."""
    quarantine = PinnedBlocks.quarantine

    def free_at_once(self, ticket):
        sequence = quarantine(self, ticket)
        self.release_quarantined(ticket)
        return sequence

    patch.setattr(PinnedBlocks, "quarantine", free_at_once)


def no_epoch_check(patch: pytest.MonkeyPatch) -> None:
    """Whoever answers at the address, and whoever shows a ticket, is taken for the one meant."""

    def find_views(self, peer, hello):
        if peer.dialed is None:
            pair = negotiate(dialer=hello, listener=self._hello)
            return NegotiatedViews(pair.listener, hello.views[pair.dialer])
        pair = negotiate(dialer=self._hello, listener=hello)
        return NegotiatedViews(pair.dialer, hello.views[pair.listener])

    patch.setattr(PeerTable, "_find_views", find_views)
    patch.setattr(
        grants,
        "check_ticket",
        lambda context, peer, text, known=None: unseal(text, context.credentials),
    )


def early_free(patch: pytest.MonkeyPatch) -> None:
    """A closed grant is taken for a quiet one."""
    close = IncomingHandoff.close_write_grants

    def close_and_forget(self, *, writer_is_done):
        close(self, writer_is_done=writer_is_done)
        return False

    patch.setattr(IncomingHandoff, "close_write_grants", close_and_forget)


def early_free_of_the_source(patch: pytest.MonkeyPatch) -> None:
    """A handoff that fails gives its source pages back under its own writes."""

    def settle(self):
        ends = self.phase == "ending" or (not self.over and self._is_acked)
        return self._over() if ends else []

    patch.setattr(SendSession, "_settle", settle)


def double_completion(patch: pytest.MonkeyPatch) -> None:
    """The engine is told twice that KV has landed."""
    complete = ReceiveSession._complete

    def twice(self):
        actions = complete(self)
        landed = [a for a in actions if isinstance(a, Emit) and isinstance(a.event, KVLanded)]
        return [*landed, *actions]

    patch.setattr(ReceiveSession, "_complete", twice)


def no_digest_check(patch: pytest.MonkeyPatch) -> None:
    """What was stored is believed."""
    patch.setattr(IncomingHandoff, "find_wrong_layers", lambda self, *_, **__: [])


def lost_wake(patch: pytest.MonkeyPatch) -> None:
    """Nobody hears that a transport was attached."""
    patch.setattr(PrefillSender, "transport_up", lambda self, event: None)


def forgotten_lease(patch: pytest.MonkeyPatch) -> None:
    """Staging pages are not given back."""
    patch.setattr(RegisteredView, "release", lambda self, holder: None)


def forgotten_grants(patch: pytest.MonkeyPatch) -> None:
    """Grants for requests that never come are kept."""
    patch.setattr(EarlyGrants, "forget_expired", lambda self, now: None)
    patch.setattr(EarlyGrants, "forget_peer", lambda self, peer: None)


def deadline_ignored(patch: pytest.MonkeyPatch) -> None:
    """A handoff waits for ever."""
    patch.setattr(ReceiveSession, "expire", lambda self, now: [])
    patch.setattr(SendSession, "expire", lambda self, now: [])


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A transport that failed is left without waiting for what it posted."""

    def fence(self, kind):
        transport = self._opened.pop(kind, None)
        if transport is not None:
            transport.close_grant(self.session.ticket)
        return True

    patch.setattr(IncomingHandoff, "fence", fence)


def lost_end(patch: pytest.MonkeyPatch) -> None:
    """The end that rode on a write is lost with its transport."""
    submitted = SendSession.submitted

    def forget(self, handle, written, *, is_last=False):
        actions = submitted(self, handle, written, is_last=is_last)
        self._finish_rides_on = "" if is_last else None
        return actions

    patch.setattr(SendSession, "submitted", forget)


def counted_twice(patch: pytest.MonkeyPatch) -> None:
    """A range that landed before counts again."""
    patch.setattr(Coverage, "check", lambda self, layer, start, stop, num_layers=1: None)


def any_peer_is_heard(patch: pytest.MonkeyPatch) -> None:
    """A message about a handoff counts, whoever sends it."""
    handle_message = DecodeReceiver.handle_message

    def handle_any(self, peer, message):
        ticket = getattr(message, "ticket", None)  # a keepalive is about none
        incoming = None if ticket is None else self._incoming.get(ticket)
        handle_message(self, peer if incoming is None else incoming.peer, message)

    patch.setattr(DecodeReceiver, "handle_message", handle_any)


def forgotten_graves(patch: pytest.MonkeyPatch) -> None:
    """A ticket that ended before its request came is waited for."""
    patch.setattr(Tombstones, "take", lambda self, ticket, peer=None: None)


def replayed_tickets(patch: pytest.MonkeyPatch) -> None:
    """A ticket may be used again."""
    patch.setattr(UsedTickets, "use", lambda self, issue: TicketUse.FIRST)


def no_stall_detector(patch: pytest.MonkeyPatch) -> None:
    """Two workers that are short of memory wait for each other."""
    patch.setattr(StallDetector, "should_cancel", lambda self, now, *, no_progress: False)


def lease_not_checked(patch: pytest.MonkeyPatch) -> None:
    """Decode consumes what it read, whenever that was: prefill has reused its pages."""
    patch.setattr(LeaseHolder, "holds", lambda self, now: True)


def lease_for_ever(patch: pytest.MonkeyPatch) -> None:
    """What nobody asks for is held."""
    patch.setattr(Lease, "is_over", lambda self, now: False)


def no_renewals(patch: pytest.MonkeyPatch) -> None:
    """Decode says to nobody what waits in its queue."""
    patch.setattr(LeaseRenewer, "tick", lambda self, reading: None)


def landed_under_a_copy(patch: pytest.MonkeyPatch) -> None:
    """KV is reported, and blocks are given back, while a GPU copies into them."""
    patch.setattr(ReceiveSession, "scattering", lambda self: None)
    patch.setattr(ReceiveSession, "scattered", lambda self: [])


def sent_under_a_copy(patch: pytest.MonkeyPatch) -> None:
    """Pages are sent while a GPU copies into them."""

    def do_not_ask(self):
        while self._copies:
            _, outgoing, layers, stop = self._copies.popleft()
            self._perform(outgoing, outgoing.session.gathered(layers, stop))
        return False

    patch.setattr(PrefillSender, "poll_copies", do_not_ask)


def layers_are_counted_early(patch: pytest.MonkeyPatch) -> None:
    """The engine is to compute upon a layer of which tokens are still on their way."""
    count = Coverage.num_leading_layers.fget

    def count_one_more(self):
        return min(count(self) + 1, len(self._landed))

    patch.setattr(Coverage, "num_leading_layers", property(count_one_more))


def landing_blocks_are_kept(patch: pytest.MonkeyPatch) -> None:
    """A request whose KV lands no more keeps the blocks for it, which are in quarantine."""

    def forget_layers_alone(self):
        self.landing = self.early_token = None

    patch.setattr(Sequence, "stop_landing", forget_layers_alone)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    plant.__name__: plant
    for plant in (
        no_quarantine,
        no_epoch_check,
        early_free,
        early_free_of_the_source,
        double_completion,
        no_digest_check,
        lost_wake,
        forgotten_lease,
        forgotten_grants,
        deadline_ignored,
        no_fence,
        lost_end,
        counted_twice,
        any_peer_is_heard,
        forgotten_graves,
        replayed_tickets,
        no_stall_detector,
        lease_not_checked,
        lease_for_ever,
        no_renewals,
        landed_under_a_copy,
        sent_under_a_copy,
        layers_are_counted_early,
        landing_blocks_are_kept,
    )
}
PLANTED |= PLANTED_IN_EXPORTS | PLANTED_IN_POOL
