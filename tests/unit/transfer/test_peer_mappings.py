from __future__ import annotations

import mmap
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from baton.errors import TransferError
from baton.transfer.peer_mappings import MIN_PEER_PAGES, PeerMapping, PeerMappings
from baton.transfer.region import (
    allocate_shared_region,
    map_peer_memory,
    release_region,
    view_pages,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from baton.transfer.interface import PagedRegion

SIZES = (4096, 192, 12800)
"""Bytes of a page, for each layer: a page of memory, a small one, and neither."""


@contextmanager
def region(num_pages: int, sizes: tuple[int, ...] = SIZES) -> Iterator[PagedRegion]:
    made = allocate_shared_region([(num_pages, size) for size in sizes])
    try:
        yield made
    finally:
        release_region(made)


@contextmanager
def peer_mappings(num_pages: int) -> Iterator[PeerMappings]:
    with region(num_pages) as own:
        made = PeerMappings(own)
        try:
            yield made
        finally:
            made.close()


def look_at(peer: PagedRegion) -> list[NDArray[np.uint8]]:
    """As a peer's pages are shown: mapped without the right to write."""
    assert peer.fd is not None
    mapping = map_peer_memory(peer.fd, peer.arrays, mmap.PROT_READ)
    return [view_pages(mapping, array) for array in peer.arrays]


def fill(peer: PagedRegion, value: int) -> None:
    for layer, array in enumerate(peer.arrays):
        pages = view_pages(peer.memory, array)
        pages[:] = (value + layer + np.arange(array.num_pages))[:, None] % 251


def protection_at(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < stop:
            return line.split()[1]
    return ""


def address_of(seen: PeerMappings, layer: int, page: int) -> int:
    pages = seen.view(layer)
    return int(pages.__array_interface__["data"][0]) + page * pages.shape[1]


def test_one_index_names_a_peers_page_in_every_layer() -> None:
    with peer_mappings(30) as seen, region(7) as one, region(100) as other:
        fill(one, 10)
        fill(other, 90)
        first, second = seen.attach(look_at(one)), seen.attach(look_at(other))
        for layer in range(len(SIZES)):
            pages = seen.view(layer)
            assert pages.shape[1] == SIZES[layer]
            assert (pages[first.first : first.stop, 0] == 10 + layer + np.arange(7)).all()
            assert (pages[second.first + 99] == (90 + layer + 99) % 251).all()


def test_own_pages_are_the_same_pages_as_before() -> None:
    with region(30) as own, region(7) as peer:
        seen = PeerMappings(own)
        assert not seen.is_open
        view_pages(own.memory, own.arrays[2])[29] = 5
        seen.attach(look_at(peer))
        assert seen.is_open
        assert (seen.view(2)[29] == 5).all()
        seen.view(1)[3] = 9
        assert (view_pages(own.memory, own.arrays[1])[3] == 9).all()
        seen.close()
        seen.close()


def test_what_a_peer_stores_is_seen_and_cannot_be_changed_here() -> None:
    with peer_mappings(30) as seen, region(7) as peer:
        mapping = seen.attach(look_at(peer))
        fill(peer, 40)
        assert seen.view(0)[mapping.first, 0] == 40
        for layer in range(len(SIZES)):
            assert protection_at(address_of(seen, layer, mapping.first)) == "r--s"
            assert protection_at(address_of(seen, layer, 0)) == "rw-s"


def test_a_peers_memory_stays_when_the_peer_and_the_view_are_gone() -> None:
    with peer_mappings(30) as seen:
        with region(7) as peer:
            fill(peer, 40)
            mapping = seen.attach(look_at(peer))
        assert (seen.view(0)[mapping.first + 3] == 43).all()


def test_nothing_is_left_of_a_peer_that_was_detached() -> None:
    with peer_mappings(30) as seen, region(7) as peer, region(5) as next_one:
        mapping = seen.attach(look_at(peer))
        seen.detach(mapping)
        seen.detach(mapping)
        for layer in range(len(SIZES)):
            assert protection_at(address_of(seen, layer, mapping.first)) == "---p"
        assert seen.attach(look_at(next_one)).first == mapping.first, "its place is free again"


def resident_pages(seen: PeerMappings, layer: int, mapping: PeerMapping) -> int:
    """Pages of memory that are in the page table, by /proc/self/pagemap."""
    start = address_of(seen, layer, mapping.first) // mmap.PAGESIZE
    num_pages = -(-mapping.num_pages * SIZES[layer] // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(8 * start)
        entries = np.frombuffer(pagemap.read(8 * num_pages), np.uint64)
    return int((entries >> np.uint64(63)).sum())


def test_what_was_attached_enters_the_page_table_slice_by_slice() -> None:
    with peer_mappings(30) as seen, region(7) as peer, region(9000) as large:
        mapping, gone = seen.attach(look_at(peer)), seen.attach(look_at(large))
        assert resident_pages(seen, 2, mapping) == 0
        assert seen.prefault(), "112 MB in one slice would be a stop"
        seen.detach(gone)
        assert [seen.prefault() for _ in range(len(SIZES) + 1)] == [True] * 3 + [False]
        assert resident_pages(seen, 2, mapping) == -(-7 * SIZES[2] // mmap.PAGESIZE)


def test_a_gap_that_is_too_small_is_left() -> None:
    with peer_mappings(30) as seen, region(2) as small, region(5000) as large:
        first = seen.attach(look_at(small))
        second = seen.attach(look_at(small))
        seen.detach(first)
        third = seen.attach(look_at(large))
        assert third.first >= second.stop


@pytest.mark.parametrize("sizes", [(4096, 192), (4096, 192, 64)])
def test_pages_of_other_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with peer_mappings(30) as seen, region(7, sizes) as peer:
        with pytest.raises(TransferError, match="other sizes"):
            seen.attach(look_at(peer))
        assert not seen.is_open


def test_a_peer_for_whom_there_is_no_room_is_refused() -> None:
    with region(8, (64,)) as own, region(MIN_PEER_PAGES + 1, (64,)) as peer:
        seen = PeerMappings(own)
        with pytest.raises(TransferError, match="no room"):
            seen.attach(look_at(peer))
