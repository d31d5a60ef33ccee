from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError, HandoffError, InvalidLayoutError
from baton.handoff.kv_views import KEPT_FOR, Holder, KVView, RegisteredView, StagingPool
from baton.ids import TicketId
from baton.kv.geometry import page_geometry
from baton.transfer.region import allocate_host_region, release_region
from tests import host_device
from tests.integration.handoff_nodes import make_layout

NUM_PAGES = 8


def holder(number: int, side: str = "receive") -> Holder:
    return Holder(side, TicketId(bytes([number]) * 16))


def test_pages_are_given_in_the_order_of_asking() -> None:
    pages = StagingPool(NUM_PAGES)
    assert pages.try_reserve(holder(1), 5) is not None
    assert pages.try_reserve(holder(2), 5) is None
    assert pages.try_reserve(holder(3), 1) is None, "a small one overtakes"
    assert pages.take_granted() == []
    pages.release(holder(1))
    assert pages.take_granted() == [holder(2), holder(3)]
    assert pages.take_granted() == []
    assert len(pages.try_reserve(holder(2), 5)) == 5


def test_a_ticket_may_be_sent_and_received() -> None:
    pages = StagingPool(NUM_PAGES)
    sent, received = pages.try_reserve(holder(1, "send"), 4), pages.try_reserve(holder(1), 4)
    assert not set(sent.tolist()) & set(received.tolist())


def test_what_could_never_fit_is_refused() -> None:
    pages = StagingPool(NUM_PAGES)
    with pytest.raises(HandoffError, match="needs 9 staging pages where there are 8"):
        pages.try_reserve(holder(1), 9)
    assert (pages.num_free, pages.num_waiting) == (8, 0)


def test_one_that_leaves_the_line_lets_the_next_in() -> None:
    pages = StagingPool(NUM_PAGES)
    pages.try_reserve(holder(1), 5)
    pages.try_reserve(holder(2), 5)
    pages.try_reserve(holder(3), 3)
    pages.release(holder(2))
    assert pages.take_granted() == [holder(3)]


def test_each_direction_has_its_half_once_both_are_used() -> None:
    """Else two workers fill theirs with what they receive, and neither can send."""
    pages = StagingPool(NUM_PAGES)
    assert len(pages.try_reserve(holder(1), 3)) == 3
    assert len(pages.try_reserve(holder(2, "send"), 2)) == 2
    assert len(pages.try_reserve(holder(3), 1)) == 1
    assert pages.try_reserve(holder(4), 1) is None, "the other direction's half"
    assert len(pages.try_reserve(holder(5, "send"), 2)) == 2
    pages.release(holder(3))
    assert pages.take_granted() == [holder(4)]


def test_one_direction_alone_has_all_pages() -> None:
    pages = StagingPool(NUM_PAGES)
    assert len(pages.try_reserve(holder(1), NUM_PAGES)) == NUM_PAGES


def test_one_larger_than_a_half_is_served_when_nobody_else_is() -> None:
    pages = StagingPool(NUM_PAGES)
    pages.try_reserve(holder(1, "send"), 1)
    assert pages.try_reserve(holder(2), 7) is None
    pages.release(holder(1, "send"))
    assert pages.take_granted() == [holder(2)]


def test_a_direction_that_is_not_used_any_more_keeps_no_half() -> None:
    """A stream that moves once is received to by a prefill worker, and sent by a decode worker."""
    pages = StagingPool(NUM_PAGES)
    pages.try_reserve(holder(1), 1)
    pages.release(holder(1))
    for _ in range(KEPT_FOR - 1):
        assert len(pages.try_reserve(holder(2, "send"), 4)) == 4
        assert pages.try_reserve(holder(3, "send"), 4) is None, "the half of what is received"
        pages.release(holder(3, "send"))
        pages.release(holder(2, "send"))
    for number in (2, 3):
        assert len(pages.try_reserve(holder(number, "send"), 4)) == 4


def test_a_direction_keeps_its_half_while_it_holds_pages() -> None:
    pages = StagingPool(NUM_PAGES)
    pages.try_reserve(holder(1), 1)
    for _ in range(KEPT_FOR + 1):
        pages.try_reserve(holder(2, "send"), 4)
        pages.release(holder(2, "send"))
    pages.try_reserve(holder(2, "send"), 4)
    assert pages.try_reserve(holder(3, "send"), 1) is None


def test_one_larger_than_a_half_is_not_overtaken_by_the_other_direction() -> None:
    pages = StagingPool(NUM_PAGES)
    pages.try_reserve(holder(1, "send"), 1)
    assert pages.try_reserve(holder(2), 7) is None
    assert pages.try_reserve(holder(3, "send"), 1) is None
    pages.release(holder(1, "send"))
    assert pages.take_granted() == [holder(2), holder(3, "send")]


def test_sends_do_not_wait_for_one_larger_than_a_half_while_others_are_received() -> None:
    """Their peers may wait with what comes to those: for the sends, behind a large one as well."""
    pages = StagingPool(NUM_PAGES)
    pages.try_reserve(holder(1), 1)
    assert pages.try_reserve(holder(2), 8) is None
    assert pages.try_reserve(holder(3, "send"), 4) is not None
    pages.release(holder(1))
    assert pages.try_reserve(holder(4, "send"), 1) is None
    pages.release(holder(3, "send"))
    assert pages.take_granted() == [holder(2)]


def test_where_all_pages_are_received_into_each_send_waits_for_that() -> None:
    pages = StagingPool(NUM_PAGES)
    for number in (1, 2):
        assert pages.try_reserve(holder(number), NUM_PAGES // 2) is not None
    assert pages.waits_for_received(NUM_PAGES % 2 + 1)


def test_one_larger_than_a_half_or_than_what_is_left_waits_for_what_is_received() -> None:
    pages = StagingPool(NUM_PAGES)
    pages.try_reserve(holder(1, "send"), 1)
    assert not pages.waits_for_received(NUM_PAGES), "for what is sent"
    pages.try_reserve(holder(2), 7)  # it waits itself, and comes before
    assert (pages.waits_for_received(5), pages.waits_for_received(4)) == (True, False)
    pages.release(holder(1, "send"))
    assert pages.take_granted() == [holder(2)]
    assert (pages.waits_for_received(2), pages.waits_for_received(1)) == (True, False)


@given(st.lists(st.tuples(st.integers(1, NUM_PAGES), st.booleans()), min_size=1, max_size=4))
@settings(max_examples=50)
def test_all_are_served_while_others_keep_asking(asks: list[tuple[int, bool]]) -> None:
    """One handoff more of each direction asks whenever the one that was served first ends."""
    pages, held = StagingPool(NUM_PAGES), []
    numbers = itertools.count()

    def ask(num_pages: int, side: str) -> Holder:
        asking = Holder(side, TicketId(next(numbers).to_bytes(16)))
        if pages.try_reserve(asking, num_pages) is not None:
            held.append(asking)
        return asking

    unserved = {ask(num_pages, "send" if sends else "receive") for num_pages, sends in asks}
    for _ in range(2 * NUM_PAGES * len(asks)):
        unserved -= set(held)
        if not unserved:
            break
        ask(1, "receive")
        ask(1, "send")
        pages.release(held.pop(0))
        held += pages.take_granted()
        pages.check_invariants()
    assert not unserved


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, NUM_PAGES), st.booleans()), max_size=40),
    st.integers(0, 6),
)
def test_no_page_has_two_holders_and_none_is_lost(
    steps: list[tuple[int, int, bool]], num_senders: int
) -> None:
    def holder_of(number: int) -> Holder:
        return holder(number, "send" if number <= num_senders else "receive")

    pages = StagingPool(NUM_PAGES)
    asked: dict[int, int] = {}
    for number, wanted, gives_back in steps:
        if gives_back:
            pages.release(holder_of(number))
            asked.pop(number, None)
        else:
            num_pages = asked.setdefault(number, wanted)
            held = pages.try_reserve(holder_of(number), num_pages)
            again = pages.try_reserve(holder_of(number), num_pages)
            assert np.array_equal(held, again) if held is not None else again is None
            assert held is None or len(held) == num_pages
        pages.check_invariants()
    # Whoever waits is served, once those before it are done.
    for _ in range(len(asked)):
        number = next(n for n in asked if pages.try_reserve(holder_of(n), asked[n]) is not None)
        pages.release(holder_of(number))
        del asked[number]
        pages.check_invariants()
    assert (pages.num_free, pages.num_waiting) == (NUM_PAGES, 0)


def test_a_view_whose_pages_have_another_size_is_refused() -> None:
    layout = make_layout(16)
    sizes = [page_geometry(layout, layer).page_bytes for layer in range(layout.num_layers)]
    for num_bytes in (0, -1, 1):
        region = allocate_host_region([(4, size) for size in (*sizes[:-1], sizes[-1] + num_bytes)])
        try:
            if num_bytes:
                with pytest.raises(InvalidLayoutError, match="where the layout has"):
                    RegisteredView.open(KVView(layout, region))
            else:
                RegisteredView.open(KVView(layout, region)).close()
        finally:
            release_region(region)


def test_pages_on_a_device_that_nothing_digests_are_refused() -> None:
    layout = make_layout(16)
    shapes = [(NUM_PAGES, layout.page_bytes(layer)) for layer in range(layout.num_layers)]
    region = host_device.allocate_region(shapes)
    try:
        with pytest.raises(ConfigError, match="only where its digests are computed there"):
            RegisteredView.open(KVView(layout, region))
    finally:
        release_region(region)
