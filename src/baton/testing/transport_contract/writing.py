"""What is moved lands where it should, whole, and is reported once."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from baton.errors import TransferError
from baton.ids import TicketId, new_ticket_id
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
    WriteGrant,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from baton.kv.copies import CopyGroup
    from baton.transfer.interface import PageWrite, RemoteId

OTHER_SHAPES = ((NUM_PAGES, 3 * PAGE_BYTES), (NUM_PAGES, 640))
"""Pages of other sizes: larger in one array, smaller in the other."""
LARGE_PAGE_BYTES = 8192
LARGE_SHAPES = ((2048, LARGE_PAGE_BYTES),)
NUM_WRITES = 150
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

    def test_spans_between_pages_of_other_sizes(self) -> None:
        pair = TransportPair.of(self.make_side(), self.make_side(OTHER_SHAPES))
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        for seed in range(4):
            pair.writer.fill(seed)
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

    def test_several_arrays_at_once_land_or_are_refused(self, alike: TransportPair) -> None:
        remote, grant = alike.attach(), alike.open_grant(range(NUM_PAGES))
        for seed in range(3):
            groups = random_groups(np.random.default_rng(seed), PAGE_BYTES, PAGE_BYTES)
            if alike.writer.transport.capabilities.multi_array:
                check_write(alike, remote, grant, groups, array=1, num_arrays=3)
                check_write(alike, remote, grant, groups, num_arrays=5)
                continue
            with pytest.raises(TransferError, match="3 arrays"):
                alike.writer.transport.submit(alike.write(remote, grant, groups, num_arrays=3))

    def test_arrays_that_are_not_there(self, alike: TransportPair) -> None:
        remote, grant = alike.attach(), alike.open_grant(range(NUM_PAGES))
        for array, num_arrays in ((0, 6), (4, 2), (0, 0), (1, -1)):
            wrong = alike.write(remote, grant, one_page(0), array=array, num_arrays=num_arrays)
            with pytest.raises(TransferError):
                alike.writer.transport.submit(wrong)


@dataclass(slots=True)
class ShownPages:
    """A `LateNotification` that compares what it is shown with what landed.

    `notification` is what it makes.
    """

    pair: TransportPair
    sources: dict[int, int]
    notification: bytes = b"made in the copy"
    shown: list[tuple[int, int]] = field(default_factory=list)
    num_finished: int = 0

    def add_pages(self, arrays: range, pages: list[int]) -> None:
        """See `LateNotification`: each is in place at the peer."""
        assert not self.num_finished
        self.shown += [(array, page) for array in arrays for page in pages]
        landed = [self.sources[page] for page in pages]
        for array in arrays:
            ours, theirs = self.pair.writer.pages(array), self.pair.reader.pages(array)
            assert (ours[pages] == theirs[landed]).all()

    def finish(self) -> bytes:
        """See `LateNotification`."""
        self.num_finished += 1
        return self.notification


class LateNotificationContract(PairOfAlike):
    """For transports that claim `Capabilities.late_notifications`."""

    def write_late(
        self, alike: TransportPair, remote: RemoteId, grant: TicketId, num_arrays: int = 1
    ) -> tuple[PageWrite, ShownPages]:
        """A write of all pages in another order; not submitted."""
        sources = np.random.default_rng(5).permutation(NUM_PAGES)
        groups = [whole_pages(sources, range(NUM_PAGES), PAGE_BYTES)]
        late = ShownPages(alike, {page: at for at, page in enumerate(sources.tolist())})
        write = alike.write(remote, grant, groups, num_arrays=num_arrays)
        return msgspec.structs.replace(write, late_notification=late), late

    @pytest.mark.parametrize("num_arrays", [1, 5])
    def test_pages_are_shown_once_copied_and_then_its_notification_arrives(
        self, alike: TransportPair, num_arrays: int
    ) -> None:
        if not alike.writer.transport.capabilities.multi_array:
            num_arrays = 1
        remote, grant = alike.attach(), alike.open_grant(range(NUM_PAGES))
        write, late = self.write_late(alike, remote, grant, num_arrays)
        transfer = alike.writer.transport.submit(write)
        alike.pump(lambda: len(alike.seen(WriteCompleted)) == 1 == len(alike.seen(Arrived)))
        assert alike.seen(WriteCompleted) == [WriteCompleted(transfer, write.copies.num_bytes)]
        assert alike.seen(Arrived) == [Arrived(grant, late.notification)]
        assert late.num_finished == 1
        assert sorted(late.shown) == list(product(range(num_arrays), range(NUM_PAGES)))

    def test_spans_of_pages_are_shown_too(self, alike: TransportPair) -> None:
        remote, grant = alike.attach(), alike.open_grant(range(NUM_PAGES))
        groups = [spans_of_pages([3, 4], [3, 4], [(64, 64, 128), (1024, 1024, 512)])]
        alike.reader.pages()[[3, 4]] = alike.writer.pages()[[3, 4]]
        alike.reader.pages()[3, 64:192] = alike.reader.pages()[4, 1024:1536] = 0
        late = ShownPages(alike, {3: 3, 4: 4})
        write = msgspec.structs.replace(alike.write(remote, grant, groups), late_notification=late)
        alike.writer.transport.submit(write)
        alike.pump(lambda: len(alike.seen(WriteCompleted)) == 1 == len(alike.seen(Arrived)))
        assert sorted(late.shown) == [(0, 3), (0, 4)]

    def test_a_write_that_waits_for_its_grant_is_shown_when_it_is_copied(
        self, alike: TransportPair
    ) -> None:
        remote, grant = alike.attach(), new_ticket_id()
        write, late = self.write_late(alike, remote, grant)
        alike.writer.transport.submit(write)
        assert late.shown == []
        pages = np.arange(NUM_PAGES)
        region, epoch = alike.reader.region.handle, alike.writer.epoch
        alike.reader.transport.open_grant(WriteGrant(grant, region, epoch, pages))
        alike.pump(lambda: bool(alike.seen(Arrived)))
        assert alike.seen(Arrived) == [Arrived(grant, late.notification)]
        assert len(late.shown) == NUM_PAGES

    def test_a_write_that_is_refused_is_not_shown(self, alike: TransportPair) -> None:
        remote, grant = alike.attach(), alike.open_grant([1])
        write, late = self.write_late(alike, remote, grant)
        alike.writer.transport.submit(write)
        alike.pump(lambda: len(alike.seen(WriteFailed)) == 1)
        assert (late.shown, late.num_finished) == ([], 0)

    def test_a_notification_that_is_made_too_long_fails_its_write(
        self, alike: TransportPair
    ) -> None:
        remote, grant = alike.attach(), alike.open_grant(range(NUM_PAGES))
        write, late = self.write_late(alike, remote, grant)
        late.notification = bytes(MAX_NOTIFICATION_BYTES + 1)
        transfer = alike.writer.transport.submit(write)
        alike.pump(lambda: bool(alike.seen(WriteFailed)))
        alike.poll_for()
        assert [failed.transfer for failed in alike.seen(WriteFailed)] == [transfer]
        assert alike.seen(Arrived) == [] == alike.seen(WriteCompleted)


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
