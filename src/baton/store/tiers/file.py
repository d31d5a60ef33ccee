"""`file`: a folder on a disk, which stays. Several workers, also of one cluster's several lives."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from baton.registry import Plugin
from baton.store.folder.directory import Folder
from baton.store.folder.tier import FolderTier

if TYPE_CHECKING:
    from baton.store.interface import TierContext, TierFactory


class FileTierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`directory` is made for this user alone; `capacity_bytes` is for all that share it."""

    directory: str
    capacity_bytes: Annotated[int, msgspec.Meta(ge=1)] = 16 << 30


class FileTier(FolderTier):
    """See `Tier`. Nothing is flushed: what a power cut tears is found by its digest."""

    def __init__(self, options: FileTierOptions, context: TierContext) -> None:
        """Open the folder.

        Raises:
            ConfigError: it cannot be used.
        """
        self._own_folder = Folder(Path(options.directory).expanduser())
        super().__init__(self._own_folder, options.capacity_bytes, context)
        self._is_closed = False

    def close(self) -> None:
        """See `Tier`: what is kept stays."""
        if not self._is_closed:
            self._is_closed = True
            super().close()
            self._own_folder.close()


def _build(options: FileTierOptions) -> TierFactory:
    return partial(FileTier, options)


PLUGIN = Plugin(FileTierOptions, _build)
