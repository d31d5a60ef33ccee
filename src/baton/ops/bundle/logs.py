"""The ends of log files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

MAX_LOG_BYTES: Final = 1 << 20


def read_log(path: Path, max_bytes: int = MAX_LOG_BYTES) -> str:
    """The last whole lines of a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        end = file.read(max_bytes).decode(errors="replace")
    return end if size <= max_bytes else end.partition("\n")[2]
