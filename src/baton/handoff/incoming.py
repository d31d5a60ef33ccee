"""One handoff into this worker, as its context keeps it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

import msgspec
import numpy as np

from baton.encodings.interface import RAW
from baton.handoff.encoded_view import note_encoding
from baton.handoff.messages import DIGEST_BYTES, Notification, unpack_blocks
from baton.handoff.peer_transports import TransportUsage
from baton.kv.copies import BlockTable, compute_pieces, pair_layers
from baton.kv.device_digest import DevicePieceDigests
from baton.kv.digest import DigestKey, PieceDigests, PieceLocator, locate_pieces
from baton.record import MutableRecord, Record
from baton.telemetry.trace import Stamp
from baton.transfer.interface import WriteGrant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.clock import Instant
    from baton.handoff.interface import StreamPosition
    from baton.handoff.kv_views import MappedPages
    from baton.handoff.messages import (
        Available,
        EncodingRefused,
        Finished,
        KVViewDescriptor,
        ReceivingCosts,
    )
    from baton.handoff.peers import Peer
    from baton.handoff.session.receive import ReceiveSession
    from baton.handoff.verify import Level, VerificationPolicy
    from baton.kv.copies import CopyPlanner, PageCopies, PagedSequence
    from baton.kv.device_digest import DigestsParts
    from baton.kv.digest import Pieces
    from baton.kv.layout import KVLayout
    from baton.transfer.interface import Transport
    from baton.transfer.links.choice import Choice


class BlockTableCache:
    """What one peer named last, so that equal names are one table: a plan for it serves again."""

    def __init__(self) -> None:
        self._packed = b""
        self._table: BlockTable | None = None

    def find(self, available: Available) -> BlockTable:
        """The peer's pages that hold what is available.

        Raises:
            ProtocolError: they are no list of pages.
        """
        table = self._table
        if (
            table is None
            or table.first != available.first_block
            or self._packed != available.blocks
        ):
            table = BlockTable(available.first_block, unpack_blocks(available.blocks))
            self._packed, self._table = available.blocks, table
        return table


class IncomingHandoff(MutableRecord):  # noqa: PLR0904 - all that concerns one handoff into this worker
    """A session, its peer, its pages, and the transports that admit writes into them.

    `peer` is None until the prefill worker was dialed, `mapped_pages` until the terms are settled.
    `block_tables` and `planner`, of the first read on, keep what the layers of its reads have in
    common.
    `encoding`, by `costs`, and `theirs`, the peer's view for it, are chosen before staging pages
    are waited for; `refused` is what the peer answered, if it wants to send raw KV.
    `reference_failed`: it was to be handed over by reference, and cannot.
    `waits_for_blocks`: the engine's GPU may still use the blocks, which the peer would write to.
    """

    session: ReceiveSession
    peer: Peer | None = None
    mapped_pages: MappedPages | None = None
    usage: TransportUsage = msgspec.field(default_factory=TransportUsage)
    block_tables: BlockTableCache | None = None
    planner: CopyPlanner | None = None
    unreadable: set[str] = msgspec.field(default_factory=set)
    levels: dict[str, Level] = msgspec.field(default_factory=dict)
    sampler: Sampler | None = None
    reference_failed: bool = False
    waits_for_blocks: bool = False
    encoding: str = RAW
    costs: ReceivingCosts | None = None
    refused: EncodingRefused | None = None
    theirs: KVViewDescriptor | None = None
    _opened: dict[str, Transport] = msgspec.field(default_factory=dict)
    _fencing: set[str] = msgspec.field(default_factory=set)
    _closing: set[str] = msgspec.field(default_factory=set)
    _fenced: list[str] = msgspec.field(default_factory=list)
    _token_layer_bytes: int | None = None
    _verifier: DigestVerifier | None = None

    def open_write_grants(self, transports: tuple[Transport, ...]) -> None:
        """Admit the peer's writes into the pages, over each transport.

        Raises:
            TransferError: one of them refuses; what was opened before is to be closed.
        """
        pages = self._mapped_pages
        write_grant = WriteGrant(
            id=self.session.ticket,
            region=pages.view.region.handle,
            writer=self.session.order.ticket.prefill.epoch,
            pages=pages.pages.blocks,
            writer_name=self.session.order.ticket.prefill.worker,
            is_announced=True,  # by Grant, or by FallbackToWrite
        )
        for transport in transports:
            transport.open_grant(write_grant)
            self._opened[transport.kind] = transport

    def admits(self, transport: Transport) -> bool:
        """Whether this transport's arrivals count: its write grant is not closed."""
        return transport.kind in self._opened

    def has_other(self, transport: Transport) -> bool:
        """Whether the peer could write over another transport."""
        if self.peer is None:
            return False
        theirs = {region.transport for region in self.peer.negotiated.theirs.regions}
        return bool((self._opened.keys() & theirs) - {transport.kind})

    def fence(self, kind: str) -> bool:
        """Close one transport's write grant; whether that is all, and nothing can land over it now.

        Its writer reported that it has no write in flight there. So only a transport that
        posts writes, which no side can recall, is waited for.
        """
        transport = self._opened.pop(kind, None)
        self._fenced.append(kind)
        if transport is None:
            return True
        transport.close_grant(self.session.ticket)
        if transport.capabilities.late_writes:
            self._fencing.add(kind)
            return False
        return True

    def close_write_grants(self, *, writer_is_done: bool) -> bool:
        """Admit no more; whether to wait for each transport's `GrantQuiescent`."""
        opened, self._opened = self._opened, {}
        ticket = self.session.ticket
        if writer_is_done:
            self._closing = {kind for kind, each in opened.items() if not each.finish_grant(ticket)}
        else:
            self._closing = {*opened, *self._fencing}
            for transport in opened.values():
                transport.close_grant(ticket)
        return bool(self._closing)

    def is_fenced(self, transport: Transport) -> bool:
        """Nothing can land over a transport: whether that was waited for, alone."""
        kind = transport.kind
        if kind not in self._fencing:
            return False
        self._fencing.discard(kind)
        return True

    def is_quiescent(self, transport: Transport) -> bool:
        """Nothing can land over a transport: whether it was the last of those closed."""
        if transport.kind not in self._closing:
            return False
        self._closing.discard(transport.kind)
        return not self._closing

    def find_wrong_layers(
        self,
        notification: Notification,
        transport: Transport,
        sampler: Sampler | None,
        *,
        is_keyed: bool,
        begun: PieceDigests | None = None,
    ) -> list[int]:
        """Layers of a notification that are not in the pages as their sender had them.

        With a sampler: as far as it looks. What was compared is noted in the trace. `begun` is
        what `verifier.begin` returned for it.
        """
        seen = self.verifier.verify(notification, sampler, is_keyed=is_keyed, begun=begun)
        trace, num_bytes = self.session.order.trace, seen.num_tokens * self._layer_bytes
        trace.verified(transport.kind, num_bytes, is_intact=not seen.wrong_layers)
        return seen.wrong_layers

    def scatter(self, notification: Notification) -> StreamPosition | None:
        """Copy what a notification names, which is intact, into the engine's blocks.

        See `Staging`.
        """
        layers = range(notification.layer, notification.layer + notification.num_layers)
        return self._mapped_pages.scatter(
            layers, notification.start, notification.stop, self.session.order.after
        )

    def stamp_progress(self, now: Instant, notification: Notification | None = None) -> None:
        """Note in the trace how far it came: the layers of a notification are in the pages."""
        trace, coverage = self.session.order.trace, self.session.coverage
        if notification is not None:
            if not trace.layers_landed:
                trace.layers_landed = [0.0] * self.session.num_layers
            first, num_layers = notification.layer, notification.num_layers
            trace.layers_landed[first : first + num_layers] = [now] * num_layers
        if coverage.has_complete_layer:
            trace.stamp(Stamp.FIRST_LAYER_LANDED, now)
        if coverage.complete:
            trace.stamp(Stamp.LAST_LAYER_LANDED, now)
            estimate, granted_at = trace.encoding_estimate, trace.stamps.get(Stamp.GRANTED)
            if estimate is not None and estimate.took_s is None and granted_at is not None:
                trace.encoding_estimate = msgspec.structs.replace(estimate, took_s=now - granted_at)

    def take_other_terms(self, refused: EncodingRefused) -> None:
        """The peer refused the encoding, and nothing lands in its pages: they are given back."""
        if self.peer is None or self.mapped_pages is None:
            raise AssertionError("an encoding is refused once the terms are settled")
        trace, estimate = self.session.order.trace, self.session.order.trace.encoding_estimate
        if estimate is not None:
            trace.encoding_estimate = msgspec.structs.replace(
                estimate,
                chosen=refused.encoding,
                encoding=estimate.encoding if refused.encoding == RAW else refused.encoding,
                raw_s=refused.raw_s,
                encoded_s=refused.encoded_s,
                prefill_s=refused.prefill_s,
            )
        self.encoding, self.costs = refused.encoding, None  # it cannot be refused once more
        self.theirs = self.peer.views_for(refused.encoding).theirs
        self.mapped_pages = self._verifier = self._token_layer_bytes = None

    def record_read(self, choice: Choice, copies: PageCopies) -> None:
        """Note in the trace what is read, and over what."""
        trace = self.session.order.trace
        trace.num_bytes += copies.num_bytes
        trace.num_pages += copies.num_pages
        self.usage.record_choice(choice)
        self.usage.write_into(trace)

    def record_arrival(self, transport: Transport, notification: Notification) -> None:
        """Note what brought some of the KV: the proof of what was used."""
        num_tokens = (notification.stop - notification.start) * notification.num_layers
        self.usage.add_bytes(transport.kind, num_tokens * self._layer_bytes)
        if self._fenced:
            self.usage.record_failover(self._fenced[0], transport.kind)

    def record_fallback(self, kind: str) -> None:
        """Reading is over, and what it used to be done with."""
        self._fenced.append(kind)

    def record_sender(self, message: Finished) -> None:
        """Note in the trace what only the sender knows."""
        if self.peer is None or self.session.plan is None:
            return
        order, trace = self.session.order, self.session.order.trace
        to_local = self.peer.to_local
        trace.peer_stamps = {stamp: to_local(at) for stamp, at in message.stamps.items()}
        if self.session.plan.op != "WRITE":
            return  # the reader counts for itself; exported blocks do not move
        layout = self._mapped_pages.view.layout
        trace.num_bytes = (order.num_tokens - order.start) * layout.bytes_per_token
        trace.num_pages = len(order.blocks.blocks) * layout.num_layers
        if message.transport and message.transport != message.expected_transport:
            self.usage.record_failover(message.expected_transport, message.transport)

    def end_order(self, *, has_landed: bool) -> None:
        """Its engine is answered: write into the trace what carried it, and who moved the bytes.

        And how it was encoded, if all of it is here.
        """
        trace, plan = self.session.order.trace, self.session.plan
        if has_landed and self.encoding != RAW:
            note_encoding(trace, self._mapped_pages.view.layout)
        if self.session.order.layers is not None:
            self.session.order.layers.end()
        self.usage.write_into(trace)
        if plan is not None:
            trace.operation = plan.op

    @property
    def verifier(self) -> DigestVerifier:
        """One for all that arrives: from the grant on, neither the peer nor the pages change."""
        if self._verifier is None:
            if self.peer is None or self.theirs is None:
                raise AssertionError("nothing is noticed before the terms are settled")
            pages, theirs = self._mapped_pages, self.theirs
            memory = pages.view.region.device
            key, plan = None, self.session.plan
            if plan is None or not plan.plain_digests:
                key = DigestKey(self.peer.link.digest_secret, self.session.ticket)
            self._verifier = DigestVerifier(
                pages.layer_pages,
                pages.sequence,
                theirs.layout,
                key,
                device=None if memory is None else memory.access,
            )
        return self._verifier

    @property
    def _layer_bytes(self) -> int:
        """Of one token, on the average of all layers."""
        if self._token_layer_bytes is None:
            layout = self._mapped_pages.view.layout
            self._token_layer_bytes = layout.bytes_per_token // layout.num_layers
        return self._token_layer_bytes

    @property
    def _mapped_pages(self) -> MappedPages:
        if self.mapped_pages is None:
            raise AssertionError("it has no pages before its terms are settled")
        return self.mapped_pages


def verify_written(
    policy: VerificationPolicy,
    incoming: IncomingHandoff,
    notification: Notification,
    transport: Transport,
) -> list[int]:
    """In which layers a peer's write brought something else than its sender had, as far as seen."""
    level = incoming.levels.get(transport.kind)
    if level is None:
        level = incoming.levels[transport.kind] = policy.level_over(transport)
    is_keyed = not transport.capabilities.same_host_only
    match level:
        case "identity":
            return []
        case "sampled":
            if incoming.sampler is None:
                incoming.sampler = Sampler(policy.share)
            return incoming.find_wrong_layers(
                notification, transport, incoming.sampler, is_keyed=is_keyed
            )
        case "full":
            return incoming.find_wrong_layers(notification, transport, None, is_keyed=is_keyed)
        case _:
            assert_never(level)


def verify_read(
    incoming: IncomingHandoff,
    notification: Notification,
    transport: Transport,
    begun: PieceDigests | None,
) -> bool:
    """Whether what a read brought is, all of it, what the peer announced.

    Whatever the policy: its pages may have changed while they were read.
    """
    return not incoming.find_wrong_layers(notification, transport, None, is_keyed=True, begun=begun)


def explain_mismatch(notification: Notification) -> str:
    """What was expected, and is not there."""
    tokens = f"[{notification.start}, {notification.stop})"
    first, num_layers = notification.layer, notification.num_layers
    layers = f"layer {first}" if num_layers == 1 else f"layers {first} to {first + num_layers - 1}"
    return f"digest mismatch in {layers}, tokens {tokens}"


class DigestResult(Record, frozen=True):
    """What came of a look at pages: of so many tokens (of one layer each) bytes were compared.

    `wrong_layers` have other bytes than their sender had, in one of their pieces or more.
    """

    wrong_layers: list[int]
    num_tokens: int


class DigestVerifier:
    """Decode's side of one handoff: checks what a peer laid out as `peer` wrote.

    `key` is for digests that cannot be forged. With `device` the pages are in its memory,
    `layer_pages` are none, and no digest has a key.
    Keeps what the handoff's layers have in common. Owner thread: the handoff's.

    Raises:
        LayoutMismatchError: the peer's KV cannot be what lies there.
    """

    def __init__(
        self,
        layer_pages: Sequence[NDArray[np.uint8]],
        target: PagedSequence,
        peer: KVLayout,
        key: DigestKey | None = None,
        *,
        device: DigestsParts | None = None,
    ) -> None:
        self._layer_pages, self._target, self._key = layer_pages, target, key
        self._device = None if device is None else DevicePieceDigests(device)
        self._block_sizes = peer.block_size, target.layout.block_size
        self._layers = pair_layers(peer, target.layout)
        self._locator = PieceLocator()

    def begin(
        self, layers: range, start: int, stop: int, *, is_keyed: bool = False
    ) -> PieceDigests | None:
        """Digests of tokens `[start, stop)` of layers, to be made as their pages are filled.

        For `verify`. None where a page has several pieces, so that they are not all there at once,
        for layers that are not alike, and where pages are in a device's memory.
        """
        if self._device is not None:
            return None
        bounds = compute_pieces(*self._block_sizes, start, stop)
        pieces = self._locator.locate(self._target, bounds)
        if not pieces.has_one_in_each_block or self._layers.alike(layers) != layers:
            return None
        return self._begin(layers, pieces, self._key if is_keyed else None)

    def verify(
        self,
        notification: Notification,
        sampler: Sampler | None = None,
        *,
        is_keyed: bool = False,
        begun: PieceDigests | None = None,
    ) -> DigestResult:
        """Where the bytes at the tokens that the notification names lack the digests it claims.

        With a sampler only some of the pieces are looked at; digests must be there for all.
        With `is_keyed` they are by the handoff's key, where it has one. `begun` is what `begin`
        returned for this notification's layers and tokens, and this `is_keyed`.
        """
        key = self._key if is_keyed else None
        bounds = compute_pieces(*self._block_sizes, notification.start, notification.stop)
        layers = range(notification.layer, notification.layer + notification.num_layers)
        claimed, layer_bytes = notification.digests, DIGEST_BYTES * (len(bounds) - 1)
        if len(claimed) != layer_bytes * len(layers):
            return DigestResult(list(layers), num_tokens=0)
        if sampler is not None:
            return self._verify_some(layers, bounds, claimed, sampler=sampler, key=key)
        pieces = self._locator.locate(self._target, bounds)
        found, rest = b"", layers
        while rest:
            alike = self._layers.alike(rest)
            found += begun.finish() if begun else self._compute(alike, pieces, key)
            rest = rest[len(alike) :]
        wrong = [] if found == claimed else _find_wrong(layers, found, claimed, layer_bytes)
        return DigestResult(wrong, pieces.num_tokens * len(layers))

    def _verify_some(
        self,
        layers: range,
        bounds: NDArray[np.int64],
        claimed: bytes,
        *,
        sampler: Sampler,
        key: DigestKey | None,
    ) -> DigestResult:
        """Other pieces of each layer, as the sampler chooses."""
        by_layer = np.frombuffer(claimed, np.uint8).reshape(
            len(layers), len(bounds) - 1, DIGEST_BYTES
        )
        wrong, num_tokens = [], 0
        for layer, digests in zip(layers, by_layer, strict=True):
            only = sampler.choose(layer, len(digests))
            pieces = locate_pieces(self._target, bounds, only)
            found = self._compute(range(layer, layer + 1), pieces, key)
            if found != digests[only].tobytes():
                wrong.append(layer)
            num_tokens += pieces.num_tokens
        return DigestResult(wrong, num_tokens)

    def _compute(self, layers: range, pieces: Pieces, key: DigestKey | None) -> bytes:
        """The digests of what lies in the pages now."""
        if self._device is not None:
            pair = self._layers.pairs[layers.start]
            return self._device.compute(pair.dst, layers, pieces, pair.heads)
        return self._begin(layers, pieces, key).finish()

    def _begin(self, layers: range, pieces: Pieces, key: DigestKey | None) -> PieceDigests:
        pair, pages = (
            self._layers.pairs[layers.start],
            self._layer_pages[layers.start : layers.stop],
        )
        return PieceDigests(pair.dst, pages, pieces, heads=pair.heads, key=key, layer=layers.start)


def _find_wrong(layers: range, found: bytes, claimed: bytes, layer_bytes: int) -> list[int]:
    """Of which layers the digests differ."""
    starts = zip(layers, range(0, len(claimed), layer_bytes), strict=True)
    return [
        layer
        for layer, start in starts
        if found[start : start + layer_bytes] != claimed[start : start + layer_bytes]
    ]


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
