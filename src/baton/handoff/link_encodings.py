"""The encoding of each handoff: chosen by the decode worker, which grants its pages.

    prefill ── EncodingCosts: its rate of encoding, and its measured link for writes ──► decode
    decode  ── Grant: raw, or encoded and by what costs ──► prefill
    prefill ── EncodingRefused: raw, or another, is sooner ──► decode ── Grant: that ──► prefill

The decode worker adds its own rate of decoding and, where it reads, the link as it has measured it.
Before a link is measured KV goes raw. What a prompt has cached, only the prefill worker knows; the
round trip of a refusal is within what it computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from baton.encodings.interface import RAW
from baton.handoff.encoded_view import EncodedPages
from baton.handoff.encoding_choice import (
    EncodingChooser,
    KVToSend,
    LinkEncodingCosts,
    PrefillDurations,
    choose_arrival,
    predict_arrival,
)
from baton.handoff.messages import (
    MAX_BYTE_S,
    MAX_PREDICTED_S,
    EncodingCosts,
    EncodingRefused,
    ReceivingCosts,
)
from baton.kv.copies import count_blocks
from baton.telemetry.trace import EncodingEstimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.clock import Instant
    from baton.encodings.rates import EncodingRates
    from baton.handoff.grants import Granted
    from baton.handoff.interface import ReceiveOrder, SendOrder
    from baton.handoff.kv_views import AgentContext
    from baton.handoff.messages import GrantOp, TransferOp
    from baton.handoff.peer_transports import LinkReport
    from baton.handoff.peers import Peer
    from baton.handoff.write_batches import OutgoingHandoff

TRANSFER_OPS: Final[tuple[TransferOp, ...]] = ("WRITE", "READ")
NOTICEABLE: Final = 0.1
"""Costs that changed by less are not sent again."""


class LinkEncodings:
    """Of all links of one agent. Owner: the agent's thread."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._rates: dict[str, EncodingRates] = {
            pages.encoding.name: pages.rates
            for pages in (each.view.staging for each in context.views)
            if isinstance(pages, EncodedPages)
        }
        self.are_used = bool(self._rates)
        """Whether this worker has any."""
        self._sent: dict[tuple[Peer, str], EncodingCosts] = {}
        self._received: dict[tuple[Peer, str], EncodingCosts] = {}
        self._choosers: dict[tuple[Peer, TransferOp], EncodingChooser] = {}
        self._prefills = PrefillDurations()

    def tick(self) -> None:
        """Send the workers that receive from this one what encoding costs here, if it changed."""
        if not self.are_used:
            return
        now = self._context.clock.now()
        for peer in self._context.peers:
            if peer.dialed is not None:
                continue
            for encoding in peer.encoded_views:
                encode_byte_s = self._rates[encoding].encode.byte_s(now)
                write_byte_s = self._context.peer_transports.find_bulk_byte_s(peer)
                costs = EncodingCosts(
                    encoding,
                    min(encode_byte_s, MAX_BYTE_S),
                    None if write_byte_s is None else min(write_byte_s, MAX_BYTE_S),
                )
                if _is_news(costs, self._sent.get((peer, encoding))):
                    self._sent[peer, encoding] = costs
                    self._context.peers.send(peer, costs)

    def handle_message(self, peer: Peer, costs: EncodingCosts) -> None:
        """A prefill worker's costs; of an encoding that the two do not share they are ignored."""
        if costs.encoding in peer.encoded_views:
            self._received[peer, costs.encoding] = costs

    def forget(self, peer: Peer) -> None:
        """The link to a peer ended."""
        for encoding in peer.encoded_views:
            self._sent.pop((peer, encoding), None)
            self._received.pop((peer, encoding), None)
        for op in TRANSFER_OPS:
            self._choosers.pop((peer, op), None)

    def choose(
        self, peer: Peer, op: GrantOp, order: ReceiveOrder
    ) -> tuple[str, ReceivingCosts | None]:
        """The encoding of a handoff's KV, in pages that both sides have; noted in its trace.

        And by what costs: None where nothing was compared.
        """
        if op == "NONE" or not peer.encoded_views:
            return RAW, None
        known = {
            encoding: costs
            for encoding in peer.encoded_views
            if (costs := self._find_costs(peer, encoding, op)) is not None
            and self._has_room(peer, encoding, order)
        }
        if not known:
            return RAW, None
        byte_s = {encoding: each.encoded_byte_s for encoding, each in known.items()}
        quickest = min(byte_s, key=lambda each: byte_s[each])
        byte_s[RAW] = known[quickest].link_byte_s
        chosen = self._choosers.setdefault((peer, op), EncodingChooser()).choose(byte_s)
        compared = quickest if chosen == RAW else chosen
        costs = known[compared]
        raw = self._context.view_to(peer).view.layout
        num_bytes = (order.num_tokens - order.start) * raw.bytes_per_token
        order.trace.encoding_estimate = EncodingEstimate(
            chosen=chosen,
            encoding=compared,
            raw_s=num_bytes * costs.link_byte_s,
            encoded_s=num_bytes * costs.encoded_byte_s,
        )
        return chosen, ReceivingCosts(
            min(costs.link_byte_s, MAX_BYTE_S),
            {name: min(each.decode_byte_s, MAX_BYTE_S) for name, each in known.items()},
        )

    def prefill_done(self, outgoing: OutgoingHandoff, now: Instant) -> None:
        """The engine has computed a prompt: how long it took, from the offer on, is learned."""
        order = outgoing.session.order
        self._prefills.add(order.num_tokens - _count_cached(order), now - outgoing.offered_at)

    def try_refuse(self, outgoing: OutgoingHandoff, granted: Granted) -> EncodingRefused | None:
        """The answer to a grant whose KV is there sooner otherwise; None if it is taken as it is.

        Raw, too, where encoded pages would be waited for, and the peer may wait for this worker's.
        What was predicted is noted in the trace.
        """
        grant, session = granted.grant, outgoing.session
        if grant.encoding == RAW or grant.costs is None:
            return None
        now, order = self._context.clock.now(), session.order
        kv = self._find_kv(granted, _list_ready(outgoing), grant.costs.link_byte_s)
        arrivals = {
            encoding: predict_arrival(
                LinkEncodingCosts(
                    grant.costs.link_byte_s,
                    self._rates[encoding].encode.byte_s(now),
                    decode_byte_s,
                    self._find_share(granted.peer, encoding),
                ),
                kv,
            )
            for encoding, decode_byte_s in grant.costs.decode_byte_s.items()
            if encoding in granted.peer.encoded_views
        }
        if grant.encoding not in arrivals:
            return None
        is_late = self._waits_for_received(granted)
        chosen = RAW if is_late else choose_arrival(kv, arrivals, grant.encoding)
        compared = grant.encoding if chosen == RAW else chosen
        outgoing.estimated_at = now
        order.trace.encoding_estimate = EncodingEstimate(
            chosen=chosen,
            encoding=compared,
            raw_s=arrivals[compared].raw_s,
            encoded_s=arrivals[compared].encoded_s,
            prefill_s=kv.prefill_s,
        )
        if chosen == grant.encoding:
            return None
        predicted = (arrivals[compared].raw_s, arrivals[compared].encoded_s, kv.prefill_s)
        bounded = (min(each, MAX_PREDICTED_S) for each in predicted)
        return EncodingRefused(session.ticket, chosen, *bounded)

    def _waits_for_received(self, granted: Granted) -> bool:
        grant, view = granted.grant, self._context.view_to(granted.peer, granted.grant.encoding)
        size = view.view.layout.block_size
        num_pages = count_blocks(grant.num_tokens, size) - grant.start // size
        return view.staging_pool is not None and view.staging_pool.waits_for_received(num_pages)

    def acked(self, outgoing: OutgoingHandoff) -> None:
        """The peer has all: what it took is noted beside what was predicted."""
        trace, began_at = outgoing.session.order.trace, outgoing.estimated_at
        if trace.encoding_estimate is not None and began_at is not None:
            trace.encoding_estimate = msgspec.structs.replace(
                trace.encoding_estimate, took_s=self._context.clock.now() - began_at
            )

    def _find_kv(
        self, granted: Granted, ready_tokens: Sequence[int], link_byte_s: float
    ) -> KVToSend:
        """What is granted, as far as it is computed, and what prefill has to do for the rest.

        `ready_tokens` are the first tokens of each layer that are computed.
        """
        grant, num_layers = granted.grant, len(ready_tokens)
        layout = self._context.view_to(granted.peer).view.layout
        token_bytes = layout.bytes_per_token / num_layers  # of a layer, on the average
        num_ready = sum(max(0, stop - grant.start) for stop in ready_tokens)
        rest_bytes = token_bytes * ((grant.num_tokens - grant.start) * num_layers - num_ready)
        num_left = grant.num_tokens - sum(ready_tokens) / num_layers
        prefill_s = self._prefills.predict_s(num_left)
        if prefill_s is None:  # nothing was computed yet: as if it took what the link takes
            prefill_s = rest_bytes * link_byte_s
        return KVToSend(token_bytes * num_ready, rest_bytes, prefill_s, num_layers)

    def find_kv_byte_s(self, peer: Peer, link: LinkReport) -> float | None:
        """Seconds for a byte of raw KV over a link whose KV is encoded; None where it goes raw.

        What the peer has not sent, or does not send (a prefill worker does not know how quickly the
        peer decodes), is taken to be as here.
        """
        if link.encoding not in peer.encoded_views:
            return None
        now, rates = self._context.clock.now(), self._rates[link.encoding]
        theirs = self._received.get((peer, link.encoding))
        link_byte_s = self._context.peer_transports.find_bulk_byte_s(peer)  # as for the choice
        encode_byte_s = rates.encode.byte_s(now) if theirs is None else theirs.encode_byte_s
        return LinkEncodingCosts(
            link.byte_s if link_byte_s is None else link_byte_s,
            encode_byte_s,
            rates.decode.byte_s(now),
            self._find_share(peer, link.encoding),
        ).encoded_byte_s

    def _find_costs(self, peer: Peer, encoding: str, op: TransferOp) -> LinkEncodingCosts | None:
        """None where the link was not measured, or the peer has not sent its own costs."""
        theirs = self._received.get((peer, encoding))
        if theirs is None:
            return None
        link_byte_s = theirs.write_byte_s
        if op == "READ":
            link_byte_s = self._context.peer_transports.find_bulk_byte_s(peer)
        if link_byte_s is None:
            return None
        return LinkEncodingCosts(
            link_byte_s,
            theirs.encode_byte_s,
            self._rates[encoding].decode.byte_s(self._context.clock.now()),
            self._find_share(peer, encoding),
        )

    def _find_share(self, peer: Peer, encoding: str) -> float:
        """Encoded bytes for each raw one."""
        context = self._context
        raw, encoded = (context.view_to(peer, each).view.layout for each in (RAW, encoding))
        return encoded.bytes_per_token / raw.bytes_per_token

    def _has_room(self, peer: Peer, encoding: str, order: ReceiveOrder) -> bool:
        """Whether both have as many encoded pages, and KV begins with one."""
        ours = self._context.view_to(peer, encoding)
        theirs = (
            array.num_pages
            for region in peer.views_for(encoding).theirs.regions
            for array in region.arrays
        )
        most = min(*(each.num_pages for each in ours.view.region.arrays), min(theirs, default=0))
        return len(order.blocks.blocks) <= most and order.start % ours.page_tokens == 0


def _count_cached(order: SendOrder) -> int:
    return min(order.num_tokens, max(order.num_ready_tokens, order.num_cached_tokens))


def _list_ready(outgoing: OutgoingHandoff) -> list[int]:
    cached = _count_cached(outgoing.session.order)
    return [max(stop, cached) for stop in outgoing.session.ready_tokens]


def _is_news(costs: EncodingCosts, before: EncodingCosts | None) -> bool:
    if before is None or (costs.write_byte_s is None) != (before.write_byte_s is None):
        return True
    pairs = [(costs.encode_byte_s, before.encode_byte_s)]
    if costs.write_byte_s is not None and before.write_byte_s is not None:
        pairs.append((costs.write_byte_s, before.write_byte_s))
    return any(abs(now - then) > NOTICEABLE * then for now, then in pairs)
