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
    WriteFailed,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from baton.kv.copies import CopyGroup

OTHER_SHAPES = ((NUM_PAGES, 3 * PAGE_BYTES), (NUM_PAGES, 640))
"""Pages of other sizes: larger in one array, smaller in the other."""
LARGE_PAGE_BYTES = 32_768
LARGE_SHAPES = ((2048, LARGE_PAGE_BYTES),)
NUM_WRITES = 300
ALIKE = ((NUM_PAGES, PAGE_BYTES),) * 5
LARGE = ((512, LARGE_PAGE_BYTES),) * 4


class PairOfAlike(TransportKit):
    """Arrays whose pages are alike: some transports take one write of several."""

    @pytest.fixture
    def alike(self) -> Generator[TransportPair]:
        """Two sides with five arrays alike, the writer's full of random bytes."""
        yield from self.make_pair(ALIKE)

    def make_pair(self, shapes: Sequence[tuple[int, int]]) -> Generator[TransportPair]:
        """Two sides, the writer's region full of random bytes."""
        pair = TransportPair.of(self.make_side(shapes), self.make_side(shapes))
        pair.writer.fill(seed=1)
        yield pair
        pair.close()


class WriteContract(PairOfAlike):
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

    @pytest.mark.parametrize("seed", range(3))
    def test_several_arrays_at_once_land_or_are_refused(
        self, alike: TransportPair, seed: int
    ) -> None:
        remote, grant = alike.attach(), alike.open_grant(range(NUM_PAGES))
        groups = random_groups(np.random.default_rng(seed), PAGE_BYTES, PAGE_BYTES)
        if alike.writer.transport.capabilities.multi_array:
            check_write(alike, remote, grant, groups, array=1, num_arrays=3)
            check_write(alike, remote, grant, groups, num_arrays=5)
            return
        with pytest.raises(TransferError, match="3 arrays"):
            alike.writer.transport.submit(alike.write(remote, grant, groups, num_arrays=3))

    @pytest.mark.parametrize(("array", "num_arrays"), [(0, 6), (4, 2), (0, 0), (1, -1)])
    def test_arrays_that_are_not_there(
        self, alike: TransportPair, array: int, num_arrays: int
    ) -> None:
        remote, grant = alike.attach(), alike.open_grant(range(NUM_PAGES))
        wrong = alike.write(remote, grant, one_page(0), array=array, num_arrays=num_arrays)
        with pytest.raises(TransferError):
            alike.writer.transport.submit(wrong)


class MultiArrayContract(PairOfAlike):
    """For transports that claim `Capabilities.multi_array`: all of a write lands, or none."""

    @pytest.fixture
    def large_alike(self) -> Generator[TransportPair]:
        """Two sides with four large arrays."""
        yield from self.make_pair(LARGE)

    def test_a_large_write_of_several_arrays(self, large_alike: TransportPair) -> None:
        remote, grant = large_alike.attach(), large_alike.open_grant(range(512))
        sources = np.random.default_rng(3).permutation(512)
        groups = [whole_pages(sources, range(512), LARGE_PAGE_BYTES)]
        transfer = large_alike.writer.transport.submit(
            large_alike.write(remote, grant, groups, num_arrays=4)
        )
        large_alike.pump(
            lambda: len(large_alike.seen(WriteCompleted)) == 1 == len(large_alike.seen(Arrived))
        )
        num_bytes = 4 * 512 * LARGE_PAGE_BYTES
        assert large_alike.seen(WriteCompleted) == [WriteCompleted(transfer, num_bytes)]
        for array in range(4):
            assert (
                large_alike.reader.pages(array) == large_alike.writer.pages(array)[sources]
            ).all()

    def test_pages_outside_the_grant_are_refused_in_every_array(self, alike: TransportPair) -> None:
        remote, grant = alike.attach(), alike.open_grant([7])
        before = alike.reader.snapshot()
        alike.writer.transport.submit(alike.write(remote, grant, one_page(8), num_arrays=5))
        alike.pump(lambda: len(alike.seen(WriteFailed)) == 1)
        alike.poll_for()
        assert alike.seen(Arrived) == []
        assert alike.reader.snapshot() == before


def one_page_of(number: int) -> CopyGroup:
    """Write `number` of a series: any 32 that follow each other have different destinations."""
    src_page, dst_page = number * 7 % NUM_PAGES, number % 32
    return spans_of_pages([src_page], [dst_page], [(0, 0, PAGE_BYTES)])


def one_page(number: int) -> list[CopyGroup]:
    """The same page on both sides."""
    return [whole_pages([number], [number], PAGE_BYTES)]
