"""Pages become runs of bytes between two memories of GPUs that this process has mapped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from baton.errors import TransferError
from baton.transfer.scatter_gather import compute_copy_runs
from baton.transfer.transports.cuda_ipc.copies import Allocation, CopyDevice
from baton.transfer.transports.cuda_ipc.metadata import (
    ArrayLocation,
    CudaIpcMetadata,
    decode_metadata,
    encode_metadata,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.kv.copies import PageCopies
    from baton.transfer.interface import (
        DeviceMemory,
        PageArray,
        PagedRegion,
        RegionDescriptor,
    )
    from baton.transfer.onesided.session import Direction
    from baton.transfer.transports.cuda_ipc.copies import Ticket

OpenDevice: TypeAlias = Callable[[int], CopyDevice]
"""CUDA's number of a device in this process → that device, for one peer."""


@dataclass(frozen=True, slots=True)
class CudaIpcHandle:
    """A posted transfer: the device that copies, and what it calls these copies."""

    device: CopyDevice
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class _Peer:
    """What the peer told, and which arrays that is about."""

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

    def __init__(self, open_device: OpenDevice) -> None:
        self._open_device = open_device
        self._peer: _Peer | None = None
        self._lanes: dict[int, _Lane] = {}

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
        ours, theirs = region.arrays[copies.layer], peer.arrays[copies.layer]
        our_base = memory.address
        their_base = lane.addresses[copies.layer] - theirs.offset_bytes
        if direction == "write":
            runs = _join(copies, ours, theirs, bases=(our_base, their_base))
        else:
            runs = _join(copies, theirs, ours, bases=(their_base, our_base))
        return CudaIpcHandle(lane.device, lane.device.enqueue(runs))

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
        TransferError: what the peer's handle maps is shorter than it says.
    """
    address = mapped.address + place.offset_bytes
    if not mapped.covers(address, array.num_pages * array.page_bytes):
        raise TransferError("the peer's GPU memory is shorter than its description")
    return address


def _join(
    copies: PageCopies, source: PageArray, target: PageArray, *, bases: tuple[int, int]
) -> NDArray[np.uint64]:
    """Addresses of both sides, and bytes: uint64 `[r, 3]`."""
    found = [compute_copy_runs(group, source, target) for group in copies.groups]
    runs: NDArray[np.int64] = np.concatenate([np.empty((0, 3), np.int64), *found])
    runs[:, :2] += np.array(bases, np.int64)
    return runs.astype(np.uint64)
