"""How much of a folder each tenant holds: a table in a file, beside the counts of the whole.

A tenant has one place in the table, near the one that its label names, for as long as it holds
anything. An entry's file states the number of its place in its times (`entry_times`), so that a
listing shows whose each entry is without opening it. Place 0 counts nothing: entries of no tenant,
and of tenants for which all places nearby are taken.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final

from baton.store.capacity import TenantCount, choose_place
from baton.store.folder.directory import FILE_MODE
from baton.store.folder.entry_times import NUM_PLACES
from baton.store.interface import NO_TENANT, TENANT_BYTES, TenantLabel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TENANTS_FILE: Final = "tenants"
WINDOW_PLACES: Final = 16
"""Places in which a tenant may be counted: they are read at once."""
_RECORD: Final = struct.Struct("<8sQ")
_NUM_BYTES: Final = struct.Struct("<Q")


class TenantLabels:
    """The labels of all places at one moment."""

    def __init__(self, table: bytes) -> None:
        self._table = table

    def at(self, place: int) -> TenantLabel:
        """Whose a place is, or was last."""
        begin = place * _RECORD.size
        return TenantLabel(self._table[begin : begin + TENANT_BYTES].ljust(TENANT_BYTES, b"\0"))


class TenantCounts:
    """Changed by who holds the lock of the folder's counts. All methods raise OSError."""

    def __init__(self, folder: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(TENANTS_FILE, flags, FILE_MODE, dir_fd=folder)
        if os.fstat(self._fd).st_size == 0:
            os.ftruncate(self._fd, NUM_PLACES * _RECORD.size)

    def find(self, tenant: TenantLabel) -> tuple[int, int]:
        """The place where a tenant is, or would be, counted, and the bytes that it holds."""
        if tenant == NO_TENANT:
            return 0, 0
        first = 1 + int.from_bytes(tenant, "little") % (NUM_PLACES - WINDOW_PLACES)
        raw = self._read_raw(first, WINDOW_PLACES)
        at = raw.find(tenant)  # mostly it is there: 16 objects fewer
        if at >= 0 and at % _RECORD.size == 0:
            _, num_bytes = _RECORD.unpack_from(raw, at)
            return first + at // _RECORD.size, num_bytes
        window = _unpack(raw)
        place = choose_place(window, tenant)
        if place is None:
            return 0, 0
        return first + place, window[place].num_bytes if window[place].tenant == tenant else 0

    def write(self, place: int, tenant: TenantLabel, num_bytes: int) -> None:
        """A tenant holds so much now."""
        if place:
            os.pwrite(self._fd, _RECORD.pack(tenant, num_bytes), place * _RECORD.size)

    def subtract(self, place: int, num_bytes: int) -> None:
        """The tenant of a place holds so much less."""
        if place and num_bytes:
            (found,) = self._read(place, 1)
            left = _NUM_BYTES.pack(max(0, found.num_bytes - num_bytes))
            os.pwrite(self._fd, left, (place + 1) * _RECORD.size - _NUM_BYTES.size)

    def read_labels(self) -> TenantLabels:
        """Whose each place is. Without the lock: some may have just changed."""
        return TenantLabels(os.pread(self._fd, NUM_PLACES * _RECORD.size, 0))

    def rebuild(self, held_bytes: Mapping[int, int]) -> None:
        """Set right what each place counts. `held_bytes`: by place, as all entries show it."""
        labels, table = self.read_labels(), bytearray(NUM_PLACES * _RECORD.size)
        for place, num_bytes in held_bytes.items():
            tenant = labels.at(place)
            if tenant != NO_TENANT:
                _RECORD.pack_into(table, place * _RECORD.size, tenant, num_bytes)
        os.pwrite(self._fd, table, 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _read(self, first: int, num_places: int) -> Sequence[TenantCount]:
        return _unpack(self._read_raw(first, num_places))

    def _read_raw(self, first: int, num_places: int) -> bytes:
        raw = os.pread(self._fd, num_places * _RECORD.size, first * _RECORD.size)
        return raw.ljust(num_places * _RECORD.size, b"\0")


def _unpack(raw: bytes) -> Sequence[TenantCount]:
    return [TenantCount(TenantLabel(t), n) for t, n in _RECORD.iter_unpack(raw)]
