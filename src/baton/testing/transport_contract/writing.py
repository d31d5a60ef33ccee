"""What is moved lands where it should, whole, and is reported once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from baton.errors import TransferError
from baton.testing.transport_contract.kit import (
    NUM_PAGES,
    PAGE_BYTES,
    SMALL_PAGE_BYTES,
    TransportKit,
    check_write,
    random_groups,
)
from baton.testing.transport_pair import TransportPair, spans_of_pages, whole_pages
from baton.transfer.interface import (
    MAX_NOTIFICATION_BYTES,
    Arrived,
    WriteCompleted,
)

if TYPE_CHECKING:
    from baton.kv.copies import CopyGroup

OTHER_SHAPES = ((NUM_PAGES, 3 * PAGE_BYTES), (NUM_PAGES, 640))
"""Pages of other sizes: larger in one array, smaller in the other."""
LARGE_PAGE_BYTES = 32_768
LARGE_SHAPES = ((2048, LARGE_PAGE_BYTES),)
NUM_WRITES = 300


class WriteContract(TransportKit):
    """Correct writes."""

    def test_scattered_pages(self, pair: TransportPair) -> None:
        remote, rng = pair.attach(), np.random.default_rng(2)
        pages, sources = rng.permutation(NUM_PAGES)[:40], rng.permutation(NUM_PAGES)[:40]
        grant = pair.open_grant(pages)
        check_write(pair, remote, grant, [whole_pages(sources, pages, PAGE_BYTES)])

    def test_neighbouring_pages(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        check_write(pair, remote, grant, [whole_pages(range(5, 25), range(30, 50), PAGE_BYTES)])

    @pytest.mark.parametrize("seed", range(4))
    def test_spans_between_pages_of_other_sizes(self, seed: int) -> None:
        pair = TransportPair.of(self.make_side(), self.make_side(OTHER_SHAPES))
        pair.writer.fill(seed)
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        rng = np.random.default_rng(seed)
        check_write(pair, remote, grant, random_groups(rng, PAGE_BYTES, 3 * PAGE_BYTES))
        groups = random_groups(rng, SMALL_PAGE_BYTES, 640)
        check_write(pair, remote, grant, groups, array=1)
        pair.close()

    def test_a_write_without_pages_is_a_notification(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), pair.open_grant([])
        check_write(pair, remote, grant, [])

    def test_a_large_write(self) -> None:
        pair = TransportPair.of(self.make_side(LARGE_SHAPES), self.make_side(LARGE_SHAPES))
        pair.writer.fill(seed=3)
        num_pages, _ = LARGE_SHAPES[0]
        remote, grant = pair.attach(), pair.open_grant(range(num_pages))
        sources = np.random.default_rng(3).permutation(num_pages)
        groups = [whole_pages(sources, range(num_pages), LARGE_PAGE_BYTES)]
        transfer = pair.writer.transport.submit(pair.write(remote, grant, groups))
        pair.pump(lambda: len(pair.seen(WriteCompleted)) == 1 == len(pair.seen(Arrived)))
        assert pair.seen(WriteCompleted) == [WriteCompleted(transfer, num_pages * LARGE_PAGE_BYTES)]
        assert (pair.reader.pages() == pair.writer.pages()[sources]).all()
        pair.close()

    def test_the_notification_comes_after_the_bytes_and_everything_once(
        self, pair: TransportPair
    ) -> None:
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        num_submitted = num_checked = 0
        while num_checked < NUM_WRITES:
            while num_submitted < min(NUM_WRITES, num_checked + 8):
                # Write number i brings page i % 32 to page i % 32 of 32 that follow each other.
                group = one_page_of(num_submitted)
                notification = num_submitted.to_bytes(4, "little")
                pair.writer.transport.submit(
                    pair.write(remote, grant, [group], notification=notification)
                )
                num_submitted += 1
            pair.pump(lambda: len(pair.seen(Arrived)) > num_checked)  # noqa: B023 -- at once
            for arrived in pair.seen(Arrived)[num_checked:]:
                group = one_page_of(int.from_bytes(arrived.notification, "little"))
                source = pair.writer.pages()[group.src_pages[0]]
                assert (pair.reader.pages()[group.dst_pages[0]] == source).all()
                num_checked += 1
        pair.pump(lambda: len(pair.seen(WriteCompleted)) == NUM_WRITES)
        pair.poll_for()
        numbers = [int.from_bytes(arrived.notification, "little") for arrived in pair.seen(Arrived)]
        assert sorted(numbers) == list(range(NUM_WRITES))
        transfers = [completed.transfer for completed in pair.seen(WriteCompleted)]
        assert len(set(transfers)) == len(transfers) == NUM_WRITES

    def test_both_directions_at_once(self, pair: TransportPair) -> None:
        back = TransportPair(pair.reader, pair.writer, pair.reader_events, pair.writer_events)
        pair.reader.fill(seed=4)
        ours, theirs = pair.writer.pages().copy(), pair.reader.pages().copy()
        there, again = pair.attach(), back.attach()
        grant, grant_back = pair.open_grant(range(32)), back.open_grant(range(32))
        upper = [whole_pages(range(32, 64), range(32), PAGE_BYTES)]
        for _ in range(10):
            pair.writer.transport.submit(pair.write(there, grant, upper))
            pair.reader.transport.submit(back.write(again, grant_back, upper))
        pair.pump(lambda: len(pair.seen(Arrived)) == 20 == len(pair.seen(WriteCompleted)))
        assert (pair.reader.pages()[:32] == ours[32:]).all()
        assert (pair.writer.pages()[:32] == theirs[32:]).all()

    def test_the_longest_notification_arrives_and_a_longer_one_is_refused(
        self, pair: TransportPair
    ) -> None:
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        longest = bytes(range(256)) * (MAX_NOTIFICATION_BYTES // 256)
        pair.writer.transport.submit(pair.write(remote, grant, [], notification=longest))
        pair.pump(lambda: pair.seen(Arrived) == [Arrived(grant, longest)])
        with pytest.raises(TransferError):
            pair.writer.transport.submit(pair.write(remote, grant, [], notification=longest + b"x"))

    def test_source_pages_may_change_once_a_write_has_completed(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        groups = [whole_pages(range(32), range(32), PAGE_BYTES)]
        for round_ in range(10):
            pair.writer.paint(round_)
            pair.writer.transport.submit(pair.write(remote, grant, groups))
            pair.pump(lambda: len(pair.seen(WriteCompleted)) == round_ + 1)  # noqa: B023 -- at once
            pair.writer.paint(255)
            pair.pump(lambda: len(pair.seen(Arrived)) == round_ + 1)  # noqa: B023 -- at once
            assert (pair.reader.pages()[:32] == round_).all()


def one_page_of(number: int) -> CopyGroup:
    """Write `number` of a series: any 32 that follow each other have different destinations."""
    src_page, dst_page = number * 7 % NUM_PAGES, number % 32
    return spans_of_pages([src_page], [dst_page], [(0, 0, PAGE_BYTES)])
