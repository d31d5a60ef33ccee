"""A process that has no file descriptor left."""

from __future__ import annotations

import os
import resource
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def no_descriptors() -> Generator[None]:
    """All that this process may have are taken for the length of a block.

    Not a limit of 0, under which poll(2) fails, too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    with ExitStack() as taken:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with suppress(OSError):
            while True:
                taken.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield
