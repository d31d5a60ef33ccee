"""One handoff out of this worker: from a token range to page copies, digests, writes."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from baton.clock import Instant
from baton.handoff.kv_views import Holder, KVView, MappedPages, RegisteredView
from baton.handoff.messages import Available, Finished, Grant, Notification, encode, pack_blocks
from baton.handoff.peer_transports import PeerTransportTable, TransportChoice, TransportUsage
from baton.handoff.session.actions import AnnounceReadable, TransferHandle, WriteLayers
from baton.handoff.session.send import LayersWritten, SendSession
from baton.kv.copies import (
    MAX_JOINED_BYTES,
    MAX_JOINED_DEVICE_BYTES,
    BlockTable,
    CopyPlanner,
    PageCopies,
    PagedSequence,
    compute_pieces,
    count_blocks,
)
from baton.kv.device_digest import DevicePieceDigests, DigestsParts
from baton.kv.digest import DigestKey, PieceDigests, PieceLocator, compute_digests
from baton.record import MutableRecord, Record
from baton.transfer.interface import PageArray, PageWrite, ReadGrant, ScopesReads
from baton.transfer.links.cost_model import measure_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from baton.handoff.grants import Granted
    from baton.handoff.interface import SampledToken, SendOrder, StreamPosition
    from baton.handoff.peers import Peer
    from baton.handoff.session.actions import GatherPages, SendFinished
    from baton.kv.layout import KVLayout

MAX_SEGMENTS: Final = 2048
"""Pieces of one write: keeps its notification far below `MAX_NOTIFICATION_BYTES`."""
STAGED_BATCH_BYTES: Final = 1 << 20
"""Of staged pages that are gathered at once: while they travel, the next are."""
MIN_DIGESTED_PAGE_BYTES: Final = 8192
"""Smaller pages are digested before they are copied, which then takes fewer calls: adjacent ones
are copied in one (docs/verification.md)."""


class WriteBatch(Record, frozen=True):
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
    def written(self) -> LayersWritten:
        """What it carries."""
        return LayersWritten(self.copies.layers, self.start, self.stop)

    def split(self) -> Iterator[WriteBatch]:
        """The same, layer by layer."""
        return (
            WriteBatch(copies, self.bounds, self.start, self.stop) for copies in self.copies.split()
        )


class WriteBatchBuilder:
    """Prefill's side of one handoff: `source` lies in `layer_pages`, `target` in the peer's.

    `target_arrays` are the peer's region; `key` is for digests that cannot be forged. With `device`
    the pages are in its memory, `layer_pages` are none, and no digest has a key. Keeps what the
    handoff's layers have in common. Owner thread: the handoff's.

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
        device: DigestsParts | None = None,
    ) -> None:
        self._layer_pages, self._source, self._target = layer_pages, source, target
        self._key = key
        self._device = None if device is None else DevicePieceDigests(device)
        self.target_arrays = target_arrays
        joined = MAX_JOINED_BYTES if device is None else MAX_JOINED_DEVICE_BYTES
        self._planner = CopyPlanner(source.layout, target.layout, joined)
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
        first, stop = batch.copies.layer, batch.copies.layer + batch.copies.num_layers
        pair = self._planner.layers.pairs[first]
        if self._device is not None:
            digests = self._device.compute(pair.src, range(first, stop), pieces, pair.heads)
        else:
            pages = self._layer_pages[first:stop]
            digests = compute_digests(
                pair.src, pages, pieces, heads=pair.heads, key=key, layer=first
            )
        return _make_notification(batch, digests)

    def try_digest_in_copy(
        self, batch: WriteBatch, finished: Finished | None, now: Callable[[], Instant]
    ) -> DigestedInCopy | None:
        """The same, without a key, from pages that are digested once they are copied.

        None where that is slower, or a page has several pieces, which are not all copied at once,
        or the pages are in a device's memory.
        """
        if self._device is not None:
            return None
        first, stop = batch.copies.layer, batch.copies.layer + batch.copies.num_layers
        pieces = self._locator.locate(self._source, batch.bounds)
        pair, pages = self._planner.layers.pairs[first], self._layer_pages[first:stop]
        is_slower = pages[0].shape[1] < MIN_DIGESTED_PAGE_BYTES
        if is_slower or not pieces.has_one_in_each_block:
            return None
        digests = PieceDigests(pair.src, pages, pieces, heads=pair.heads, layer=first)
        return DigestedInCopy(batch, digests, finished, now)


class DigestedInCopy(MutableRecord):
    """The notification of a batch whose pages are digested once they are copied.

    See `LateNotification`. `digests` are those of the sender's own pages: what a transport copied
    in their place has another digest. `spent_s` is what they took.
    """

    batch: WriteBatch
    digests: PieceDigests
    finished: Finished | None
    now: Callable[[], Instant]
    spent_s: float = 0.0

    def add_pages(self, arrays: range, pages: list[int]) -> None:
        """See `LateNotification`."""
        began_at = self.now()
        self.digests.add_pages(arrays, pages)
        self.spent_s += self.now() - began_at

    def finish(self) -> bytes:
        """See `LateNotification`."""
        began_at = self.now()
        notification = _make_notification(self.batch, self.digests.finish(), self.finished)
        self.spent_s += self.now() - began_at
        return encode(notification)


def _cut(bounds: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Pieces in runs of at most `MAX_SEGMENTS`."""
    return [
        bounds[first : first + MAX_SEGMENTS + 1]
        for first in range(0, len(bounds) - 1, MAX_SEGMENTS)
    ]


def _make_notification(
    batch: WriteBatch, digests: bytes, finished: Finished | None = None
) -> Notification:
    layer, num_layers = batch.copies.layer, batch.copies.num_layers
    return Notification(layer, batch.start, batch.stop, digests, num_layers, finished)


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


def split_gather(gather: GatherPages, view: KVView) -> Iterator[range]:
    """Its layers, as many at once as have `STAGED_BATCH_BYTES`; all, where nothing is copied."""
    layout = view.layout
    if view.staging is None:
        yield range(gather.layer, gather.layer + gather.num_layers)
        return
    token_bytes = layout.bytes_per_token // layout.num_layers
    layer_bytes = max(1, (gather.stop - gather.start) * token_bytes)
    at_once = max(1, STAGED_BATCH_BYTES // layer_bytes)
    end = gather.layer + gather.num_layers
    for first in range(gather.layer, end, at_once):
        yield range(first, min(first + at_once, end))


class PostedWrite(Record, frozen=True):
    """One write that was submitted: over what, and what it carries. `is_last`: Finished, too."""

    chosen: TransportChoice
    handle: TransferHandle
    written: LayersWritten
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
    trace = outgoing.session.order.trace
    trace.num_bytes += chosen.choice.shape.num_bytes
    trace.num_pages += copies.num_pages
    outgoing.usage.record_choice(chosen.choice)  # before `finished`, which names the transport
    is_undigested = transport.kind in granted.grant.no_digest_transports
    finished = None if finish is None else outgoing.make_finished(finish.first_token)
    late, notification = None, b""
    if not is_undigested and transport.capabilities.late_notifications:
        late = builder.try_digest_in_copy(batch, finished, peer_transports.now)
    if late is None:
        digests = b""
        if not is_undigested:
            is_keyed = not transport.capabilities.same_host_only
            digests = builder.digest(batch, is_keyed=is_keyed).digests
        notification = encode(_make_notification(batch, digests, finished))
    page_write = PageWrite(
        remote=chosen.peer_transport.remote_for(granted.grant.encoding),
        grant=granted.ticket.id,
        region=outgoing.pages_to_send.view.region.handle,
        copies=copies,
        notification=notification,
        late_notification=late,
    )
    began_at = peer_transports.now()
    transfer = transport.submit(page_write)
    # What the digests took is no property of the link, over whichever transport they are made.
    peer_transports.submitted(chosen, Instant(began_at + (0 if late is None else late.spent_s)))
    handle = TransferHandle(transport.kind, transfer)
    return PostedWrite(chosen, handle, batch.written, finish is not None)


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


class OutgoingHandoff(MutableRecord):
    """A session, what was granted, and what carries it.

    `mapped_pages` is known from `SendSession.begin` on. `waits`: something could not be submitted
    before a route is attached. `after`: at that position all is computed that was reported.
    `refused` was granted in an encoding that was refused: another grant will follow.
    `estimated_at`: the encoding was chosen.
    """

    session: SendSession
    offered_at: Instant
    granted: Granted | None = None
    refused: Granted | None = None
    estimated_at: Instant | None = None
    mapped_pages: MappedPages | None = None
    usage: TransportUsage = msgspec.field(default_factory=TransportUsage)
    waits: bool = False
    after: StreamPosition | None = None
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
            theirs = granted.peer.views_for(granted.grant.encoding).theirs
            layout, memory = theirs.layout, mapped_pages.view.region.device
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
                device=None if memory is None else memory.access,
            )
        return self._builder

    def take_grant(self, granted: Granted) -> None:
        """It was granted, or the pages of its grant are others."""
        self.granted, self._builder = granted, None

    def was_granted_by(self, peer: Peer) -> bool:
        """Whether this peer granted it."""
        return self.granted is not None and self.granted.peer is peer

    def was_refused_to(self, peer: Peer) -> bool:
        """Whether this peer's grant was refused, for its encoding."""
        return self.refused is not None and self.refused.peer is peer

    def write_trace(self) -> None:
        """Write into the trace which transports carried it, and who moved the bytes."""
        session, trace = self.session, self.session.order.trace
        self.usage.write_into(trace)
        if session.grant is not None:
            trace.operation = session.grant.op

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
