"""Messages of a `tcp` connection after the handshake, and writes encoded as such.

A `Data` frame is followed by its payload, raw: for each page in order, for each span in order, its
bytes; so is a `Served` frame, with what its `Fetch` named. A write travels on one or more streams;
its *stripe* on each is one or more `Data` frames of one sequence number; the last has the
notification (docs/wire/transfer.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec

from baton.net.framing import decode, encode
from baton.transfer.interface import PageArray, PagedRegion, PageWrite
from baton.transfer.messages import EpochText, IdBytes, NotAttached, NotificationBytes, Reason
from baton.transfer.scatter_gather import (
    MAX_PART_BYTES,
    cut_parts,
    read_batches,
    read_sole_batch,
    source_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from baton.kv.copies import CopyGroup, PageCopies

MAX_STREAMS: Final = 16

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Stripes: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)]


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Dialer → listener, first: which incarnation of a worker wants to reach which region.

    `link` is the same for all streams of one remote, and of no other.
    """

    epoch: EpochText
    region: IdBytes
    link: IdBytes


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """Listener → dialer: accepted; the region's arrays, to compare with the descriptor."""

    arrays: tuple[PageArray, ...]


class Data(msgspec.Struct, frozen=True, tag="data"):
    """Dialer → listener: one part of one stripe of a write, with its payload behind it.

    `dst_pages` is packed u32 `[n]`; `spans` is packed u32 `[s, 2]` of `(dst_byte, num_bytes)`.
    `stripes` is the number of streams that carry this write. `notification` is None in every part
    but the last one of a stripe, and empty there in all stripes but one.
    """

    sequence: Natural
    grant: IdBytes
    array: Natural
    dst_pages: bytes
    spans: bytes
    notification: NotificationBytes | None
    stripes: Stripes = 1


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Dialer → listener: send these bytes of the region.

    `src_pages` is packed u32 `[n]`; `spans` is packed u32 `[s, 2]` of `(src_byte, num_bytes)`.
    `grant` is what permits it; None where the region is public.
    """

    sequence: Natural
    array: Natural
    src_pages: bytes
    spans: bytes
    grant: IdBytes | None = None


class WriteLanded(msgspec.Struct, frozen=True, tag="write_landed"):
    """Listener → dialer: all of this write is in place and its notification was taken."""

    sequence: Natural


class WriteRefused(msgspec.Struct, frozen=True, tag="write_refused"):
    """Listener → dialer: some of this write was dropped."""

    sequence: Natural
    reason: Reason


class FetchServed(msgspec.Struct, frozen=True, tag="fetch_served"):
    """Listener → dialer: the oldest fetch's bytes come right behind this."""

    sequence: Natural


class FetchRefused(msgspec.Struct, frozen=True, tag="fetch_refused"):
    """Listener → dialer: there will be no bytes for the oldest fetch."""

    sequence: Natural
    reason: Reason


FromDialer: TypeAlias = Data | Fetch
FromListener: TypeAlias = (
    Attached | NotAttached | WriteLanded | WriteRefused | FetchServed | FetchRefused
)

decode_attach = partial(decode, msgspec.msgpack.Decoder(Attach))
"""A dialer's first message. ProtocolError: it is something else."""
decode_from_dialer: partial[FromDialer] = partial(decode, msgspec.msgpack.Decoder(FromDialer))
"""A dialer's later messages. ProtocolError: it is none of them."""
decode_from_listener: partial[FromListener] = partial(decode, msgspec.msgpack.Decoder(FromListener))
"""A listener's message. ProtocolError: it is none of them."""


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
    """Cut a write into at most `max_stripes` of about `stripe_bytes` or more, alike in size."""
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


def whole_write(
    write: PageWrite, region: PagedRegion, sequence: int
) -> tuple[bytes, list[memoryview]] | None:
    """A checked write's only stripe, a body and its pages, if one system call takes all of it."""
    groups, layer = write.copies.groups, write.copies.layer
    if len(groups) != 1 or write.copies.num_layers != 1:
        return None
    payload = read_sole_batch(source_of(groups[0]), region.memory, region.arrays[layer])
    if not payload:
        return None
    pages, spans = groups[0].packed_targets
    header = Data(sequence, write.grant, layer, pages, spans, write.notification)
    return encode(header), payload


def outgoing_batches(
    write: PageWrite, region: PagedRegion, stripe: Stripe, seal: Callable[[bytes], bytes]
) -> Iterator[list[memoryview]]:
    """All buffers of a stripe of a checked write, in the order of the wire, made when needed.

    `seal`: the channel's, which makes a frame of a body.

    The region's memory is read in place: it must not change until the receiver has answered.
    """
    if not stripe.parts:
        header = Data(
            stripe.sequence, write.grant, write.copies.layer, b"", b"", stripe.notification,
            stripe.num_stripes,
        )  # fmt: skip
        yield [memoryview(seal(encode(header)))]
    for number, (array, part) in enumerate(stripe.parts, start=1):
        pages, spans = part.packed_targets
        notification = stripe.notification if number == len(stripe.parts) else None
        header = Data(
            stripe.sequence, write.grant, array, pages, spans, notification, stripe.num_stripes
        )
        payload = read_batches(source_of(part), region.memory, region.arrays[array])
        yield [memoryview(seal(encode(header))), *next(payload, [])]
        yield from payload


def _cut_evenly(copies: PageCopies, share_bytes: int) -> list[tuple[int, CopyGroup]]:
    parts = list(cut_parts(copies.groups, max(1, min(MAX_PART_BYTES, share_bytes))))
    return [(layer, part) for layer in copies.layers for part in parts if part.num_bytes > 0]
