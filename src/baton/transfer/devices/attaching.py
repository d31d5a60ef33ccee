"""Attach to a peer's extent of the device that both sides have."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError, TransferError, mapped
from baton.transfer.devices.backing import (
    check_lock_place,
    find_lock_place,
    open_backing,
    open_locks,
)
from baton.transfer.devices.extents import ExtentMapping
from baton.transfer.devices.flushing import make_flusher
from baton.transfer.devices.table import TABLE_BYTES, read_table
from baton.transfer.region import check_arrays, compute_region_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.transfer.devices.backing import Backing
    from baton.transfer.devices.locks import RangeLocks
    from baton.transfer.devices.options import DeviceOptions
    from baton.transfer.devices.table import Extent
    from baton.transfer.interface import PageArray


_FOREIGN: Final = {
    ConfigError: TransferError,
    OSError: TransferError,
    ValueError: TransferError,
}
"""In the middle of serving, none of them is more than a peer that cannot be reached this way."""


def attach_extent(options: DeviceOptions, id_: bytes, arrays: Sequence[PageArray]) -> ExtentMapping:
    """Map a peer's extent: the peer says its id, this host's table says where it is.

    From now on the bytes stay the extent's, also when its owner dies. The mapping is not inherited
    by a fork: only this process can write through it.

    Raises:
        TransferError: no such extent, it is smaller than `arrays` say, or its table is not true.
    """
    check_arrays(arrays)
    with mapped(_FOREIGN):
        locks = open_locks(options)
        try:
            with open_backing(options) as backing:
                extent = _hold_peers(options, backing, locks, id_)
                _check_room(extent, arrays)
                flusher = make_flusher(options.flush)
                mapping = ExtentMapping.of(backing, extent, locks, flusher)
        except BaseException:
            locks.close()
            raise
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def _hold_peers(options: DeviceOptions, backing: Backing, locks: RangeLocks, id_: bytes) -> Extent:
    """Lock a peer's extent against reuse: whatever the table said of it must hold after that."""
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
