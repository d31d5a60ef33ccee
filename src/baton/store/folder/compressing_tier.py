"""A folder whose bodies may be compressed: see `store.compression`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from baton.errors import StoreError
from baton.store.compressed_lease import CompressedEntryLease
from baton.store.compression import CompressionChoice, compress
from baton.store.folder.bodies import NewEntry
from baton.store.folder.tier import FolderTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

    from baton.clock import Instant
    from baton.store.folder.bodies import FileBodies
    from baton.store.folder.directory import Folder
    from baton.store.folder.leases import FileEntryLease
    from baton.store.folder.shared_capacity import SharedCapacity
    from baton.store.folder.tier import FolderTierOptions
    from baton.store.interface import (
        EntryLease,
        PutOutcome,
        TenantLabel,
        TierContext,
        Usage,
    )


class CompressingTier(FolderTier):
    """See `Tier`. Any folder's tier reads what was compressed; this one compresses."""

    def __init__(
        self,
        folder: Folder,
        options: FolderTierOptions,
        context: TierContext,
        make_bodies: Callable[[SharedCapacity], FileBodies] | None = None,
        *,
        compresses: bool | Literal["auto"],
    ) -> None:
        """See `FolderTier`."""
        super().__init__(folder, options, context, make_bodies)
        self._choice = CompressionChoice(compresses == "auto") if compresses else None

    def _to_entry_lease(self, lease: FileEntryLease) -> EntryLease:
        if self._choice is None:
            return super()._to_entry_lease(lease)
        return CompressedEntryLease(lease, self._choice, self._clock)

    def usage(self) -> Usage:
        choice = self._choice
        if choice is None:
            return super().usage()
        return replace(super().usage(), compression=choice.report())

    def _keep(self, entries: Sequence[NewEntry], tenant: TenantLabel) -> list[PutOutcome]:
        choice, now = self._choice, self._clock.now
        if choice is None or not entries:
            return super()._keep(entries, tenant)
        entries = [_compress(entry, choice, now) for entry in entries]
        began_at = now()
        outcomes = super()._keep(entries, tenant)
        if not any(isinstance(outcome, StoreError) for outcome in outcomes):
            num_bytes = sum(len(entry.body) for entry in entries)
            choice.observe_write(num_bytes, now() - began_at)
        return outcomes


def _compress(entry: NewEntry, choice: CompressionChoice, now: Callable[[], Instant]) -> NewEntry:
    """The entry as it is to be written."""
    num_bytes = len(entry.body)
    if not choice.begin_put(num_bytes):
        return entry
    began_at = now()
    smaller = compress(entry.body)
    taken_bytes = num_bytes if smaller is None else len(smaller)
    choice.observe_compression(num_bytes, taken_bytes, now() - began_at)
    return entry if smaller is None else NewEntry(entry.name, smaller, num_bytes)
