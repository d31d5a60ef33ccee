"""`shared`: this host's memory, as files of a memory filesystem that all workers here open.

It belongs to living workers: the last one to leave takes it away, and what workers left that were
killed goes when the next one on this host starts.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import msgspec

from baton.errors import StoreError
from baton.registry import Plugin
from baton.store.folder.bodies import PooledBodies
from baton.store.folder.body_pool import BodyPool
from baton.store.folder.directory import Folder, remove_if_abandoned
from baton.store.folder.tier import FolderTier, FolderTierOptions
from baton.transfer.streaming_copy import find_streaming_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.store.interface import TierContext, TierFactory, Usage

logger = logging.getLogger(__name__)

COPY_DOWN_S: Final = 2.0
"""A worker that stops is waited for; who starts one next finds its prompts on the disk."""
_PREFIX: Final = "baton-"
_SUFFIX: Final = "-store"


class SharedTierOptions(FolderTierOptions, frozen=True, kw_only=True):
    """`directory` is on a memory filesystem (tmpfs); for the rest see `FolderTierOptions`."""

    capacity_bytes: Annotated[int, msgspec.Meta(ge=1)] = 1 << 30
    directory: str = "/dev/shm"  # noqa: S108 - what is in it is checked to be this user's alone


class SharedTier(FolderTier):
    """See `Tier` and `EndsWithUsers`.

    KV lies in a pool that every process maps once; what is small, in files.
    """

    min_pooled_bytes: ClassVar = 256 << 10

    def __init__(self, options: SharedTierOptions, context: TierContext) -> None:
        """Open the cluster's folder; remove those of clusters without live processes.

        Raises:
            ConfigError: the folder cannot be used.
        """
        parent = Path(options.directory)
        self._own_folder = Folder(_choose_path(parent, (context.cluster, *context.other_names)))
        _remove_abandoned(parent)
        fd = self._own_folder.fd
        pool = BodyPool(fd, options.capacity_bytes, self.min_pooled_bytes)
        super().__init__(
            self._own_folder, options, context, partial(PooledBodies, fd, context.key, pool)
        )
        self._is_closed = False
        by = find_streaming_copy()
        reason = f" ({by.refusal})" if by.refusal else ""
        logger.info("store: %s copies into %s%s", by.library, self._own_folder.path, reason)

    @property
    def was_unused(self) -> bool:
        """See `EndsWithUsers`."""
        return self._own_folder.was_unused

    def usage(self) -> Usage:
        return replace(super().usage(), copied_by=find_streaming_copy().library)

    def close(self) -> None:
        """See `Tier`: with the last user, the memory goes, once its entries are in the tier below.

        As many of them as `COPY_DOWN_S` allows, and one batch more.
        """
        if not self._is_closed:
            self._is_closed = True
            is_last = self._own_folder.leave()
            if is_last:
                with suppress(StoreError):
                    self._evictor.copy_down(COPY_DOWN_S)
            super().close()
            if is_last:
                self._own_folder.close_and_remove()
            else:
                self._own_folder.close()


def _choose_path(parent: Path, names: Sequence[str]) -> Path:
    """The first that no other user has taken: every worker of the cluster finds the same."""
    paths = [parent / f"{_PREFIX}{name}{_SUFFIX}" for name in names]
    for path in paths:
        try:
            if path.lstat().st_uid == os.geteuid():
                return path
        except OSError:  # it is not there, or opening it gives the reason
            return path
        logger.warning("store: %s is another user's; another name is used", path)
    return paths[0]


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        if remove_if_abandoned(path):
            logger.info("store: removed %s, which dead workers left", path)


def _build(options: SharedTierOptions) -> TierFactory:
    return partial(SharedTier, options)


PLUGIN = Plugin(SharedTierOptions, _build)
