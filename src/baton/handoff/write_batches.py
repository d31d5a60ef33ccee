"""From a token range to page copies, digests and a notification; and back, checked."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.handoff.kv_views import Holder
from baton.handoff.messages import DIGEST_BYTES, Available, Notification, encode, pack_blocks
from baton.handoff.session.actions import TransferHandle, WriteLayers
from baton.handoff.token_ranges import LayerTokenRange
from baton.kv.copies import BlockTable, PageCopies, PagedSequence, compute_pieces
from baton.kv.digest import PieceLocator, compute_digests, locate_pieces
from baton.kv.geometry import shared_heads
from baton.transfer.interface import PageWrite
from baton.transfer.links.cost_model import measure_shape
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from baton.handoff.grants import Granted, OutgoingHandoff
    from baton.handoff.interface import SendOrder
    from baton.handoff.kv_views import MappedPages, RegisteredView
    from baton.handoff.messages import Grant
    from baton.handoff.peer_transports import PeerTransportTable, TransportChoice
    from baton.handoff.session.actions import AnnounceReadable, SendAction
    from baton.kv.layout import KVLayout
    from baton.kv.planning import CopyPlanner
    from baton.telemetry.trace import RequestSpan
    from baton.transfer.interface import PagedRegion

MAX_SEGMENTS: Final = 2048
"""Pieces of one write: keeps its notification far below `MAX_NOTIFICATION_BYTES`."""
MAX_JOINED_BYTES: Final = 1 << 20
"""Of layers that are written together: the receiver verifies them while the next are written."""


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """One write: the copies, and what is in them: the pieces `bounds` of each of its layers."""

    copies: PageCopies
    bounds: NDArray[np.int64]

    @property
    def start(self) -> int:
        """The first token."""
        return int(self.bounds[0])

    @property
    def stop(self) -> int:
        """One past the last token."""
        return int(self.bounds[-1])

    @property
    def token_ranges(self) -> tuple[LayerTokenRange, ...]:
        """What it carries, layer by layer."""
        start, stop = self.start, self.stop
        return tuple(LayerTokenRange(layer, start, stop) for layer in self.copies.layers)

    def split(self) -> Iterator[WriteBatch]:
        """The same, layer by layer."""
        return (WriteBatch(copies, self.bounds) for copies in self.copies.split())

    def join(self, following: WriteBatch) -> WriteBatch | None:
        """With the next layer's of the same tokens; None if they go apart."""
        mine, theirs = self.copies, following.copies
        num_layers = mine.num_layers + 1
        if following.bounds is not self.bounds or theirs.groups is not mine.groups:
            return None
        is_large = num_layers * mine.layer_bytes > MAX_JOINED_BYTES
        if is_large or num_layers * (len(self.bounds) - 1) > MAX_SEGMENTS:
            return None
        return WriteBatch(PageCopies(mine.layer, mine.groups, num_layers), self.bounds)


@dataclass(frozen=True, slots=True)
class WriteBatchBuilder:
    """Prefill's side of one handoff: `source` lies in `region`, `target` in the peer's.

    `planner` is the handoff's.
    """

    region: PagedRegion
    source: PagedSequence
    target: PagedSequence
    planner: CopyPlanner

    def build(self, layers: range, start: int, stop: int) -> Iterator[WriteBatch]:
        """Split tokens `[start, stop)` of `layers` into batches of bounded size, in order.

        Layers whose pages are alike and small are together in one.
        """
        sizes = self.source.layout.block_size, self.target.layout.block_size
        bounds = compute_pieces(*sizes, start, stop)
        cuts = _cut(bounds)
        last: WriteBatch | None = None
        for layer, some in product(layers, cuts):
            batch = WriteBatch(self._plan(layer, some), some)
            joined = None if last is None else last.join(batch)
            if last is not None and joined is None:
                yield last
            last = joined or batch
        if last is not None:
            yield last

    def digest(self, batch: WriteBatch) -> Notification:
        """The notification of a batch, with a digest for each of its pieces."""
        digests = b"".join(self._digest(layer, batch.bounds) for layer in batch.copies.layers)
        return _make_notification(batch, digests)

    def _plan(self, layer: int, bounds: NDArray[np.int64]) -> PageCopies:
        low, high = int(bounds[0]), int(bounds[-1])
        return self.planner.plan(self.source, self.target, layer, start=low, stop=high)

    def _digest(self, layer: int, bounds: NDArray[np.int64]) -> bytes:
        source = self.source
        heads = shared_heads(source.layout, self.target.layout, layer)
        pages = _layer_pages(self.region, layer)
        pieces = self.planner.pieces.locate(source, bounds)
        return compute_digests(source.layout, layer, pages, pieces, heads=heads)


def _cut(bounds: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Pieces in runs of at most `MAX_SEGMENTS`; the same object where one run holds them all."""
    if 1 < len(bounds) <= MAX_SEGMENTS + 1:
        return [bounds]
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


@dataclass(frozen=True, slots=True)
class DigestResult:
    """What came of a look at pages: of so many tokens the bytes were compared."""

    is_intact: bool
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DigestVerifier:
    """Decode's side of one handoff: checks what a peer laid out as `peer` wrote."""

    region: PagedRegion
    target: PagedSequence
    peer: KVLayout
    locator: PieceLocator = field(default_factory=PieceLocator)

    def verify(self, notification: Notification, sampler: Sampler | None = None) -> DigestResult:
        """Whether the bytes at the tokens that the notification names have the digests it claims.

        With a sampler only some of the pieces are looked at; digests must be there for all.
        """
        layer, layout = notification.layer, self.target.layout
        bounds = compute_pieces(
            self.peer.block_size, layout.block_size, notification.start, notification.stop
        )
        num_segments = len(bounds) - 1
        if len(notification.digests) != DIGEST_BYTES * num_segments:
            return DigestResult(is_intact=False, num_tokens=0)
        pages = _layer_pages(self.region, layer)
        heads = shared_heads(self.peer, layout, layer)
        if sampler is None:
            pieces = self.locator.locate(self.target, bounds)
            found = compute_digests(layout, layer, pages, pieces, heads=heads)
            return DigestResult(found == notification.digests, pieces.num_tokens)
        only = sampler.choose(layer, num_segments)
        pieces = locate_pieces(self.target, bounds, only)
        found = compute_digests(layout, layer, pages, pieces, heads=heads)
        claimed = np.frombuffer(notification.digests, np.uint8).reshape(num_segments, DIGEST_BYTES)
        return DigestResult(found == claimed[only].tobytes(), pieces.num_tokens)


def _layer_pages(region: PagedRegion, layer: int) -> NDArray[np.uint8]:
    return view_pages(region.memory, region.arrays[layer])


def map_granted_pages(view: RegisteredView, order: SendOrder, grant: Grant) -> MappedPages | None:
    """The granted tokens' pages in a KV view; None while no staging page is free.

    Raises:
        HandoffError: there will never be room for them.
    """
    if not view.is_staged:
        return view.try_map_pages(Holder("send", order.ticket.id), order.blocks)
    size, table = view.view.layout.block_size, order.blocks
    first, stop = grant.start // size, -(-grant.num_tokens // size)
    granted = BlockTable(first, table.blocks[first - table.first : stop - table.first])
    return view.try_map_pages(Holder("send", order.ticket.id), granted)


@dataclass(frozen=True, slots=True)
class PostedWrite:
    """One write that was submitted: over what, and what it carries."""

    chosen: TransportChoice
    handle: TransferHandle
    token_ranges: tuple[LayerTokenRange, ...]


def write_batches(
    submit: WriteLayers,
    peer_transports: PeerTransportTable,
    *,
    outgoing: OutgoingHandoff,
    granted: Granted,
    mapped_pages: MappedPages,
) -> Iterator[PostedWrite]:
    """Write a range into the peer's pages, batch by batch, each over the best transport for it.

    Layers whose pages are alike go together, where that route takes them so: a short prompt's
    layers cost more to be announced than to be copied.

    Raises:
        TransferError: no route is left, or a transport refuses a write.
        ProtocolError: the range is not in the pages of either side.
    """
    trace, region = outgoing.session.order.trace, mapped_pages.view.region
    target = PagedSequence(granted.peer.negotiated.theirs.layout, granted.target)
    builder = WriteBatchBuilder(region, mapped_pages.sequence, target, outgoing.planner)
    layers = range(submit.layer, submit.layer + submit.num_layers)
    for layer in layers:
        mapped_pages.gather(layer, submit.start, submit.stop)
    theirs = granted.peer.negotiated.theirs.regions[0].arrays

    def choose(copies: PageCopies) -> TransportChoice:
        shape = measure_shape(copies, region.arrays, theirs)
        chosen = peer_transports.choose(granted.peer, shape, outgoing.session.excluded)
        if chosen is None:
            raise peer_transports.explain(granted.peer)
        return chosen

    for batch, chosen in _choose_transports(
        builder.build(layers, submit.start, submit.stop), choose
    ):
        is_undigested = chosen.peer_transport.kind in granted.grant.no_digest_transports
        notification = notify_without_digests(batch) if is_undigested else builder.digest(batch)
        page_write = PageWrite(
            remote=chosen.peer_transport.attached,
            grant=granted.ticket.id,
            region=region.handle,
            copies=batch.copies,
            notification=encode(notification),
        )
        _count(trace, batch.copies)
        outgoing.usage.record_choice(chosen.choice)
        began_at = peer_transports.now()
        transfer = chosen.peer_transport.transport.submit(page_write)
        peer_transports.submitted(chosen, began_at)
        yield PostedWrite(
            chosen, TransferHandle(chosen.peer_transport.kind, transfer), batch.token_ranges
        )


def _choose_transports(
    batches: Iterator[WriteBatch], choose: Callable[[PageCopies], TransportChoice]
) -> Iterator[tuple[WriteBatch, TransportChoice]]:
    """Each batch with its best transport; layer by layer where that takes no layers together."""
    for batch in batches:
        chosen = choose(batch.copies)
        if batch.copies.num_layers == 1 or chosen.peer_transport.transport.capabilities.multi_array:
            yield batch, chosen
        else:
            yield from ((each, choose(each.copies)) for each in batch.split())


def merge_writes(actions: Sequence[SendAction]) -> Iterator[SendAction]:
    """The same actions; writes of the same tokens of layers that follow each other are one."""
    last: WriteLayers | None = None
    for action in actions:
        if not isinstance(action, WriteLayers):
            if last is not None:
                yield last
            last = None
            yield action
            continue
        if last is not None and _follows(action, last):
            last = WriteLayers(
                last.layer, last.start, last.stop, last.num_layers + action.num_layers
            )
            continue
        if last is not None:
            yield last
        last = action
    if last is not None:
        yield last


def _follows(submit: WriteLayers, last: WriteLayers) -> bool:
    tokens = (submit.start, submit.stop)
    return submit.layer == last.layer + last.num_layers and tokens == (last.start, last.stop)


def announce(
    action: AnnounceReadable,
    outgoing: OutgoingHandoff,
    *,
    granted: Granted,
    mapped_pages: MappedPages,
) -> Iterator[Available]:
    """Announce where a range lies in this worker's pages, with its digests, batch by batch.

    Raises:
        ProtocolError: the range is not in this worker's pages.
    """
    mapped_pages.gather(action.layer, action.start, action.stop)
    trace, num_tokens = outgoing.session.order.trace, granted.grant.num_tokens
    target = _any_target(granted.peer.negotiated.theirs.layout, num_tokens)
    builder = WriteBatchBuilder(
        mapped_pages.view.region, mapped_pages.sequence, target, outgoing.planner
    )
    for batch in builder.build(range(action.layer, action.layer + 1), action.start, action.stop):
        notification = builder.digest(batch)
        source = mapped_pages.pages_of(notification.start, notification.stop)
        _count(trace, batch.copies)
        yield Available(
            ticket=granted.ticket.id,
            layer=notification.layer,
            start=notification.start,
            stop=notification.stop,
            first_block=source.first,
            blocks=pack_blocks(source.blocks),
            digests=notification.digests,
        )


@lru_cache(maxsize=16)
def _any_target(layout: KVLayout, num_tokens: int) -> PagedSequence:
    """Pages of the peer's: which ones is its own business; any give the same number of bytes.

    The same object for all layers of a handoff.
    """
    num_blocks = -(-num_tokens // layout.block_size)
    return PagedSequence(layout, BlockTable(0, np.arange(num_blocks, dtype=np.int64)))


def _count(trace: RequestSpan, copies: PageCopies) -> None:
    trace.num_bytes += copies.num_bytes
    trace.num_pages += copies.num_pages


@dataclass(slots=True)
class Sampler:
    """Chooses the pieces of one handoff that are looked at. Owner: the receiver's thread.

    `chance` is seeded from the system's entropy: a peer cannot foresee the choice.
    """

    share: float
    chance: np.random.Generator = field(
        default_factory=lambda: np.random.default_rng(secrets.randbits(128))
    )
    _seen_layers: set[int] = field(default_factory=set)

    def choose(self, layer: int, num_segments: int) -> NDArray[np.int64]:
        """Indices of one notification's pieces to check, ascending; at least one of a new layer.

        Every piece is chosen with probability `share` or more, independently of the others.
        """
        is_chosen = self.chance.random(num_segments) < self.share
        if layer not in self._seen_layers and num_segments:
            self._seen_layers.add(layer)
            is_chosen[self.chance.integers(num_segments)] = True
        return np.flatnonzero(is_chosen)
