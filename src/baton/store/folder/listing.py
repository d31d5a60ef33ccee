"""Lists the entries of a folder."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from baton.store.interface import EntryName

if TYPE_CHECKING:
    from collections.abc import Generator

_ENTRY: Final = re.compile(r"[0-9a-f]{64}")


def iter_files(folder: int) -> Generator[tuple[EntryName, os.stat_result]]:
    """Each entry's name, and its file's status, in any order.

    The folder is opened anew: lists of one open folder that overlap skip each other's entries.

    Raises:
        OSError: the folder, or an entry that is there, cannot be looked at.
    """
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        with os.scandir(fd) as found:
            for entry in found:
                if _ENTRY.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield EntryName(bytes.fromhex(entry.name)), status
    finally:
        os.close(fd)
