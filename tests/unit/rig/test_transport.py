"""By reference: status_messages name the pages, and only pages that are there."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ProtocolError
from baton.rig.pages import PAGE_BYTES, Workload, allocate_pool, digest, layout_moves, plan_pool
from baton.rig.transport import (
    MAX_ANNOUNCED_PAGES,
    announce_pages,
    decode_announcement,
    digest_referenced,
    map_announced,
)
from baton.transfer.interface import MAX_NOTIFICATION_BYTES, PageArray
from baton.transfer.region import release_region, view_pages

NUM_PAGES = 32


@pytest.fixture(scope="module")
def pool():
    region = allocate_pool(("host",), NUM_PAGES)
    yield region
    release_region(region)


def see(pool, notifications):
    reported = [decode_announcement(notification) for notification in notifications]
    return [
        map_announced(each, view_pages(pool.memory, pool.arrays[each.array])) for each in reported
    ]


@given(
    shape=st.sampled_from(["message", "scattered", "descriptors"]),
    num_bytes=st.integers(1, 16 * 64),
    data=st.data(),
)
def test_what_is_seen_is_what_the_move_names(pool, shape, num_bytes, data):
    workload = Workload(shape, num_bytes)
    if shape != "descriptors":
        workload = Workload(shape, num_bytes * (PAGE_BYTES // 64))
    move = data.draw(st.sampled_from(layout_moves(workload, NUM_PAGES)))
    seen = see(pool, announce_pages(move))
    assert digest_referenced(seen) == digest(pool.memory, move, "src")


def test_many_pages_take_several_notices_of_bounded_size():
    workload = Workload("scattered", (2 * MAX_ANNOUNCED_PAGES + 1) * PAGE_BYTES)
    move = layout_moves(workload, plan_pool([workload], 8))[0]
    notifications = list(announce_pages(move))
    reported = [decode_announcement(notification) for notification in notifications]
    assert max(map(len, notifications)) <= MAX_NOTIFICATION_BYTES
    assert [each.part for each in reported] == [0, 1, 2]
    assert [each.is_last for each in reported] == [False, False, True]
    pages = np.concatenate([np.frombuffer(each.pages, "<u4") for each in reported])
    assert (pages == move.src_pages).all()


def test_a_page_that_is_not_there_is_not_borrowed(pool):
    move = layout_moves(Workload("scattered", 4 * PAGE_BYTES), NUM_PAGES)[0]
    few = PageArray(0, PAGE_BYTES, int(move.src_pages.max()))
    (notification,) = announce_pages(move)
    with pytest.raises(ProtocolError, match="not there"):
        map_announced(decode_announcement(notification), view_pages(pool.memory, few))


@pytest.mark.parametrize("lie", [{"pages": b""}, {"pages": b"12345"}, {"num_last_bytes": 1 << 20}])
def test_an_announcement_that_makes_no_sense_is_refused(pool, lie):
    (notification,) = announce_pages(layout_moves(Workload("message", 5), NUM_PAGES)[0])
    reported = msgspec.structs.replace(decode_announcement(notification), **lie)
    with pytest.raises(ProtocolError, match="invalid announcement"):
        map_announced(reported, view_pages(pool.memory, pool.arrays[0]))
