"""`file`: a folder on a disk that outlives its workers; shared by several, across restarts."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from baton.errors import ConfigError, StoreError, mapped
from baton.registry import Plugin
from baton.store.folder.bodies import FileBodies
from baton.store.folder.compressing_tier import CompressingTier
from baton.store.folder.direct_bodies import DirectBodies
from baton.store.folder.direct_files import PIECE_BYTES, DirectFiles, DiskReport, try_direct
from baton.store.folder.directory import USERS, Folder
from baton.store.folder.tier import FolderTierOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.store.folder.shared_capacity import SharedCapacity
    from baton.store.interface import TierContext, TierFactory, Usage

logger = logging.getLogger(__name__)


class FileTierOptions(FolderTierOptions, frozen=True, kw_only=True):
    """`directory` is made for this user alone; for the rest see `FolderTierOptions`.

    `direct_io`: large bodies (1 MiB and more) are written past the page cache, and do not stay in
    it once they are read, where the filesystem can. `durable`: which entries are on the disk before
    they can be found. Of others, what a power cut tears is found by its tag, and is a miss.
    `compress`: bodies are kept in fewer bytes, without loss; "auto": where that is quicker here.
    They are as large then as what is kept of them.
    """

    directory: str
    capacity_bytes: Annotated[int, msgspec.Meta(ge=1)] = 16 << 30
    direct_io: bool = True
    durable: Literal["all", "large", "none"] = "large"
    compress: bool | Literal["auto"] = False


class FileTier(CompressingTier):
    """See `Tier`."""

    min_direct_bytes: ClassVar = 1 << 20
    piece_bytes: ClassVar = PIECE_BYTES

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
        make_bodies = self._choose_bodies(options, context.key)
        super().__init__(
            self._own_folder, options, context, make_bodies, compresses=options.compress
        )
        self._is_closed = False

    def _choose_bodies(
        self, options: FileTierOptions, key: bytes
    ) -> Callable[[SharedCapacity], FileBodies]:
        fd = self._own_folder.fd
        min_bytes = {"all": 0, "large": self.min_direct_bytes, "none": math.inf}[options.durable]
        self._is_direct = options.direct_io and try_direct(fd)
        if self._is_direct:
            files = DirectFiles(self.piece_bytes)
            return lambda _: DirectBodies(
                fd,
                key,
                files,
                min_body_bytes=self.min_direct_bytes,
                min_durable_bytes=min_bytes,
            )
        if options.direct_io:
            logger.warning(
                "store: the filesystem of %s refuses O_DIRECT: large entries go through the page "
                "cache, which is slower and takes memory (store.options.file.direct_io = false "
                "chooses that without this message)",
                self._own_folder.path,
            )
        return lambda _: FileBodies(fd, key, min_bytes)

    def usage(self) -> Usage:
        return replace(super().usage(), direct_io=self._is_direct)

    def close(self) -> None:
        """Close; the entries stay."""
        if not self._is_closed:
            self._is_closed = True
            super().close()
            self._own_folder.close()


@dataclass(frozen=True, slots=True)
class _Factory:
    """See `TierFactory` and `ReportsDisk`."""

    options: FileTierOptions

    def __call__(self, context: TierContext) -> FileTier:
        return FileTier(self.options, context)

    def report_disk(self) -> DiskReport:
        path = Path(self.options.directory).expanduser().absolute()
        place = next(each for each in (path, *path.parents) if each.is_dir())
        with mapped({OSError: StoreError}):
            fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return DiskReport(place, self.options.direct_io, try_direct(fd))
            finally:
                os.close(fd)


def _build(options: FileTierOptions) -> TierFactory:
    return _Factory(options)


PLUGIN = Plugin(FileTierOptions, _build)
