"""`file`: a folder on a disk that outlives its workers; shared by several, across restarts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from baton.errors import ConfigError
from baton.registry import Plugin
from baton.store.folder.compressing_tier import CompressingTier
from baton.store.folder.directory import USERS, Folder
from baton.store.folder.tier import FolderTierOptions

if TYPE_CHECKING:
    from baton.store.interface import TierContext, TierFactory


class FileTierOptions(FolderTierOptions, frozen=True, kw_only=True):
    """`directory` is made for this user alone; for the rest see `FolderTierOptions`.

    `compress`: bodies are kept in fewer bytes, without loss; "auto": where that is quicker here.
    """

    directory: str
    capacity_bytes: Annotated[int, msgspec.Meta(ge=1)] = 16 << 30
    compress: bool | Literal["auto"] = False


class FileTier(CompressingTier):
    """See `Tier`. Nothing is flushed: what a power cut tears is found by its digest."""

    def __init__(self, options: FileTierOptions, context: TierContext) -> None:
        """Open the folder.

        Raises:
            ConfigError: it cannot be used, or is not there and may not be made.
        """
        path = Path(options.directory).expanduser()
        if not context.may_create and not (path / USERS).exists():
            raise ConfigError(
                f"there is no store in {path}: is store.options.file.directory right? Workers make "
                "the folder when they start"
            )
        self._own_folder = Folder(path)
        super().__init__(self._own_folder, options, context, compresses=options.compress)
        self._is_closed = False

    def close(self) -> None:
        """Close; the entries stay."""
        if not self._is_closed:
            self._is_closed = True
            super().close()
            self._own_folder.close()


def _build(options: FileTierOptions) -> TierFactory:
    return partial(FileTier, options)


PLUGIN = Plugin(FileTierOptions, _build)
