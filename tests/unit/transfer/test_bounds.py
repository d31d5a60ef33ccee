"""Copies that were in bounds between some arrays are looked at anew between others."""

import numpy as np
import pytest

from baton.errors import ProtocolError, TransferError
from baton.kv.copies import CopyGroup, PageCopies, apply_copies
from baton.transfer.interface import PageArray
from baton.transfer.region import check_array, check_copies


def make_group(num_pages=4):
    return CopyGroup(np.arange(num_pages), np.arange(num_pages), np.array([[0, 0, 64]]))


def arrays(num_pages, page_bytes):
    return (PageArray(0, page_bytes, num_pages),)


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("smaller", [(3, 64), (4, 63)])
def test_a_group_that_passed_is_refused_between_smaller_arrays(side, smaller):
    copies = PageCopies(0, (make_group(),))
    enough, less = arrays(4, 64), arrays(*smaller)
    for _ in range(2):
        check_copies(copies, enough, enough)
    pair = (less, enough) if side == "source" else (enough, less)
    for _ in range(2):  # a refusal is not kept as a success
        with pytest.raises(TransferError, match=side):
            check_copies(copies, *pair)


def test_a_group_that_passed_is_refused_where_memory_is_smaller_after_all():
    copies = PageCopies(0, (make_group(),))
    check_copies(copies, arrays(4, 64), arrays(4, 64))
    enough, less = np.zeros((4, 64), np.uint8), np.zeros((3, 64), np.uint8)
    for pair in ((enough, less), (less, enough)):
        with pytest.raises(ProtocolError):
            apply_copies(copies, *pair)


def test_the_number_of_an_array_is_checked():
    check_array(0, arrays(4, 64))
    for number in (-1, 1):
        with pytest.raises(TransferError, match="no array"):
            check_array(number, arrays(4, 64))


@pytest.mark.parametrize("pages", [(0, 0), (3, 3), (4, 0), (0, 4), (-1, 0), (0, -1)])
@pytest.mark.parametrize(
    "span", [(0, 0, 64), (63, 0, 1), (64, 0, 1), (0, 60, 5), (0, 0, 0), (-1, 0, 4)]
)
def test_one_page_is_checked_as_many_are(pages, span):
    """One pair and one span are checked in a way of their own."""

    def check(num_pairs):
        src, dst = (np.full(num_pairs, page) for page in pages)
        copies = PageCopies(0, (CopyGroup(src, dst, np.array([span])),))
        try:
            check_copies(copies, arrays(4, 64), arrays(4, 64))
        except TransferError as exc:
            return str(exc)
        return None

    assert check(1) == check(2)
