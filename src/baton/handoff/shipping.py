"""How a range of one layer leaves the prefill worker: as writes, or as announcements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from baton.handoff.messages import Available, pack_blocks
from baton.handoff.parcels import Packer
from baton.handoff.staging import Holder
from baton.kv.copies import BlockTable, PagedSequence
from baton.transfer.interface import PageWrite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.handoff.footprint import Footprint, ServedFace
    from baton.handoff.grants import Granted
    from baton.handoff.interface import SendOrder
    from baton.handoff.messages import Grant
    from baton.handoff.routes import Route
    from baton.handoff.session.actions import Announce, Submit
    from baton.kv.copies import PageCopies
    from baton.telemetry.trace import LegTrace
    from baton.transfer.interface import TransferId


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


def write(
    submit: Submit, route: Route, granted: Granted, footprint: Footprint, *, trace: LegTrace
) -> Iterator[tuple[TransferId, int]]:
    """Write a range into the peer's pages, parcel by parcel: each transfer, and where it stops.

    Raises:
        TransferError: the transport refuses a write.
        ProtocolError: the range is not in the pages of either side.
    """
    trace.transport, trace.expected_transport = route.used, route.expected
    target = PagedSequence(granted.peer.met.theirs.layout, granted.target)
    footprint.gather(submit.layer, submit.start, submit.stop)
    packer = Packer(footprint.face.region, footprint.sequence, target)
    for parcel in packer.pack(submit.layer, submit.start, submit.stop):
        page_write = PageWrite(
            remote=route.remote,
            window=granted.ticket.id,
            region=footprint.face.region.handle,
            copies=parcel.copies,
            notice=parcel.notice_bytes,
        )
        _count(trace, parcel.copies)
        yield route.transport.submit(page_write), parcel.notice.stop


def announce(
    action: Announce, granted: Granted, footprint: Footprint, *, trace: LegTrace
) -> Iterator[Available]:
    """Say of a range where it lies in this worker's pages, and its digests, parcel by parcel.

    Raises:
        ProtocolError: the range is not in this worker's pages.
    """
    footprint.gather(action.layer, action.start, action.stop)
    packer = Packer(footprint.face.region, footprint.sequence, _some_target(granted))
    for parcel in packer.pack(action.layer, action.start, action.stop):
        notice = parcel.notice
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


def _some_target(granted: Granted) -> PagedSequence:
    """Pages of the peer's: which ones is its own business; any give the same number of bytes."""
    layout = granted.peer.met.theirs.layout
    num_blocks = -(-granted.grant.num_tokens // layout.block_size)
    return PagedSequence(layout, BlockTable(0, np.arange(num_blocks, dtype=np.int64)))


def _count(trace: LegTrace, copies: PageCopies) -> None:
    trace.num_bytes += copies.num_bytes
    trace.num_pages += copies.num_pages
