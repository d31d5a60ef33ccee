"""One handoff out of this worker: from a token range to page copies, digests, writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product, repeat
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from baton.handoff.kv_views import Holder
from baton.handoff.messages import (
    Available,
    Finished,
    Notification,
    encode,
    pack_blocks,
)
from baton.handoff.peer_transports import TransportUsage
from baton.handoff.session.actions import AnnounceReadable, TransferHandle, WriteLayers
from baton.handoff.token_ranges import LayerTokenRange
from baton.kv.copies import (
    BlockTable,
    CopyPlanner,
    PageCopies,
    PagedSequence,
    compute_pieces,
    count_blocks,
)
from baton.kv.digest import (
    DigestKey,
    PieceLocator,
    compute_digests,
)
from baton.transfer.interface import PageWrite, ReadGrant
from baton.transfer.links.cost_model import measure_shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from baton.handoff.grants import Granted
    from baton.handoff.interface import SampledToken, SendOrder
    from baton.handoff.kv_views import MappedPages, RegisteredView
    from baton.handoff.messages import Grant
    from baton.handoff.peer_transports import PeerTransportTable, TransportChoice
    from baton.handoff.peers import Peer
    from baton.handoff.session.actions import SendAction, SendFinished
    from baton.handoff.session.send import SendSession
    from baton.kv.layout import KVLayout
    from baton.transfer.interface import PageArray, ScopesReads

MAX_SEGMENTS: Final = 2048
"""Pieces of one write: keeps its notification far below `MAX_NOTIFICATION_BYTES`."""


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """One write: tokens `[start, stop)` of each of its layers, cut into the pieces `bounds`."""

    copies: PageCopies
    bounds: NDArray[np.int64]
    start: int
    stop: int

    @property
    def end(self) -> tuple[int, int]:
        """Behind its last layer, and its last token."""
        return self.copies.layers.stop, self.stop

    @property
    def token_ranges(self) -> list[LayerTokenRange]:
        """What it carries, layer by layer."""
        return list(map(LayerTokenRange, self.copies.layers, repeat(self.start), repeat(self.stop)))

    def split(self) -> Iterator[WriteBatch]:
        """The same, layer by layer."""
        return (
            WriteBatch(copies, self.bounds, self.start, self.stop) for copies in self.copies.split()
        )


class WriteBatchBuilder:
    """Prefill's side of one handoff: `source` lies in `layer_pages`, `target` in the peer's.

    `target_arrays` are the peer's region; `key` is for digests that cannot be forged. Keeps what
    the handoff's layers have in common. Owner thread: the handoff's.

    Raises:
        LayoutMismatchError: KV cannot be copied from the one to the other.
    """

    def __init__(
        self,
        layer_pages: Sequence[NDArray[np.uint8]],
        source: PagedSequence,
        target: PagedSequence,
        target_arrays: Sequence[PageArray] = (),
        *,
        key: DigestKey | None = None,
    ) -> None:
        self._layer_pages, self._source, self._target = layer_pages, source, target
        self._key = key
        self.target_arrays = target_arrays
        self._planner = CopyPlanner(source.layout, target.layout)
        self._locator = PieceLocator()

    def build(self, layers: range, start: int, stop: int) -> Iterator[WriteBatch]:
        """Split tokens `[start, stop)` of `layers` into batches of bounded size, in order.

        Layers whose pages are alike and small are together in one.
        """
        sizes = self._source.layout.block_size, self._target.layout.block_size
        bounds = compute_pieces(*sizes, start, stop)
        if 1 < len(bounds) <= MAX_SEGMENTS + 1:
            yield from self._join(layers, bounds, start, stop)
            return
        for layer, some in product(layers, _cut(bounds)):
            low, high = int(some[0]), int(some[-1])
            copies = self._planner.plan(self._source, self._target, layer, start=low, stop=high)
            yield WriteBatch(copies, some, low, high)

    def _join(
        self, layers: range, bounds: NDArray[np.int64], start: int, stop: int
    ) -> Iterator[WriteBatch]:
        """Batches of as many layers as may go together; each has all of the pieces."""
        max_layers = MAX_SEGMENTS // (len(bounds) - 1)
        while layers:
            first = layers[0]
            copies = self._planner.plan(self._source, self._target, first, start=start, stop=stop)
            if len(layers) > 1:
                copies = self._planner.join(copies, layers[:max_layers])
            yield WriteBatch(copies, bounds, start, stop)
            layers = layers[copies.num_layers :]

    def digest(self, batch: WriteBatch, *, is_keyed: bool = False) -> Notification:
        """The notification of a batch, with a digest for each of its pieces.

        With `is_keyed` by the handoff's key, where it has one.
        """
        key = self._key if is_keyed else None
        pieces = self._locator.locate(self._source, batch.bounds)
        digests: list[bytes] = []
        for layer in batch.copies.layers:
            pair, pages = self._planner.pairs[layer], self._layer_pages[layer]
            digests.append(
                compute_digests(pair.src, pages, pieces, heads=pair.heads, key=key, layer=layer)
            )
        return _make_notification(batch, b"".join(digests))


def _cut(bounds: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Pieces in runs of at most `MAX_SEGMENTS`."""
    return [
        bounds[first : first + MAX_SEGMENTS + 1]
        for first in range(0, len(bounds) - 1, MAX_SEGMENTS)
    ]


def notify_without_digests(batch: WriteBatch) -> Notification:
    """The notification of a batch, for a receiver that verifies identities only."""
    return _make_notification(batch, b"")


def _make_notification(batch: WriteBatch, digests: bytes) -> Notification:
    copies = batch.copies
    return Notification(copies.layer, batch.start, batch.stop, digests, copies.num_layers)


def map_granted_pages(view: RegisteredView, order: SendOrder, grant: Grant) -> MappedPages | None:
    """The granted tokens' pages in a KV view; None while no staging page is free.

    Raises:
        HandoffError: there will never be room for them.
    """
    if not view.is_staged:
        return view.try_map_pages(Holder("send", order.ticket.id), order.blocks)
    size = view.view.layout.block_size
    granted = order.blocks.slice_tokens(grant.start, grant.num_tokens, size)
    return view.try_map_pages(Holder("send", order.ticket.id), granted)


@dataclass(frozen=True, slots=True)
class PostedWrite:
    """One write that was submitted: over what, and what it carries. `is_last`: Finished, too."""

    chosen: TransportChoice
    handle: TransferHandle
    token_ranges: list[LayerTokenRange]
    is_last: bool = False


def write_batches(
    submit: WriteLayers, peer_transports: PeerTransportTable, outgoing: OutgoingHandoff
) -> Iterator[PostedWrite]:
    """Write a range into the peer's pages, batch by batch, each over the best transport for it.

    Layers whose pages are alike go together, where that route takes them so: a short prompt's
    layers cost more to be announced than to be copied.

    Raises:
        TransferError: no route is left, or a transport refuses a write.
        ProtocolError: the range is not in the pages of either side.
    """
    layers = range(submit.layer, submit.layer + submit.num_layers)
    outgoing.pages_to_send.gather(layers, submit.start, submit.stop)
    builder = outgoing.builder
    finish, end = outgoing.session.ends_with(submit), (layers.stop, submit.stop)
    for batch in builder.build(layers, submit.start, submit.stop):
        chosen = _choose(batch, builder, peer_transports, outgoing)
        if batch.copies.num_layers == 1 or chosen.peer_transport.takes_several_arrays:
            rides = finish if batch.end == end else None
            yield _post(batch, chosen, peer_transports, outgoing, finish=rides)
            continue
        for each in batch.split():
            chosen = _choose(each, builder, peer_transports, outgoing)
            rides = finish if each.end == end else None
            yield _post(each, chosen, peer_transports, outgoing, finish=rides)


def _choose(
    batch: WriteBatch,
    builder: WriteBatchBuilder,
    peer_transports: PeerTransportTable,
    outgoing: OutgoingHandoff,
) -> TransportChoice:
    peer, region = outgoing.grant_to_fill.peer, outgoing.pages_to_send.view.region
    shape = measure_shape(batch.copies, region.arrays, builder.target_arrays)
    chosen = peer_transports.choose(peer, shape, outgoing.session.excluded)
    if chosen is None:
        raise peer_transports.explain(peer)
    return chosen


def _post(
    batch: WriteBatch,
    chosen: TransportChoice,
    peer_transports: PeerTransportTable,
    outgoing: OutgoingHandoff,
    *,
    finish: SendFinished | None,
) -> PostedWrite:
    granted, builder, copies = outgoing.grant_to_fill, outgoing.builder, batch.copies
    transport = chosen.peer_transport.transport
    is_undigested = transport.kind in granted.grant.no_digest_transports
    if is_undigested:
        notification = notify_without_digests(batch)
    else:
        is_keyed = not transport.capabilities.same_host_only
        notification = builder.digest(batch, is_keyed=is_keyed)
    trace = outgoing.session.order.trace
    trace.num_bytes += chosen.choice.shape.num_bytes
    trace.num_pages += copies.num_pages
    outgoing.usage.record_choice(chosen.choice)
    if finish is not None:
        finished = outgoing.make_finished(finish.first_token)
        notification = msgspec.structs.replace(notification, finished=finished)
    page_write = PageWrite(
        remote=chosen.peer_transport.attached,
        grant=granted.ticket.id,
        region=outgoing.pages_to_send.view.region.handle,
        copies=copies,
        notification=encode(notification),
    )
    began_at = peer_transports.now()
    transfer = transport.submit(page_write)
    peer_transports.submitted(chosen, began_at)
    handle = TransferHandle(transport.kind, transfer)
    return PostedWrite(chosen, handle, batch.token_ranges, finish is not None)


def merge_layers(actions: Sequence[SendAction]) -> Iterator[SendAction]:
    """The same actions; of layers that follow each other, what is done with the same tokens is one.

    Such are writes, and announcements of what can be read.
    """
    first: WriteLayers | AnnounceReadable | None = None
    num_layers = 0
    for action in actions:
        of_layers = action if isinstance(action, WriteLayers | AnnounceReadable) else None
        if first is not None:
            if (
                of_layers is not None
                and type(of_layers) is type(first)
                and (of_layers.start, of_layers.stop) == (first.start, first.stop)
                and of_layers.layer == first.layer + num_layers
            ):
                num_layers += of_layers.num_layers
                continue
            yield type(first)(first.layer, first.start, first.stop, num_layers)
        first = of_layers
        if of_layers is None:
            yield action
        else:
            num_layers = of_layers.num_layers
    if first is not None:
        yield type(first)(first.layer, first.start, first.stop, num_layers)


def announce(
    action: AnnounceReadable, outgoing: OutgoingHandoff, read_scopes: Sequence[ScopesReads]
) -> Iterator[Available]:
    """Announce where a range lies in this worker's pages, with its digests, batch by batch.

    What is announced may be read, by the decode worker of the ticket alone.

    Raises:
        ProtocolError: the range is not in this worker's pages.
        TransferError: it cannot be read over one of `read_scopes`.
    """
    granted, mapped_pages = outgoing.grant_to_fill, outgoing.pages_to_send
    layers = range(action.layer, action.layer + action.num_layers)
    trace = outgoing.session.order.trace
    mapped_pages.gather(layers, action.start, action.stop)
    for batch in outgoing.builder.build(layers, action.start, action.stop):
        notification = outgoing.builder.digest(batch, is_keyed=True)
        source = mapped_pages.pages_of(notification.start, notification.stop)
        for transport in read_scopes:
            transport.admit_reads(outgoing.read_grant, batch.copies.layers, source.blocks)
        trace.num_bytes += batch.copies.num_bytes
        trace.num_pages += batch.copies.num_pages
        yield Available(
            ticket=granted.ticket.id,
            layer=notification.layer,
            start=notification.start,
            stop=notification.stop,
            first_block=source.first,
            blocks=pack_blocks(source.blocks),
            digests=notification.digests,
            num_layers=notification.num_layers,
        )


def _derive_key(granted: Granted) -> DigestKey:
    return DigestKey(granted.peer.link.digest_secret, granted.ticket.id)


def _any_target(layout: KVLayout, num_tokens: int) -> PagedSequence:
    """Pages of the peer's: which ones is its own business; any give the same number of bytes."""
    num_blocks = count_blocks(num_tokens, layout.block_size)
    return PagedSequence(layout, BlockTable(0, np.arange(num_blocks, dtype=np.int64)))


@dataclass(slots=True, eq=False)
class OutgoingHandoff:
    """A session, what was granted, and what carries it.

    `mapped_pages` is known from `SendSession.begin` on. `waits`: something could not be submitted
    before a route is attached.
    """

    session: SendSession
    granted: Granted | None = None
    mapped_pages: MappedPages | None = None
    usage: TransportUsage = field(default_factory=TransportUsage)
    waits: bool = False
    _builder: WriteBatchBuilder | None = None
    _read_grant: ReadGrant | None = None

    @property
    def is_held(self) -> bool:
        """Whether its KV waits here until the decode worker asks for it."""
        return self.granted is None and self.session.order.ticket.mode == "pull"

    @property
    def grant_to_fill(self) -> Granted:
        """What was granted; nothing is sent before."""
        if self.granted is None:
            raise AssertionError("nothing was granted")
        return self.granted

    @property
    def pages_to_send(self) -> MappedPages:
        """The granted tokens' pages; nothing is sent before there are any."""
        if self.mapped_pages is None:
            raise AssertionError("it has no pages before its session begins")
        return self.mapped_pages

    @property
    def read_grant(self) -> ReadGrant:
        """The decode worker's permission to read what was announced to it."""
        if self._read_grant is None:
            ticket, region = self.session.order.ticket, self.pages_to_send.view.region
            decode = ticket.decode
            self._read_grant = ReadGrant(ticket.id, region.handle, decode.epoch, decode.worker)
        return self._read_grant

    @property
    def builder(self) -> WriteBatchBuilder:
        """One for all that is sent; another one once other pages are granted (`take_grant`)."""
        if self._builder is None:
            granted, mapped_pages = self.grant_to_fill, self.pages_to_send
            theirs = granted.peer.negotiated.theirs
            layout = theirs.layout
            target = (
                PagedSequence(layout, granted.target)
                if self.session.is_written
                else _any_target(layout, granted.grant.num_tokens)
            )
            self._builder = WriteBatchBuilder(
                mapped_pages.layer_pages,
                mapped_pages.sequence,
                target,
                theirs.regions[0].arrays,
                key=None if granted.grant.plain_digests else _derive_key(granted),
            )
        return self._builder

    def take_grant(self, granted: Granted) -> None:
        """It was granted, or the pages of its grant are others."""
        self.granted, self._builder = granted, None

    def was_granted_by(self, peer: Peer) -> bool:
        """Whether this peer granted it."""
        return self.granted is not None and self.granted.peer is peer

    def write_trace(self) -> None:
        """Write into the trace which transports carried it."""
        self.usage.write_into(self.session.order.trace)

    def make_finished(self, first_token: SampledToken | None) -> Finished:
        """What the peer learns at the end."""
        self.write_trace()
        trace = self.session.order.trace
        return Finished(
            ticket=self.session.ticket,
            first_token=first_token,
            transport=trace.transport or "",
            expected_transport=trace.expected_transport or "",
            stamps=trace.stamps.copy(),
        )
