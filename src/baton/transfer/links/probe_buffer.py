"""The memory that probes use: half of it a fixed pattern, half of it to land in.

Every worker's pattern is the same, so a reader knows what it must get. Page i of it is
`SHAKE-128("baton/scratch/1|" + u32 little-endian i)`, 4096 bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
from xxhash import xxh3_128_digest

from baton.kv.copies import CopyGroup, PageCopies
from baton.transfer.region import allocate_shared_region, view_pages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.transfer.interface import PagedRegion
    from baton.transfer.links.probes import Probe

PAGE_BYTES: Final = 4096
NUM_PATTERN_PAGES: Final = 1024
NUM_PAGES: Final = 2 * NUM_PATTERN_PAGES
TARGET_PAGES: Final = np.arange(NUM_PATTERN_PAGES, NUM_PAGES, dtype=np.int64)
"""The pages of every scratch region that probes write."""
_SOURCE_STRIDE: Final = 29
_TARGET_STRIDE: Final = 37
"""Odd, and numbers of scattered pages are powers of two: each page comes once, none next to one."""


@dataclass(frozen=True, slots=True)
class ProbeBuffer:
    """One worker's scratch memory. Owner: the agent's thread."""

    region: PagedRegion

    @classmethod
    def allocate(cls) -> ProbeBuffer:
        """8 MiB, with the pattern in place.

        Raises:
            TransferError: there is not that much memory.
        """
        region = allocate_shared_region([(NUM_PAGES, PAGE_BYTES)])
        region.memory[: NUM_PATTERN_PAGES * PAGE_BYTES] = _make_pattern()
        return cls(region)

    def try_take(self, num_pages: int, digest: bytes) -> bool:
        """Whether `num_pages` have landed with this digest; they are wiped, for the next probe."""
        if not 0 < num_pages <= NUM_PATTERN_PAGES:
            return False
        landed = self._pages()[NUM_PATTERN_PAGES : NUM_PATTERN_PAGES + num_pages]
        is_intact = xxh3_128_digest(landed.data) == digest
        landed[:] = 0
        return is_intact

    def _pages(self) -> NDArray[np.uint8]:
        return view_pages(self.region.memory, self.region.arrays[0])


def make_probe_copies(probe: Probe) -> PageCopies:
    """From pattern pages to landing pages: as one run, or each page apart from the next.

    On both sides: a transport may gather where it sends, scatter where it receives, or both.
    """
    source, target = _order_pages(probe)
    spans = np.array([[0, 0, probe.page_bytes]], dtype=np.int64)
    return PageCopies(0, (CopyGroup(source, TARGET_PAGES[target], spans),))


@cache
def compute_probe_digest(probe: Probe) -> bytes:
    """xxh3_128 of the landing pages, once the probe is there; what it leaves out of them is 0."""
    pattern = np.frombuffer(_make_pattern(), np.uint8).reshape(-1, PAGE_BYTES)[: probe.num_pages]
    source, target = _order_pages(probe)
    landed = np.zeros_like(pattern)
    landed[target, : probe.page_bytes] = pattern[source, : probe.page_bytes]
    return xxh3_128_digest(landed.data)


def _order_pages(probe: Probe) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which pages of the pattern go to which of the landing: permutations of `[0, num_pages)`."""
    pages = np.arange(probe.num_pages, dtype=np.int64)
    if not probe.is_scattered:
        return pages, pages
    return pages * _SOURCE_STRIDE % probe.num_pages, pages * _TARGET_STRIDE % probe.num_pages


@cache
def _make_pattern() -> bytes:
    return b"".join(
        hashlib.shake_128(b"baton/scratch/1|" + page.to_bytes(4, "little")).digest(PAGE_BYTES)
        for page in range(NUM_PATTERN_PAGES)
    )
