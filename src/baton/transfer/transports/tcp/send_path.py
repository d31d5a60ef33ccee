"""A write on its way out: cut into stripes, each of which is a stream's share of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.net.framing import encode_frame
from baton.transfer.messages import encode
from baton.transfer.scatter_gather import (
    MAX_PART_BYTES,
    Geometry,
    cut_parts,
    read_batches,
    sole_batch,
)
from baton.transfer.transports.tcp.wire import Data

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.kv.copies import CopyGroup, PageCopies
    from baton.transfer.interface import PagedRegion, PageWrite


@dataclass(frozen=True, slots=True)
class Stripe:
    """What one stream carries of a write: perhaps nothing but its notification.

    `parts`: of which array, and which of its pages.
    """

    sequence: int
    num_stripes: int
    notification: bytes
    parts: tuple[tuple[int, CopyGroup], ...]
    num_bytes: int


def cut_stripes(
    write: PageWrite, sequence: int, *, max_stripes: int, stripe_bytes: int
) -> list[Stripe]:
    """A write as 1 to `max_stripes` stripes of `stripe_bytes` or more (about), alike in size."""
    num_bytes = write.copies.num_bytes
    num_stripes = max(1, min(max_stripes, num_bytes // stripe_bytes))
    parts = _cut_evenly(write.copies, -(-num_bytes // num_stripes))
    if num_stripes == 1:
        return [Stripe(sequence, 1, write.notification, tuple(parts), num_bytes)]
    num_shares = min(num_stripes, max(1, len(parts)))
    shares: list[list[tuple[int, CopyGroup]]] = [[] for _ in range(num_shares)]
    loads = [0] * len(shares)
    for part in parts:
        lightest = loads.index(min(loads))
        shares[lightest].append(part)
        loads[lightest] += part[1].num_bytes
    notifications = [write.notification, *(b"" for _ in shares[1:])]
    return [
        Stripe(sequence, len(shares), notification, tuple(share), load)
        for share, notification, load in zip(shares, notifications, loads, strict=True)
    ]


def whole_batch(write: PageWrite, region: PagedRegion, sequence: int) -> list[memoryview] | None:
    """A checked write as the only stripe of it, if one system call takes all of it; else None."""
    groups, layer = write.copies.groups, write.copies.layer
    if len(groups) != 1 or write.copies.num_layers != 1:
        return None
    payload = sole_batch(_source_of(groups[0]), region.memory, region.arrays[layer])
    if not payload:
        return None
    pages, spans = groups[0].packed_targets
    header = Data(sequence, write.grant, layer, pages, spans, write.notification)
    return [memoryview(encode_frame(encode(header))), *payload]


def outgoing_batches(
    write: PageWrite, region: PagedRegion, stripe: Stripe
) -> Iterator[list[memoryview]]:
    """All buffers of a stripe of a checked write, in the order of the wire, made when needed.

    The region's memory is read in place: it must not change until the receiver has answered.
    """
    if not stripe.parts:
        header = Data(
            stripe.sequence, write.grant, write.copies.layer, b"", b"", stripe.notification,
            stripe.num_stripes,
        )  # fmt: skip
        yield [memoryview(encode_frame(encode(header)))]
    for number, (array, part) in enumerate(stripe.parts, start=1):
        pages, spans = part.packed_targets
        notification = stripe.notification if number == len(stripe.parts) else None
        header = Data(
            stripe.sequence, write.grant, array, pages, spans, notification, stripe.num_stripes
        )
        payload = read_batches(_source_of(part), region.memory, region.arrays[array])
        yield [memoryview(encode_frame(encode(header))), *next(payload, [])]
        yield from payload


def _source_of(part: CopyGroup) -> Geometry:
    return Geometry(part.src_pages, part.spans[:, 0], part.spans[:, 2])


def _cut_evenly(copies: PageCopies, share_bytes: int) -> list[tuple[int, CopyGroup]]:
    parts = list(cut_parts(copies.groups, max(1, min(MAX_PART_BYTES, share_bytes))))
    return [(layer, part) for layer in copies.layers for part in parts if part.num_bytes > 0]
