"""Extents of a device: allocated, attached and mapped.

An extent stays locked for as long as this process maps it.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypeAlias

import msgspec
import numpy as np

from baton.errors import ConfigError, TransferError, mapped
from baton.ids import new_region_handle
from baton.transfer.devices.backing import (
    DeviceOptions,
    check_lock_place,
    find_lock_place,
    open_backing,
    open_locks,
)
from baton.transfer.devices.table import (
    MAX_EXTENTS,
    MAX_PROGRAM_CHARS,
    TABLE_BYTES,
    Extent,
    Table,
    compute_largest_gap,
    find_gap,
    read_table,
    write_table,
)
from baton.transfer.interface import PageArray, PagedRegion
from baton.transfer.region import (
    allocate_shared_region,
    check_arrays,
    compute_region_bytes,
    place_arrays,
)

if TYPE_CHECKING:
    from baton.transfer.devices.backing import Backing, RangeLocks


class ExtentMapping(mmap.mmap):
    """One extent in this process' address space; the extent is held for as long as this lives.

    A view keeps it alive, so no other process gets the bytes before the last view is gone.
    """

    extent: Extent
    _locks: RangeLocks
    _is_file: bool

    @classmethod
    def of(cls, backing: Backing, extent: Extent, locks: RangeLocks) -> Self:
        """Map an extent that `locks` hold.

        Raises:
            TransferError: the device has no such bytes, or the kernel refuses.
        """
        try:
            mapping = cls(backing.fd, extent.num_bytes, flags=mmap.MAP_SHARED, offset=extent.start)
        except (OSError, ValueError) as exc:
            raise TransferError(f"cannot map an extent of {backing.path}: {exc}") from exc
        mapping.extent, mapping._locks = extent, locks
        mapping._is_file = backing.kind == "file"
        return mapping

    def __del__(self) -> None:
        self._let_go()

    def close(self) -> None:
        """Unmap, then let go of the extent.

        Raises:
            BufferError: somebody views it.
        """
        super().close()
        self._let_go()

    def check_size(self) -> None:
        """Look whether the memory is still there: touching what a file has lost is a SIGBUS.

        Raises:
            TransferError: the file was cut short.
        """
        if self._is_file and self.size() < self.extent.end:
            raise TransferError("the file behind the region was cut short while it was mapped")

    def _let_go(self) -> None:
        if hasattr(self, "_locks"):
            self._locks.close()


def find_extent(region: PagedRegion) -> ExtentMapping | None:
    """The extent that a region lies in; None if it lies elsewhere."""
    mapping = region.memory.obj
    return mapping if isinstance(mapping, ExtentMapping) else None


AllocateRegion: TypeAlias = Callable[[Sequence[tuple[int, int]]], PagedRegion]
"""From one `(num_pages, page_bytes)` for each array to a zeroed region; raises TransferError."""

PROGRAM: Final = Path("/proc/self/comm")


def choose_allocation(transport_options: Mapping[str, Mapping[str, object]]) -> AllocateRegion:
    """How engines allocate what peers on this host map: in the device, if one is configured.

    Raises:
        ConfigError: the device's options do not match their schema.
    """
    table = transport_options.get("shared", {}).get("device")
    if table is None:
        return allocate_shared_region
    try:
        options = msgspec.convert(table, DeviceOptions)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"transfer.options.shared.device: {exc}") from exc
    return partial(allocate_device_region, options)


def allocate_device_region(
    options: DeviceOptions, shapes: Sequence[tuple[int, int]]
) -> PagedRegion:
    """Zeroed memory in an extent of the device: one array for each `(num_pages, page_bytes)`.

    What an earlier process left there is zeroed before the region is known to anyone. The extent is
    free again when the last process that maps it has let go of it, or is dead.

    Raises:
        TransferError: the sizes make no sense, or the device has no room; states who has it.
        ConfigError: the device does not match the options.
    """
    arrays = place_arrays(shapes)
    with mapped({OSError: TransferError, ValueError: TransferError}):
        mapping = _claim(options, compute_region_bytes(arrays))
    np.frombuffer(mapping, np.uint8)[:] = 0
    return PagedRegion(new_region_handle(), "shared", memoryview(mapping), arrays)


def forget_table(options: DeviceOptions) -> None:
    """Begin a device's table anew. The operator knows that no process uses the device.

    Raises:
        ConfigError: the device does not match the options.
    """
    with open_backing(options) as backing, mmap.mmap(backing.fd, backing.table_bytes) as table:
        table[:TABLE_BYTES] = bytes(TABLE_BYTES)


def _claim(options: DeviceOptions, num_bytes: int) -> ExtentMapping:
    """Map an extent of at least `num_bytes` that no other process holds."""
    locks = open_locks(options)
    try:
        with open_backing(options) as backing, locks.exclusive(0, TABLE_BYTES):
            extent = _place(options, backing, locks, backing.round_up(num_bytes))
            if backing.kind == "file":
                _commit(backing, extent)
            return ExtentMapping.of(backing, extent, locks)
    except BaseException:
        locks.close()
        raise


def _place(options: DeviceOptions, backing: Backing, locks: RangeLocks, num_bytes: int) -> Extent:
    """Lock a free range and write it down; the table is held alone."""
    place = find_lock_place(options, locks)
    with mmap.mmap(backing.fd, backing.table_bytes) as memory:
        table = read_table(memory[:TABLE_BYTES])
        check_lock_place(options, table, place)
        start, live = _lock_gap(backing, locks, table.extents, num_bytes)
        program = PROGRAM.read_text(errors="replace").strip()[:MAX_PROGRAM_CHARS]
        extent = Extent(secrets.token_bytes(16), start, num_bytes, os.getpid(), program)
        at, packed = write_table(Table(table.sequence + 1, place, (*live, extent)))
        memory[at : at + len(packed)] = packed
    return extent


def _lock_gap(
    backing: Backing, locks: RangeLocks, known: Sequence[Extent], num_bytes: int
) -> tuple[int, list[Extent]]:
    """Lock room for an extent: where it starts, and which extents are live besides."""
    live: list[Extent] = []
    while True:
        before, live = live, [e for e in known if locks.is_held_elsewhere(e.start, e.num_bytes)]
        start = find_gap(live, num_bytes, backing.table_bytes, backing.end_bytes)
        if start is None or len(live) >= MAX_EXTENTS:
            raise _full(backing, live, num_bytes)
        if locks.try_lock("exclusive", start, num_bytes):
            break
        # A peer may have attached to a dead worker's extent since: then that one is live again.
        if live == before:
            raise TransferError(
                f"bytes [{start}, {start + num_bytes}) of {backing.path} are locked by a process "
                "that its table does not know: end whoever else uses the device"
            )
    locks.try_lock("shared", start, num_bytes)  # others may map it, none may claim it
    return start, live


def _commit(backing: Backing, extent: Extent) -> None:
    """No room in the file system is an error now, not a SIGBUS at the first touch."""
    try:
        os.posix_fallocate(backing.fd, extent.start, extent.num_bytes)
    except OSError as exc:
        raise TransferError(f"no room behind {backing.path}: {exc}") from exc


def _full(backing: Backing, live: Sequence[Extent], num_bytes: int) -> TransferError:
    largest = compute_largest_gap(live, backing.table_bytes, backing.end_bytes)
    holders = ", ".join(f"{each.num_bytes} by pid {each.pid} ({each.program})" for each in live)
    return TransferError(
        f"{backing.path} has no room for {num_bytes} bytes: of {backing.end_bytes}, {largest} are "
        f"free in one piece; held are {holders or 'none'}. Give the engine fewer blocks, or end a "
        "worker (a peer that still maps a dead worker's extent holds it too)"
    )


_FOREIGN: Final = {
    ConfigError: TransferError,
    OSError: TransferError,
    ValueError: TransferError,
}
"""In the middle of serving, none of them is more than a peer that cannot be reached this way."""


def attach_extent(options: DeviceOptions, id_: bytes, arrays: Sequence[PageArray]) -> ExtentMapping:
    """Map a peer's extent: the peer sends its id, this host's table has its place.

    From now on the bytes stay the extent's, also when its owner dies. The mapping is not inherited
    by a fork: only this process can write through it.

    Raises:
        TransferError: no such extent, it is smaller than `arrays`, or its table is not true.
    """
    check_arrays(arrays)
    with mapped(_FOREIGN):
        locks = open_locks(options)
        try:
            with open_backing(options) as backing:
                extent = _hold_peers(options, backing, locks, id_)
                _check_room(extent, arrays)
                mapping = ExtentMapping.of(backing, extent, locks)
        except BaseException:
            locks.close()
            raise
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def _hold_peers(options: DeviceOptions, backing: Backing, locks: RangeLocks, id_: bytes) -> Extent:
    """Lock a peer's extent against reuse: its table entry must still hold after that."""
    with mmap.mmap(backing.fd, backing.table_bytes, prot=mmap.PROT_READ) as memory:
        table = read_table(memory[:TABLE_BYTES])
        check_lock_place(options, table, find_lock_place(options, locks))
        extent = table.find(id_)
        if extent is None:
            raise TransferError(
                f"the peer's memory is no extent of {backing.path}: give both workers the same "
                "transfer.options.shared.device"
            )
        aligned = extent.start % backing.align_bytes == extent.num_bytes % backing.align_bytes == 0
        inside = backing.table_bytes <= extent.start < extent.end <= backing.end_bytes
        if not aligned or not inside:
            raise TransferError(f"the table of {backing.path} names bytes that it does not have")
        is_held = locks.try_lock("shared", extent.start, extent.num_bytes)
        if not is_held or read_table(memory[:TABLE_BYTES]).find(id_) != extent:
            raise TransferError("the peer's extent has just been given to another worker")
    return extent


def _check_room(extent: Extent, arrays: Sequence[PageArray]) -> None:
    needed = compute_region_bytes(arrays)
    if needed > extent.num_bytes:
        raise TransferError(
            f"the peer's extent has {extent.num_bytes} bytes, its description needs {needed}"
        )
