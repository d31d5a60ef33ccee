"""An owner's description of its memory: handles, and the place of each array in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from baton.errors import TransferError
from baton.transfer.messages import decode, encode
from baton.transfer.onesided.wire import MAX_METADATA_BYTES
from baton.transfer.region import MAX_ARRAYS, MAX_REGION_BYTES
from baton.transfer.transports.cuda_ipc.copies import HANDLE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.transfer.interface import PageArray

MAX_ALLOCATIONS: Final = 512

Handle = Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]


class ArrayLocation(msgspec.Struct, frozen=True, array_like=True):
    """Where an array begins: in which of the allocations, at which of its bytes."""

    allocation: Annotated[int, msgspec.Meta(ge=0, lt=MAX_ALLOCATIONS)]
    offset_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_REGION_BYTES)]


class CudaIpcMetadata(msgspec.Struct, frozen=True):
    """`handles[i]` maps allocation number i; array j of the region is at `locations[j]`."""

    handles: Annotated[tuple[Handle, ...], msgspec.Meta(max_length=MAX_ALLOCATIONS)]
    locations: Annotated[tuple[ArrayLocation, ...], msgspec.Meta(max_length=MAX_ARRAYS)]


_metadata = msgspec.msgpack.Decoder(CudaIpcMetadata)


def encode_metadata(metadata: CudaIpcMetadata) -> bytes:
    """For the wire.

    Raises:
        TransferError: the region lies in more allocations than a peer would take.
    """
    body = encode(metadata)
    if len(metadata.handles) > MAX_ALLOCATIONS or len(body) > MAX_METADATA_BYTES:
        raise TransferError(
            f"the region lies in {len(metadata.handles)} allocations of the GPU's memory; at "
            f"most {MAX_ALLOCATIONS} can be shared: allocate its layers together"
        )
    return body


def decode_metadata(body: bytes, arrays: Sequence[PageArray]) -> CudaIpcMetadata:
    """What a peer tells of a region that has `arrays`. What its handles map is not known yet.

    Raises:
        TransferError: it is something else, places other arrays, or names no allocation.
    """
    decoded = decode(_metadata, body)
    if len(decoded.locations) != len(arrays):
        raise TransferError("the peer placed another number of arrays than its region has")
    if any(place.allocation >= len(decoded.handles) for place in decoded.locations):
        raise TransferError("the peer placed an array in no allocation")
    return decoded
