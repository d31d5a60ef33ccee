"""Claim an extent of a device for a new region."""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.errors import TransferError, mapped
from baton.ids import new_region_handle
from baton.transfer.devices.backing import (
    check_lock_place,
    find_lock_place,
    open_backing,
    open_locks,
)
from baton.transfer.devices.extents import ExtentMapping
from baton.transfer.devices.flushing import make_flusher
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
from baton.transfer.interface import PagedRegion
from baton.transfer.region import compute_region_bytes, place_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.transfer.devices.backing import Backing
    from baton.transfer.devices.locks import RangeLocks
    from baton.transfer.devices.options import DeviceOptions

PROGRAM: Final = Path("/proc/self/comm")


def allocate_device_region(
    options: DeviceOptions, shapes: Sequence[tuple[int, int]]
) -> PagedRegion:
    """Zeroed memory in an extent of the device: one array for each `(num_pages, page_bytes)`.

    What an earlier process left there is gone before anybody is told of the region. The extent is
    free again when the last process that maps it has let go of it, or is dead.

    Raises:
        TransferError: the sizes make no sense, or the device has no room; states who has it.
        ConfigError: the device does not match the options, or cannot be flushed.
    """
    arrays = place_arrays(shapes)
    with mapped({OSError: TransferError, ValueError: TransferError}):
        mapping = _claim(options, compute_region_bytes(arrays))
    np.frombuffer(mapping, np.uint8)[:] = 0
    mapping.flush_ranges(np.array([0]), np.array([len(mapping)]))
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
    flusher = make_flusher(options.flush)
    locks = open_locks(options)
    try:
        with open_backing(options) as backing, locks.exclusive(0, TABLE_BYTES):
            extent = _place(options, backing, locks, backing.round_up(num_bytes))
            if backing.kind == "file":
                _commit(backing, extent)
            return ExtentMapping.of(backing, extent, locks, flusher)
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
