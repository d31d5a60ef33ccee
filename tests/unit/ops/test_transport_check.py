"""What a trial expects of its two regions."""

import numpy as np
import pytest

from baton.errors import ConfigError, TransferError
from baton.ops.doctor import transport_check
from baton.ops.doctor.transport_check import describe_error


def test_what_is_moved_is_scattered_and_leaves_pages_that_must_not_change():
    src, dst = transport_check.choose_pages()
    for pages in (src, dst):
        assert len(set(pages.tolist())) == transport_check.NUM_MOVED < transport_check.NUM_PAGES
        assert (np.diff(pages) != 1).sum() > transport_check.NUM_MOVED / 2
    landed = transport_check.expect_landed()
    assert (landed.any(axis=1)).sum() == transport_check.NUM_MOVED
    assert (transport_check.expect_read() != transport_check.random_pages(1)).any(
        axis=1
    ).sum() > transport_check.NUM_MOVED / 2


def test_one_wrong_byte_is_one_wrong_page():
    pages = transport_check.expect_landed()
    pages[5, 17] ^= 1
    with pytest.raises(TransferError, match="1 of 64 pages are wrong after they were written"):
        transport_check.verify(pages, transport_check.expect_landed(), "written")


def test_errors_in_one_line():
    assert describe_error(TransferError("no\n  way")) == "no way"
    assert describe_error(ConfigError("no such option")) == "no such option"
    assert describe_error(KeyError("x")) == "KeyError: 'x'"
    assert describe_error(TransferError()) == "TransferError: "
