"""Bodies of a folder's entries that are written past the page cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from baton.store.folder.bodies import FileBodies
from baton.store.folder.directory import open_unnamed
from baton.store.folder.leases import FileEntryLease, UncachedEntryLease
from baton.store.folder.spare_files import SpareFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    from baton.store.folder.bodies import NewEntry
    from baton.store.folder.direct_files import DirectFiles
    from baton.store.folder.directory import UnnamedFile
    from baton.store.interface import EntryName, TenantLabel


class DirectBodies(FileBodies):
    """See `FileBodies`. Large bodies are written past the page cache, and do not stay in it.

    While the disk writes some of them, others are copied and get their tags. Where entries make
    room for them, they are written into these entries' files.
    """

    def __init__(
        self,
        folder: int,
        key: bytes,
        files: DirectFiles,
        *,
        min_body_bytes: int,
        min_durable_bytes: float,
    ) -> None:
        """Bodies of `min_body_bytes` or more are large."""
        super().__init__(folder, key, min_durable_bytes)
        self._files, self._min_body_bytes = files, min_body_bytes
        self._spares = SpareFiles(folder)

    def want_spares(self, sizes: Sequence[int]) -> bool:
        large = [self.compute_cost(size) for size in sizes if size >= self._min_body_bytes]
        self._spares.want(large)
        return bool(large)

    @property
    def spare_bytes(self) -> int:
        return self._spares.num_bytes

    def drop_spares(self) -> None:
        self._spares.drop()

    def _begin(
        self, index: int, entry: NewEntry, tenant: TenantLabel, stack: ExitStack
    ) -> Callable[[], UnnamedFile]:
        if len(entry.body) < self._min_body_bytes:
            return super()._begin(index, entry, tenant, stack)
        file_bytes = self.compute_cost(len(entry.body))
        file = self._spares.try_take(file_bytes, stack)
        if file is None:
            file = open_unnamed(self._folder, stack, os.O_DIRECT)
            os.posix_fallocate(file.fd, 0, file_bytes)
        write = self._files.begin(
            file.fd,
            entry.body,
            self._begin_seal(entry, tenant),
            is_durable=self._is_durable(entry.body),
        )
        stack.callback(write.settle)  # before the file is closed

        def complete() -> UnnamedFile:
            write.finish()
            return file

        return complete

    def _choose_lease(self, num_bytes: int) -> type[FileEntryLease]:
        return UncachedEntryLease if num_bytes >= self._min_body_bytes else FileEntryLease

    def unlink(self, name: EntryName, num_bytes: int) -> bool:  # noqa: ARG002 - as its file shows
        return self._spares.remove(name.hex())

    def settle(self) -> None:
        self._spares.drop()

    def close(self) -> None:
        self._spares.drop()
        self._files.close()
