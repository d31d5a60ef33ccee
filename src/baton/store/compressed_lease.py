"""Leases of entries that a tier has compressed, or might have: they give back what was put."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from baton.errors import ProtocolError
from baton.store.compression import decompress
from baton.store.interface import EntryLease

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.store.compression import CompressionChoice
    from baton.store.entry_format import EntryHeader
    from baton.store.interface import TenantLabel


class StoredLease(EntryLease, Protocol):
    """A lease of an entry's bytes as a tier keeps them."""

    @property
    def header(self) -> EntryHeader:
        """The entry's."""
        ...

    def report_damage(self) -> None:
        """What is kept is not what was put."""
        ...


@dataclass(frozen=True, slots=True)
class CompressedEntryLease:
    """See `EntryLease`. What reading takes is reported to `choice`, if there is one."""

    inner: StoredLease
    choice: CompressionChoice | None
    clock: Clock

    @property
    def num_bytes(self) -> int:
        return self.inner.header.whole_bytes or self.inner.num_bytes

    @property
    def tenant(self) -> TenantLabel:
        return self.inner.tenant

    def try_read(self, into: memoryview) -> bool:
        if len(into) != self.num_bytes:
            raise ValueError(f"{len(into)} bytes for a body of {self.num_bytes}")
        is_compressed = bool(self.inner.header.whole_bytes)
        stored = memoryview(bytearray(self.inner.num_bytes)) if is_compressed else into
        began_at = self.clock.now()
        if not self.inner.try_read(stored):
            return False
        read_at = self.clock.now()
        if self.choice is not None:
            self.choice.observe_read(len(stored), read_at - began_at)
        return self._decompress(stored, into) if is_compressed else True

    def release(self) -> None:
        self.inner.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _decompress(self, stored: memoryview, into: memoryview) -> bool:
        began_at = self.clock.now()
        try:
            decompress(stored, into)
        except ProtocolError:  # it is authentic, and nothing that `compress` makes
            self.inner.report_damage()
            return False
        if self.choice is not None:
            self.choice.observe_decompression(len(into), self.clock.now() - began_at)
        return True
