"""Huge pages (2 MiB on x86) for regions, wherever the kernel gives them. All of it is best effort.

Shared memory asks for each with MADV_COLLAPSE (Linux 6.1): one page of every 2 MiB is allocated,
and the kernel makes a huge page of it. That works with the usual `shmem_enabled` = never, which is
about what the kernel does unasked; where `enabled` is never, or `shmem_enabled` is deny, nothing is
tried. Private memory is advised, and gets them as it is first touched.
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np

SETTINGS: Final = Path("/sys/kernel/mm/transparent_hugepage")
MADV_COLLAPSE: Final = 25
"""From Linux's mman.h; Python's mmap does not name it yet."""
MAX_PLACEMENTS: Final = 16
"""Each spacer fills a gap between mappings; there may be some that are just large enough."""


@lru_cache(maxsize=1)
def huge_page_bytes() -> int:
    """Size of a huge page; 0 where the kernel has none."""
    return int(_read_setting("hpage_pmd_size") or 0)


def advise_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages in private memory that was not touched yet."""
    if huge_page_bytes():
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


def fill_with_huge_pages(fd: int, stop: int, start: int = 0) -> None:
    """Allocate the bytes from `start` to `stop`, empty ones of a shared file, as huge pages.

    As far as there are any; what is left out (the ends that fill no huge page at least) the caller
    allocates.
    """
    step = huge_page_bytes()
    if not step or _is_forbidden():
        return
    start, whole_stop = -(-start // step) * step, stop // step * step
    if start >= whole_stop:
        return
    with suppress(OSError), map_shared(fd, stop) as memory:
        for at in range(start, whole_stop, step):
            os.posix_fallocate(fd, at, 1)  # an empty one is not made huge
        memory.madvise(MADV_COLLAPSE, start, whole_stop - start)


def map_shared(
    fd: int,
    num_bytes: int,
    flags: int = mmap.MAP_SHARED,
    protection: int = mmap.PROT_READ | mmap.PROT_WRITE,
) -> mmap.mmap:
    """Map a file where its huge pages can be mapped as such: at a multiple of their size.

    The kernel places a mapping right below another one. So one whose place is no such multiple is
    made again, below a spacer that is as much too long.

    Raises:
        OSError: the kernel refuses.
    """
    size = huge_page_bytes()
    with ExitStack() as spacers:
        for _ in range(MAX_PLACEMENTS if 0 < size <= num_bytes else 0):
            with mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as trial:
                excess = _address(trial) % size
            if not excess:
                break
            # As long as the mapping at least: a shorter one would go into some smaller gap.
            length = excess + -(-num_bytes // size) * size
            with suppress(OSError):
                spacer = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
                spacers.enter_context(spacer)
        return mmap.mmap(fd, num_bytes, flags=flags, prot=protection)


def _is_forbidden() -> bool:
    return "[never]" in _read_setting("enabled") or "[deny]" in _read_setting("shmem_enabled")


def _read_setting(name: str) -> str:
    try:
        return (SETTINGS / name).read_text(encoding="ascii")
    except OSError:
        return ""


def _address(memory: mmap.mmap) -> int:
    address: int = np.frombuffer(memory, np.uint8, 1).__array_interface__["data"][0]
    return address
