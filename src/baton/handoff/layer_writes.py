"""How ranges of layers leave the prefill worker: as writes, or as announcements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from baton.handoff.messages import Available, encode, pack_blocks
from baton.handoff.session.actions import WriteLayers
from baton.handoff.session.transfer_handle import TransferHandle
from baton.handoff.staging import Holder
from baton.handoff.write_batches import WriteBatchBuilder, notify_without_digests
from baton.kv.copies import BlockTable, PagedSequence
from baton.transfer.interface import PageWrite
from baton.transfer.links.cost_model import measure_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from baton.handoff.grants import Granted
    from baton.handoff.interface import SendOrder
    from baton.handoff.mapped_pages import MappedPages, RegisteredView
    from baton.handoff.messages import Grant
    from baton.handoff.outgoing import OutgoingHandoff
    from baton.handoff.peer_transport_table import PeerTransportTable, TransportChoice
    from baton.handoff.session.actions import AnnounceReadable, SendAction
    from baton.handoff.token_ranges import LayerTokenRange
    from baton.handoff.write_batches import WriteBatch
    from baton.kv.copies import PageCopies
    from baton.kv.layout import KVLayout
    from baton.telemetry.trace import RequestSpan


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
        is_undigested = chosen.peer_transport.kind in granted.grant.undigested
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
