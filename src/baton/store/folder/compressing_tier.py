"""A folder whose bodies may be compressed: see `store.compression`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from baton.store.compression import CompressionChoice, compress
from baton.store.folder.compressed_lease import CompressedEntryLease
from baton.store.folder.tier import FolderTier
from baton.store.interface import NO_TENANT, CompressionReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

    from baton.store.folder.bodies import FileBodies
    from baton.store.folder.directory import Folder
    from baton.store.folder.leases import FileEntryLease
    from baton.store.folder.shared_capacity import SharedCapacity
    from baton.store.folder.tier import FolderTierOptions
    from baton.store.interface import (
        Body,
        EntryLease,
        EntryName,
        PutResult,
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
        report = CompressionReport(choice.raw_bytes, choice.compressed_bytes, choice.is_on)
        return replace(super().usage(), compression=report)

    def put_many(
        self, entries: Sequence[tuple[EntryName, Body]], tenant: TenantLabel = NO_TENANT
    ) -> Sequence[PutResult]:
        if self._choice is None:
            return super().put_many(entries, tenant)
        return [self.put(name, body, tenant) for name, body in entries]  # each is compressed or not

    def _keep(
        self, name: EntryName, body: Body, tenant: TenantLabel, whole_bytes: int = 0
    ) -> PutResult:
        choice, now = self._choice, self._clock.now
        if choice is None:
            return super()._keep(name, body, tenant, whole_bytes)
        if choice.begin_put(len(body)):
            began_at = now()
            smaller = compress(body)
            taken_bytes = len(body) if smaller is None else len(smaller)
            choice.observe_compression(len(body), taken_bytes, now() - began_at)
            if smaller is not None:
                body, whole_bytes = smaller, len(body)
        began_at = now()
        done = super()._keep(name, body, tenant, whole_bytes)
        choice.observe_write(len(body), now() - began_at)
        return done
