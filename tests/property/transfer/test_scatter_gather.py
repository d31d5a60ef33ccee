"""Batches of buffers against the definition: page by page, span by span."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.transfer.grants import PageSet
from baton.transfer.interface import PageArray
from baton.transfer.scatter_gather import (
    Geometry,
    compute_runs,
    discard_batches,
    read_batches,
    sole_batch,
    write_batches,
)

ARRAY = PageArray(128, 16_384, 6)
REGION_BYTES = ARRAY.offset_bytes + ARRAY.num_pages * ARRAY.page_bytes + 64
SOURCE = np.random.default_rng(0).integers(0, 256, REGION_BYTES, np.uint8)


def keep_pieces(pieces):
    found, at = [], 0
    for length, is_kept in pieces:
        if at + length > ARRAY.page_bytes:
            break
        if is_kept:
            found.append((at, length))
        at += length
    return found


# Cuts of a page into pieces of which some are kept: they never overlap; small ones are staged.
spans = st.lists(st.tuples(st.integers(1, 6000), st.booleans()), min_size=1, max_size=8).map(
    keep_pieces
)
pages = st.permutations(range(ARRAY.num_pages)).flatmap(
    lambda order: st.integers(0, len(order)).map(lambda count: order[:count])
)


def geometry_of(pages, spans):
    packed = np.array(spans, np.int64).reshape(-1, 2)
    return Geometry(np.array(pages, np.int64), packed[:, 0], packed[:, 1])


def offsets_of(pages, spans):
    return [
        ARRAY.offset_bytes + page * ARRAY.page_bytes + start + byte
        for page in pages
        for start, length in spans
        for byte in range(length)
    ]


@given(pages, spans)
def test_what_is_read_is_the_payload(pages, spans):
    memory = memoryview(SOURCE.tobytes())
    batches = read_batches(geometry_of(pages, spans), memory, ARRAY)
    payload = b"".join(bytes(buffer) for batch in batches for buffer in batch)
    assert payload == SOURCE[offsets_of(pages, spans)].tobytes()


@given(pages, spans)
def test_one_batch_of_all_is_all_of_it(pages, spans):
    memory, geometry = memoryview(SOURCE.tobytes()), geometry_of(pages, spans)
    batch = sole_batch(geometry, memory, ARRAY)
    batches = list(read_batches(geometry, memory, ARRAY))
    is_direct = geometry.joined().bytes_per_page >= 4096 * len(geometry.joined().starts)
    assert (batch is not None) == is_direct  # these are far fewer than one system call takes
    if batch is not None:
        assert b"".join(batch) == b"".join(buffer for each in batches for buffer in each)


@given(pages, spans)
def test_what_is_written_lands_in_place_and_nowhere_else(pages, spans):
    region, offsets = bytearray(REGION_BYTES), offsets_of(pages, spans)
    payload = memoryview(SOURCE[: len(offsets)].tobytes())
    for batch in write_batches(geometry_of(pages, spans), memoryview(region), ARRAY):
        for buffer in batch:
            buffer[:], payload = payload[: len(buffer)], payload[len(buffer) :]
    expected = np.zeros(REGION_BYTES, np.uint8)
    expected[offsets] = SOURCE[: len(offsets)]
    assert region == expected.tobytes()
    assert not payload


@given(pages, spans)
def test_an_abandoned_write_leaves_its_staged_bytes_out(pages, spans):
    """Stopping at a batch that was filled but not acknowledged: staged bytes are not placed."""
    small = [(start, min(length, 100)) for start, length in spans]
    region = bytearray(REGION_BYTES)
    batches = write_batches(geometry_of(pages, small), memoryview(region), ARRAY)
    for buffer in next(batches, []):
        buffer[:] = b"\xff" * len(buffer)
    batches.close()
    assert not any(region)


@given(pages, spans)
def test_runs_are_maximal_and_in_order(pages, spans):
    offsets, lengths = compute_runs(geometry_of(pages, spans), ARRAY)
    flat = [o + b for o, n in zip(offsets, lengths, strict=True) for b in range(n)]
    assert flat == offsets_of(pages, spans)
    assert not (offsets[1:] == offsets[:-1] + lengths[:-1]).any()


@given(st.integers(0, 5_000_000))
def test_discarding_takes_exactly_so_many_bytes(num_bytes):
    sizes = [len(buffer) for batch in discard_batches(num_bytes) for buffer in batch]
    assert sum(sizes) == num_bytes
    assert all(sizes)


@given(st.lists(st.integers(0, 40)), st.lists(st.integers(-3, 44)))
def test_a_page_set_is_a_set(members, asked):
    page_set = PageSet(np.array(members, np.int64))
    assert page_set.covers(np.array(asked, np.int64)) == (set(asked) <= set(members))
    assert len(page_set) == len(set(members))
