"""The pages that a trial moves, and what both regions must hold afterwards. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from baton.errors import TransferError
from baton.kv.copies import CopyGroup, PageCopies

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_PAGES: Final = 64
NUM_MOVED: Final = 48
PAGE_BYTES: Final = 32 * 1024


def random_pages(seed: int) -> NDArray[np.uint8]:
    """uint8 `[NUM_PAGES, PAGE_BYTES]`, the same for the same seed."""
    shape = NUM_PAGES, PAGE_BYTES
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def choose_pages() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Source and destination pages, int64 `[NUM_MOVED]` each, scattered, the same in both."""
    order = np.random.default_rng(2)
    src, dst = order.permutation(NUM_PAGES)[:NUM_MOVED], order.permutation(NUM_PAGES)[:NUM_MOVED]
    return src.astype(np.int64), dst.astype(np.int64)


def describe_copies(src_pages: NDArray[np.int64], dst_pages: NDArray[np.int64]) -> PageCopies:
    """Copies of whole pages."""
    spans = np.array([[0, 0, PAGE_BYTES]], np.int64)
    return PageCopies(0, (CopyGroup(src_pages, dst_pages, spans),))


def expect_landed() -> NDArray[np.uint8]:
    """The owner's pages after the write: what was not named stays 0."""
    src_pages, dst_pages = choose_pages()
    pages = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
    pages[dst_pages] = random_pages(1)[src_pages]
    return pages


def expect_read() -> NDArray[np.uint8]:
    """The writer's pages after it read what it wrote, in another order."""
    src_pages, dst_pages = choose_pages()
    pages = random_pages(1)
    pages[src_pages[::-1]] = expect_landed()[dst_pages]
    return pages


def verify(pages: NDArray[np.uint8], expected: NDArray[np.uint8], verb: str) -> None:
    """Compare all bytes of a region.

    Raises:
        TransferError: gives how many pages differ.
    """
    num_wrong = int((pages != expected).any(axis=1).sum())
    if num_wrong:
        raise TransferError(f"{num_wrong} of {NUM_PAGES} pages are wrong after they were {verb}")
