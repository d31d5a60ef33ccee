"""Room in a device, and the table of its extents."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.transfer.devices.table import (
    COPY_BYTES,
    MAX_EXTENTS,
    TABLE_BYTES,
    Extent,
    LockPlace,
    Table,
    compute_largest_gap,
    find_gap,
    read_table,
    write_table,
)

END = 40


@st.composite
def disjoint_extents(draw):
    cuts = sorted(draw(st.sets(st.integers(2, END), max_size=12)))
    pairs = list(pairwise(cuts))[:: draw(st.integers(1, 2))]
    extents = [Extent(i.to_bytes(16), a, b - a, i, "x") for i, (a, b) in enumerate(pairs)]
    return draw(st.permutations(extents))


@given(disjoint_extents(), st.integers(1, END))
def test_a_gap_is_the_first_that_fits_and_overlaps_nothing(extents, num_bytes):
    free = np.ones(END, np.bool_)
    free[:2] = False
    for extent in extents:
        free[extent.start : extent.end] = False
    fits = [at for at in range(2, END - num_bytes + 1) if free[at : at + num_bytes].all()]
    assert find_gap(extents, num_bytes, 2, END) == (fits[0] if fits else None)
    assert (compute_largest_gap(extents, 2, END) >= num_bytes) == bool(fits)


@given(disjoint_extents(), disjoint_extents(), st.integers(0, 5), st.data())
def test_a_table_whose_writer_is_killed_is_the_one_before(before, after, sequence, data):
    memory = bytearray(data.draw(st.binary(max_size=64)).ljust(TABLE_BYTES, b"\xaa"))
    old = Table(sequence, LockPlace("boot", 1, 2), tuple(before))
    at, packed = write_table(old)
    memory[at : at + len(packed)] = packed
    assert read_table(bytes(memory)) == old
    new = Table(sequence + 1, None, tuple(after))
    at, packed = write_table(new)
    written = data.draw(st.integers(0, len(packed)))
    memory[at : at + written] = packed[:written]
    assert read_table(bytes(memory)) == (new if written == len(packed) else old)


def test_the_largest_table_fits():
    extents = tuple(
        Extent(bytes(16), 1 << 61, 1 << 61, 1 << 62, "x" * 64) for _ in range(MAX_EXTENTS)
    )
    table = Table(1 << 62, LockPlace("b" * 64, 1 << 62, 1 << 62), extents)
    assert len(write_table(table)[1]) <= COPY_BYTES
