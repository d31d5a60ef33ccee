"""Options of the memory that holds the regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal, TypeAlias

import msgspec

from baton.errors import ConfigError
from baton.transfer.interface import PagedRegion
from baton.transfer.region import allocate_shared_region

Flush: TypeAlias = Literal["none", "msync", "libpmem"]
AllocateRegion: TypeAlias = Callable[[Sequence[tuple[int, int]]], PagedRegion]
"""From one `(num_pages, page_bytes)` for each array to a zeroed region; raises TransferError."""


class DeviceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`transfer.options.shared.device`: where regions lie, instead of memfds.

    `path` is a DAX device, or a file that the operator answers for: nobody may cut it short while
    it is mapped. `flush` says how written bytes leave the processor's caches (flushing.py).
    `lock_file` is a file that all workers which use the device see: needed where they do not see
    one device node (containers).
    """

    path: Annotated[str, msgspec.Meta(min_length=1)]
    flush: Flush = "none"
    lock_file: str | None = None


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
    from baton.transfer.devices.claiming import allocate_device_region  # noqa: PLC0415 - seldom used

    return partial(allocate_device_region, options)
