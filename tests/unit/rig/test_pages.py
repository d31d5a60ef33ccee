"""Workloads: sizes in words, and moves that stay inside their pools."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.kv.copies import apply_copies
from baton.rig.pages import (
    PAGE_BYTES,
    Workload,
    allocate_pool,
    clear_target,
    digest,
    format_size,
    layout_moves,
    parse_size,
    plan_pool,
    view_bytes,
)
from baton.transfer.region import check_copies, release_region, view_pages


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("32KiB", 32_768), ("100 MB", 100_000_000), ("4096", 4096), ("1mib", 1 << 20), ("7 B", 7)],
)
def test_sizes_are_read(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5MB", "5GiB", "3 potatoes", "KiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="no message size"):
        parse_size(text)


@given(st.integers(1, 4 << 30))
def test_a_written_size_reads_back(num_bytes):
    assert parse_size(format_size(num_bytes)) == num_bytes


@given(st.sampled_from(["message", "scattered", "descriptors"]), st.integers(1, 40 * PAGE_BYTES))
def test_every_move_is_inside_its_pool_and_moves_the_bytes(shape, num_bytes):
    workload = Workload(shape, num_bytes)
    num_pages = plan_pool([workload], 8)
    for move in layout_moves(workload, num_pages)[:3]:
        arrays = (move.array,) * (move.layer + 1)
        check_copies(move.copies, arrays, arrays)
        assert move.copies.num_bytes == move.num_bytes == num_bytes
        assert int(move.ranges[:, 2].sum()) == num_bytes


def test_moves_walk_through_the_pool_and_are_the_same_in_both_processes():
    workload = Workload("message", 2 * PAGE_BYTES)
    moves = layout_moves(workload, 64)
    assert len(moves) == 32
    assert len(np.unique([move.src_pages[0] for move in moves])) == 32
    again = layout_moves(workload, 64)
    assert all((a.ranges == b.ranges).all() for a, b in zip(moves, again, strict=True))


@pytest.mark.parametrize(
    "workload",
    [
        Workload("message", 3 * PAGE_BYTES + 5),
        Workload("scattered", 6 * PAGE_BYTES),
        Workload("descriptors", 64 * 6),
    ],
    ids=lambda workload: workload.shape,
)
def test_ranges_and_copies_say_the_same(workload):
    source, target = (allocate_pool(("host",), 16) for _ in range(2))
    move = layout_moves(workload, 16)[0]
    clear_target(view_bytes(target), move)
    assert digest(target.memory, move, "dst") == xxhash.xxh3_128(bytes(move.num_bytes)).hexdigest()
    assert digest(source.memory, move, "src") != digest(target.memory, move, "dst")
    pages = [view_pages(region.memory, region.arrays[move.layer]) for region in (source, target)]
    apply_copies(move.copies, *pages)
    assert digest(source.memory, move, "src") == digest(target.memory, move, "dst")
    del pages
    release_region(source)
    release_region(target)


@pytest.mark.parametrize("shape", ["message", "scattered", "descriptors"])
def test_the_rest_is_every_byte_that_is_not_written(shape):
    workload = Workload(shape, 2 * PAGE_BYTES + 4096)
    num_pages = plan_pool([workload], 16)
    (move, *_) = layout_moves(workload, num_pages)
    region = allocate_pool(("host",), num_pages)
    pool = view_bytes(region)
    before = digest(region.memory, move, "rest")
    clear_target(pool, move)
    assert digest(region.memory, move, "rest") == before
    written = np.zeros(len(pool), np.bool_)
    for _, at, num_bytes in move.ranges.tolist():
        written[at : at + num_bytes] = True
    first, last = np.argmin(written), len(written) - 1 - np.argmin(written[::-1])
    before_change = np.argmax(written != written[0]) - 1
    for at in (first, last, before_change):  # no list of the 70 million others
        pool[at] ^= 1
        assert (digest(region.memory, move, "rest") == before) == written[at]
        pool[at] ^= 1
    del pool
    release_region(region)
