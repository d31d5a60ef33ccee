"""How ranges of layers leave the prefill worker: as writes, or as announcements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from baton.handoff.messages import Available, encode, pack_blocks
from baton.handoff.parcels import Packer, announce_undigested
from baton.handoff.session.actions import Submit
from baton.handoff.session.posted import Posted
from baton.handoff.staging import Holder
from baton.kv.copies import BlockTable, PagedSequence
from baton.transfer.interface import PageWrite
from baton.transfer.links.shape import measure_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from baton.handoff.footprint import Footprint, ServedFace
    from baton.handoff.grants import Granted
    from baton.handoff.interface import SendOrder
    from baton.handoff.messages import Grant
    from baton.handoff.outgoing import Outgoing
    from baton.handoff.parcels import Parcel
    from baton.handoff.routes import RouteTable, Way
    from baton.handoff.session.actions import Announce, SendAction
    from baton.handoff.stretches import Stretch
    from baton.kv.copies import PageCopies
    from baton.kv.layout import KVLayout
    from baton.telemetry.trace import LegTrace


def lay_footprint(face: ServedFace, order: SendOrder, grant: Grant) -> Footprint | None:
    """Where the granted tokens of an order lie on a face; None while no staging page is free.

    Raises:
        HandoffError: there will never be room for them.
    """
    if not face.is_staged:
        return face.try_lay(Holder("send", order.ticket.id), order.blocks)
    size, table = face.face.layout.block_size, order.blocks
    first, stop = grant.start // size, -(-grant.num_tokens // size)
    granted = BlockTable(first, table.blocks[first - table.first : stop - table.first])
    return face.try_lay(Holder("send", order.ticket.id), granted)


@dataclass(frozen=True, slots=True)
class Shipment:
    """One write that was submitted: over what, and what it carries."""

    way: Way
    posted: Posted
    stretches: tuple[Stretch, ...]


def write(
    submit: Submit,
    routes: RouteTable,
    *,
    outgoing: Outgoing,
    granted: Granted,
    footprint: Footprint,
) -> Iterator[Shipment]:
    """Write a range into the peer's pages, parcel by parcel, each over the best route for it.

    Layers whose pages are alike go together, where that route takes them so: a short prompt's
    layers cost more to be announced than to be copied.

    Raises:
        TransferError: no route is left, or a transport refuses a write.
        ProtocolError: the range is not in the pages of either side.
    """
    trace, region = outgoing.session.order.trace, footprint.face.region
    target = PagedSequence(granted.peer.met.theirs.layout, granted.target)
    packer = Packer(region, footprint.sequence, target, outgoing.planner)
    layers = range(submit.layer, submit.layer + submit.num_layers)
    for layer in layers:
        footprint.gather(layer, submit.start, submit.stop)
    theirs = granted.peer.met.theirs.regions[0].arrays

    def choose(copies: PageCopies) -> Way:
        shape = measure_shape(copies, region.arrays, theirs)
        way = routes.choose(granted.peer, shape, outgoing.session.avoids)
        if way is None:
            raise routes.explain(granted.peer)
        return way

    for parcel, way in _choose_ways(packer.pack(layers, submit.start, submit.stop), choose):
        is_undigested = way.route.kind in granted.grant.undigested
        notice = announce_undigested(parcel) if is_undigested else packer.digest(parcel)
        page_write = PageWrite(
            remote=way.route.attached,
            window=granted.ticket.id,
            region=region.handle,
            copies=parcel.copies,
            notice=encode(notice),
        )
        _count(trace, parcel.copies)
        outgoing.carriage.note(way.choice)
        began_at = routes.now()
        transfer = way.route.transport.submit(page_write)
        routes.posted(way, began_at)
        yield Shipment(way, Posted(way.route.kind, transfer), parcel.stretches)


def _choose_ways(
    parcels: Iterator[Parcel], choose: Callable[[PageCopies], Way]
) -> Iterator[tuple[Parcel, Way]]:
    """Each parcel with its best route; layer by layer where that takes no layers together."""
    for parcel in parcels:
        way = choose(parcel.copies)
        if parcel.copies.num_layers == 1 or way.route.transport.capabilities.joins:
            yield parcel, way
        else:
            yield from ((each, choose(each.copies)) for each in parcel.split())


def join_submits(actions: Sequence[SendAction]) -> Iterator[SendAction]:
    """The same actions; writes of the same tokens of layers that follow each other are one."""
    last: Submit | None = None
    for action in actions:
        if not isinstance(action, Submit):
            if last is not None:
                yield last
            last = None
            yield action
            continue
        if last is not None and _follows(action, last):
            last = Submit(last.layer, last.start, last.stop, last.num_layers + action.num_layers)
            continue
        if last is not None:
            yield last
        last = action
    if last is not None:
        yield last


def _follows(submit: Submit, last: Submit) -> bool:
    tokens = (submit.start, submit.stop)
    return submit.layer == last.layer + last.num_layers and tokens == (last.start, last.stop)


def announce(
    action: Announce, outgoing: Outgoing, *, granted: Granted, footprint: Footprint
) -> Iterator[Available]:
    """Say of a range where it lies in this worker's pages, and its digests, parcel by parcel.

    Raises:
        ProtocolError: the range is not in this worker's pages.
    """
    footprint.gather(action.layer, action.start, action.stop)
    trace, num_tokens = outgoing.session.order.trace, granted.grant.num_tokens
    target = _some_target(granted.peer.met.theirs.layout, num_tokens)
    packer = Packer(footprint.face.region, footprint.sequence, target, outgoing.planner)
    for parcel in packer.pack(range(action.layer, action.layer + 1), action.start, action.stop):
        notice = packer.digest(parcel)
        source = footprint.pages_of(notice.start, notice.stop)
        _count(trace, parcel.copies)
        yield Available(
            ticket=granted.ticket.id,
            layer=notice.layer,
            start=notice.start,
            stop=notice.stop,
            first_block=source.first,
            blocks=pack_blocks(source.blocks),
            digests=notice.digests,
        )


@lru_cache(maxsize=16)
def _some_target(layout: KVLayout, num_tokens: int) -> PagedSequence:
    """Pages of the peer's: which ones is its own business; any give the same number of bytes.

    The same object for all layers of a handoff.
    """
    num_blocks = -(-num_tokens // layout.block_size)
    return PagedSequence(layout, BlockTable(0, np.arange(num_blocks, dtype=np.int64)))


def _count(trace: LegTrace, copies: PageCopies) -> None:
    trace.num_bytes += copies.num_bytes
    trace.num_pages += copies.num_pages
