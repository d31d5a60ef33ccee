"""Every thread of a process on its share of the cores, whatever it has done itself.

vLLM's NixlConnector moves the computing thread of *every* server to the machine's last core (it
means to keep a core for transfers); two servers would then share that one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from baton.bench.architectures.usage import PROC, read_session

if TYPE_CHECKING:
    from collections.abc import Collection


def pin_session(session: int, cores: Collection[int]) -> frozenset[int]:
    """Put back every thread that may run elsewhere: the cores that they had gone to."""
    share, strays = set(cores), set[int]()
    for folder in PROC.iterdir():
        if not folder.name.isdigit() or read_session(folder) != session:
            continue
        # A thread that ends meanwhile needs no core.
        with suppress(OSError):
            for task in (folder / "task").iterdir():
                strays |= _pin(int(task.name), share)
    return frozenset(strays)


def _pin(thread: int, share: set[int]) -> set[int]:
    with suppress(ProcessLookupError):
        found = os.sched_getaffinity(thread)
        if not found <= share:
            os.sched_setaffinity(thread, share)
            return found - share
    return set()
