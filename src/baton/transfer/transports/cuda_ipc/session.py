"""Pages become runs of bytes between two memories of GPUs that this process has mapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Protocol, TypeAlias

import msgspec
import numpy as np

from baton.errors import TransferError
from baton.net.framing import decode, encode
from baton.transfer.interface import DeviceMemory, PageArray, PagedRegion, RegionDescriptor
from baton.transfer.onesided.wire import MAX_METADATA_BYTES
from baton.transfer.region import MAX_ARRAYS, MAX_REGION_BYTES
from baton.transfer.scatter_gather import compute_copy_runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.kv.copies import PageCopies
    from baton.transfer.onesided.session import Direction


class CudaIpcOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `cuda_ipc` transport.

    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    `max_connections`: of peers to this worker at once; what exceeds them is refused.
    `multiprocessors`: of the copying GPU, at most, that copy scattered pages; 0: copy engines do.
    """

    multiprocessors: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 8
    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    max_connections: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 4096


HANDLE_BYTES: Final = 64
"""Of CUDA's IPC memory handle."""

Ticket: TypeAlias = object
"""What a device calls copies that it was given; opaque to all others."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that CUDA allocated in one piece, as this process sees it."""

    address: int
    num_bytes: int

    def covers(self, address: int, num_bytes: int) -> bool:
        """Whether all of these bytes are in it."""
        return self.address <= address and address + num_bytes <= self.address + self.num_bytes


class CopyDevice(Protocol):
    """One device of this process, used for one peer. Owner thread: the transport's.

    Every method may raise `TransferError`: then it is of no more use and is to be closed.
    """

    def export(self, address: int) -> tuple[Allocation, bytes]:
        """The allocation that has this address, and the handle by which a peer may map it.

        A handle has `HANDLE_BYTES`. It needs not be given back.
        """
        ...

    def map(self, handle: bytes) -> Allocation:
        """A peer's allocation, in this process; `handle` is untrusted and may be refused."""
        ...

    def enqueue(self, runs: NDArray[np.uint64]) -> Ticket:
        """Begin to copy, in no order: uint64 `[r, 3]` of (source, destination, bytes).

        Addresses are checked already. Copies go beside those of others and beside computing.
        """
        ...

    def is_done(self, ticket: Ticket) -> bool:
        """Whether all of its copies are in place; does not wait. Asked until it is true, once."""
        ...

    def close(self) -> None:
        """Wait until nothing is under way, then unmap all that was mapped; idempotent.

        The wait is that of copies that were begun: the owner begins no new ones. It ends after a
        while in any case.

        Raises:
            TransferError: copies may still be under way, so nothing was unmapped.
        """
        ...


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
    """What a peer sends about a region that has `arrays`. What its handles map is not known yet.

    Raises:
        TransferError: it is something else, places other arrays, or names no allocation.
    """
    decoded = decode(_metadata, body)
    if len(decoded.locations) != len(arrays):
        raise TransferError("the peer placed another number of arrays than its region has")
    if any(place.allocation >= len(decoded.handles) for place in decoded.locations):
        raise TransferError("the peer placed an array in no allocation")
    return decoded


OpenDevice: TypeAlias = Callable[[int], CopyDevice]
"""CUDA's number of a device in this process → that device, for one peer."""


@dataclass(frozen=True, slots=True)
class CudaIpcHandle:
    """A posted transfer: the device that copies, and what it calls these copies."""

    device: CopyDevice
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class _Peer:
    """What the peer sent, and which arrays that is about."""

    metadata: CudaIpcMetadata
    arrays: tuple[PageArray, ...]


@dataclass(frozen=True, slots=True)
class _Lane:
    """One of our devices, with the peer's memory mapped there: where each of its arrays is."""

    device: CopyDevice
    addresses: tuple[int, ...]


class CudaIpcSession:
    """See `OneSidedSession`. Peer memory is mapped for a device of ours when it first copies.

    A peer that cannot be mapped (another machine's handle, GPUs without a way to each other) is
    found out by the first transfer, which loses the remote: the next transport takes over.
    """

    peer_process_writes = True
    needs_serving = False

    def __init__(self, open_device: OpenDevice) -> None:
        self._open_device = open_device
        self._peer: _Peer | None = None
        self._lanes: dict[int, _Lane] = {}

    def prepare(self, region: PagedRegion) -> None:
        """See `OneSidedSession`."""

    def get_metadata(self, region: PagedRegion) -> bytes:
        """See `OneSidedSession`."""
        memory = _memory_of(region)
        device = self._open_device(memory.device)
        try:
            return encode_metadata(_get_metadata(device, memory, region.arrays))
        finally:
            device.close()

    def load_metadata(self, metadata: bytes, descriptor: RegionDescriptor) -> None:
        """See `OneSidedSession`."""
        decoded = decode_metadata(metadata, descriptor.arrays)
        self._peer = _Peer(decoded, descriptor.arrays)

    def post(self, direction: Direction, region: PagedRegion, copies: PageCopies) -> CudaIpcHandle:
        """See `OneSidedSession`."""
        memory, peer = _memory_of(region), self._peer
        if peer is None:
            raise TransferError("the peer has not sent its metadata")
        lane = self._lane(memory.device, peer)
        starts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for layer in copies.layers:
            ours, theirs = region.arrays[layer], peer.arrays[layer]
            source = memory.address + ours.offset_bytes, ours.page_bytes
            target = lane.addresses[layer], theirs.page_bytes
            if direction == "read":
                source, target = target, source
            alike = starts.setdefault((source[1], target[1]), [])
            alike.append((source[0], target[0], 0))
        runs = [_locate(copies, sizes, some) for sizes, some in starts.items()]
        joined = runs[0] if len(runs) == 1 else np.concatenate(runs)
        return CudaIpcHandle(lane.device, lane.device.enqueue(joined))

    def is_done(self, handle: CudaIpcHandle) -> bool:
        """See `OneSidedSession`."""
        return handle.device.is_done(handle.ticket)

    def serve(self) -> None:
        """See `OneSidedSession`. An owner has nothing to do."""

    def close(self) -> None:
        """See `OneSidedSession`. Waits for copies that were begun.

        Raises:
            TransferError: they do not end.
        """
        lanes, self._lanes = self._lanes, {}
        with ExitStack() as stack:
            for lane in lanes.values():
                stack.callback(lane.device.close)

    def _lane(self, number: int, peer: _Peer) -> _Lane:
        """This device of ours, with the peer's memory mapped and checked."""
        found = self._lanes.get(number)
        if found is not None:
            return found
        device = self._open_device(number)
        try:
            mapped = [device.map(handle) for handle in peer.metadata.handles]
            addresses = tuple(
                _find(mapped[place.allocation], place, array)
                for place, array in zip(peer.metadata.locations, peer.arrays, strict=True)
            )
        except TransferError:
            device.close()
            raise
        lane = self._lanes[number] = _Lane(device, addresses)
        return lane


def _memory_of(region: PagedRegion) -> DeviceMemory:
    if region.device is None:
        raise TransferError(f"cuda_ipc cannot move {region.kind} memory")
    return region.device


def _get_metadata(
    device: CopyDevice, memory: DeviceMemory, arrays: tuple[PageArray, ...]
) -> CudaIpcMetadata:
    """Each array in an allocation of its own or of several.

    Raises:
        TransferError: an array is in none, or CUDA does not share it.
    """
    numbers: dict[int, int] = {}
    handles: list[bytes] = []
    locations: list[ArrayLocation] = []
    for array in arrays:
        address = memory.address + array.offset_bytes
        allocation, handle = device.export(address)
        if not allocation.covers(address, array.num_pages * array.page_bytes):
            raise TransferError("an array of the region is longer than the GPU memory it is in")
        number = numbers.setdefault(allocation.address, len(numbers))
        if number == len(handles):
            handles.append(handle)
        locations.append(ArrayLocation(number, address - allocation.address))
    return CudaIpcMetadata(tuple(handles), tuple(locations))


def _find(mapped: Allocation, place: ArrayLocation, array: PageArray) -> int:
    """The address of a peer's array.

    Raises:
        TransferError: what the peer's handle maps is shorter than it described.
    """
    address = mapped.address + place.offset_bytes
    if not mapped.covers(address, array.num_pages * array.page_bytes):
        raise TransferError("the peer's GPU memory is shorter than its description")
    return address


def _locate(
    copies: PageCopies, page_bytes: tuple[int, int], starts: list[tuple[int, int, int]]
) -> NDArray[np.uint64]:
    """Addresses of both sides, and bytes, uint64 `[r, 3]`, in layers that begin at `starts`.

    Their pages have `page_bytes` (source's, target's): runs within a layer are computed once.
    """
    source, target = (PageArray(0, num_bytes, 1) for num_bytes in page_bytes)
    found = [compute_copy_runs(group, source, target) for group in copies.groups]
    within = np.concatenate([np.empty((0, 3), np.int64), *found])
    runs = within + np.array(starts, np.int64)[:, None]
    located: NDArray[np.uint64] = runs.reshape(-1, 3).astype(np.uint64)
    return located
