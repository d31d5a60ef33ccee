"""The canonical order, spelled out on a page whose bytes say where they belong."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.errors import InvalidLayoutError, ProtocolError
from baton.kv.canonical import canonical_bytes, read_canonical, write_canonical
from baton.kv.copies import BlockTable, PagedSequence
from baton.kv.layout import KVLayout, LayerLayout

LAYOUT = KVLayout((LayerLayout.gqa(2, 2, v_head_dim=1),), block_size=2, dtype="int8")
SEQUENCE = PagedSequence(LAYOUT, BlockTable(0, np.array([1, 0], dtype=np.int64)))
HEADS_FIRST = PagedSequence(msgspec.structs.replace(LAYOUT, order="heads_first"), SEQUENCE.table)

# Tens are the token; units 0 to 3 are k (head 0: 0, 1; head 1: 2, 3), 4 and 5 are v.
CANONICAL = [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23, 4, 5, 14, 15, 24, 25]


def test_canonical_pages() -> None:
    pages = np.array(
        [
            [20, 21, 22, 23, 99, 99, 99, 99, 24, 25, 99, 99],
            [0, 1, 2, 3, 10, 11, 12, 13, 4, 5, 14, 15],
        ],
        dtype=np.uint8,
    )
    assert read_canonical(SEQUENCE, 0, pages, start=0, stop=3).tolist() == CANONICAL


def test_heads_first_pages() -> None:
    pages = np.array(
        [
            [20, 21, 99, 99, 22, 23, 99, 99, 24, 99, 25, 99],
            [0, 1, 10, 11, 2, 3, 12, 13, 4, 14, 5, 15],
        ],
        dtype=np.uint8,
    )
    assert read_canonical(HEADS_FIRST, 0, pages, start=0, stop=3).tolist() == CANONICAL


def test_writing_leaves_other_tokens_and_heads_alone() -> None:
    pages = np.zeros((2, 12), dtype=np.uint8)
    data = np.array([1, 2, 3, 4, 5, 6], dtype=np.uint8)
    write_canonical(SEQUENCE, 0, pages, data, start=1, heads=range(1, 2))
    assert pages.tolist() == [
        [0, 0, 3, 4, 0, 0, 0, 0, 0, 6, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 5],
    ]


def test_canonical_bytes() -> None:
    assert canonical_bytes(SEQUENCE, 0, 3) == len(CANONICAL)
    assert canonical_bytes(SEQUENCE, 0, 3, range(1, 2)) == 9
    assert canonical_bytes(SEQUENCE, 0, 3, range(5, 7)) == 0


@pytest.mark.parametrize(("num_bytes", "heads"), [(7, None), (30, None), (1, range(5, 7))])
def test_data_that_does_not_fit_is_refused_before_anything_is_written(
    num_bytes: int, heads: range | None
) -> None:
    pages = np.zeros((2, 12), dtype=np.uint8)
    with pytest.raises(ProtocolError):
        write_canonical(
            SEQUENCE, 0, pages, np.ones(num_bytes, dtype=np.uint8), start=0, heads=heads
        )
    assert not pages.any()


def test_pages_of_another_size_are_refused() -> None:
    """Strides that outrun the pages would read, or write, somebody else's memory."""
    for num_bytes in (11, 13):
        pages = np.zeros((2, num_bytes), dtype=np.uint8)
        with pytest.raises(InvalidLayoutError, match=f"{num_bytes} bytes"):
            read_canonical(SEQUENCE, 0, pages, start=0, stop=3)


def test_opaque_pages_have_no_canonical_order() -> None:
    opaque = msgspec.structs.replace(LAYOUT, order="opaque", arrangement="engine/isa")
    sequence = PagedSequence(opaque, SEQUENCE.table)
    pages = np.zeros((2, 12), dtype=np.uint8)
    says = "pages arranged as engine/isa are opaque"
    with pytest.raises(InvalidLayoutError, match=says):
        canonical_bytes(sequence, 0, 1)
    with pytest.raises(InvalidLayoutError, match=says):
        read_canonical(sequence, 0, pages, start=0, stop=1)
    with pytest.raises(InvalidLayoutError, match=says):
        write_canonical(sequence, 0, pages, np.ones(12, dtype=np.uint8), start=0)
    assert not pages.any()
