"""A peer's pages, read (`ReadsPages`) or seen in place (`ViewsPages`), where a transport claims it.

The side that attaches is the pair's `writer`: here it reads, or looks. The pair's `reader` is the
owner of the pages.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from baton.errors import PeerLostError, TransferError
from baton.ids import new_region_handle
from baton.kv.copies import CopyGroup, PageCopies
from baton.testing.transport_contract.kit import (
    NUM_PAGES,
    PAGE_BYTES,
    SHAPES,
    SMALL_PAGE_BYTES,
    TransportKit,
    apply_slowly,
    check_write,
    random_groups,
)
from baton.testing.transport_pair import TransportPair, is_about, spans_of_pages, whole_pages
from baton.transfer.interface import (
    GrantQuiescent,
    PageArray,
    PageRead,
    ReadCompleted,
    ReadFailed,
    RemoteId,
    RemoteLost,
)
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from numpy.typing import NDArray

    from baton.transfer.interface import RegionDescriptor, TransferId

OTHER_SHAPES = ((NUM_PAGES, 3 * PAGE_BYTES), (NUM_PAGES, 640))
"""Pages of other sizes: larger in one array, smaller in the other."""
LARGE_PAGE_BYTES = 8192
LARGE_SHAPES = ((2048, LARGE_PAGE_BYTES),)
FIVE_SHAPES = ((NUM_PAGES, PAGE_BYTES),) * 5
ALL_PAGES = [whole_pages(range(NUM_PAGES), range(NUM_PAGES), PAGE_BYTES)]


OUT_OF_RANGE: list[list[CopyGroup]] = [
    [whole_pages([NUM_PAGES], [0], PAGE_BYTES)],
    [whole_pages([0], [NUM_PAGES], PAGE_BYTES)],
    [whole_pages([-1], [0], PAGE_BYTES)],
    [whole_pages([0], [-1], PAGE_BYTES)],
    [whole_pages([0, 1], [0], PAGE_BYTES)],
    [spans_of_pages([0], [0], [(1, 0, PAGE_BYTES)])],
    [spans_of_pages([0], [0], [(0, 1, PAGE_BYTES)])],
    [spans_of_pages([0], [0], [(0, 0, 0)])],
    [spans_of_pages([0], [0], [(0, 0, PAGE_BYTES), (0, 0, 1)])],
    [*ALL_PAGES, whole_pages([NUM_PAGES], [0], PAGE_BYTES)],
]
LIES: list[Callable[[RegionDescriptor], RegionDescriptor]] = [
    lambda true: msgspec.structs.replace(true, handle=new_region_handle()),
    lambda true: msgspec.structs.replace(
        true, arrays=(PageArray(0, PAGE_BYTES, 1 << 20), *true.arrays[1:])
    ),
    lambda true: msgspec.structs.replace(
        true, arrays=(PageArray(1 << 30, PAGE_BYTES, NUM_PAGES), *true.arrays[1:])
    ),
]
"""Another region, more pages, elsewhere."""


class ReadingKit(TransportKit):
    """Pairs for reads."""

    @pytest.fixture
    def reading(self) -> Generator[TransportPair]:
        """Two regions alike, both full of random bytes."""
        yield from self.make_reading_pair(SHAPES, SHAPES)

    @pytest.fixture
    def unlike(self) -> Generator[TransportPair]:
        """The owner's pages are larger in one array, and smaller in the other."""
        yield from self.make_reading_pair(SHAPES, OTHER_SHAPES)

    @pytest.fixture
    def five(self) -> Generator[TransportPair]:
        """Five arrays alike on either side."""
        yield from self.make_reading_pair(FIVE_SHAPES, FIVE_SHAPES)

    @pytest.fixture
    def large(self) -> Generator[TransportPair]:
        """16 MiB on either side."""
        yield from self.make_reading_pair(LARGE_SHAPES, LARGE_SHAPES)

    def make_reading_pair(
        self, mine: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]
    ) -> Generator[TransportPair]:
        """Yields a pair whose regions have such arrays, and closes it."""
        pair = TransportPair.of(self.make_side(mine), self.make_side(theirs))
        pair.writer.fill(seed=1)
        pair.reader.fill(seed=2)
        yield pair
        pair.close()


class CompletedReadContract(ReadingKit):
    """Correct reads."""

    def test_scattered_pages_are_read(self, reading: TransportPair) -> None:
        remote, rng = reading.attach(), np.random.default_rng(2)
        sources, pages = rng.permutation(NUM_PAGES)[:40], rng.permutation(NUM_PAGES)[:40]
        check_read(reading, remote, [whole_pages(sources, pages, PAGE_BYTES)])

    def test_neighbouring_pages_are_read(self, reading: TransportPair) -> None:
        """Runs that begin, break off and end at different places on the two sides."""
        remote = reading.attach()
        sources = [*range(5, 25), *range(40, 50), 63]
        targets = [*range(30, 40), *range(50, 63), *range(8)]
        check_read(reading, remote, [whole_pages(sources, targets, PAGE_BYTES)])

    def test_spans_are_read_between_pages_of_other_sizes(self, unlike: TransportPair) -> None:
        remote = unlike.attach()
        for seed in range(4):
            rng = np.random.default_rng(seed)
            check_read(unlike, remote, random_groups(rng, 3 * PAGE_BYTES, PAGE_BYTES))
            check_read(unlike, remote, random_groups(rng, 640, SMALL_PAGE_BYTES), array=1)

    def test_several_arrays_at_once_are_read_or_refused(self, five: TransportPair) -> None:
        remote = five.attach()
        all_groups = [
            random_groups(np.random.default_rng(seed), PAGE_BYTES, PAGE_BYTES) for seed in range(3)
        ]
        for groups in all_groups:
            check_read_refused(five, five.read(remote, groups, array=4, num_arrays=2))
        for groups in all_groups:
            if five.writer.transport.capabilities.multi_array:
                check_read(five, remote, groups, array=1, num_arrays=3)
                check_read(five, remote, groups, num_arrays=5)
            else:
                check_read_refused(five, five.read(remote, groups, num_arrays=3))

    def test_each_array_is_shown_once_copied(self, five: TransportPair) -> None:
        """`PageRead.copied` gets all pages of each array, each in place, or none."""
        num_arrays = 5 if five.writer.transport.capabilities.multi_array else 1
        shown: list[tuple[int, int]] = []

        def copied(arrays: range, pages: list[int]) -> None:
            shown.extend(product(arrays, pages))
            for array in arrays:
                assert (five.writer.pages(array)[pages] == five.reader.pages(array)[pages]).all()

        read = five.read(five.attach(), ALL_PAGES, num_arrays=num_arrays)
        five.writer.read(msgspec.structs.replace(read, copied=copied))
        five.pump(lambda: bool(five.seen(ReadCompleted)))
        assert not shown or sorted(shown) == list(product(range(num_arrays), range(NUM_PAGES)))

    def test_a_read_without_pages_completes(self, reading: TransportPair) -> None:
        check_read(reading, reading.attach(), [])

    def test_pages_that_are_shown_once_copied_are_there_and_are_all(
        self, large: TransportPair
    ) -> None:
        """`PageRead.copied` gets all pages, each in place, or none."""
        num_pages, _ = LARGE_SHAPES[0]
        sources = np.random.default_rng(4).permutation(num_pages)
        shown: list[int] = []

        def copied(arrays: range, pages: list[int]) -> None:
            assert arrays == range(1)
            shown.extend(pages)
            assert (large.writer.pages()[pages] == large.reader.pages()[sources[pages]]).all()

        groups = [whole_pages(sources, range(num_pages), LARGE_PAGE_BYTES)]
        large.writer.read(
            msgspec.structs.replace(large.read(large.attach(), groups), copied=copied)
        )
        large.pump(lambda: bool(large.seen(ReadCompleted)))
        assert not shown or sorted(shown) == list(range(num_pages))
        assert (large.writer.pages() == large.reader.pages()[sources]).all()

    def test_a_large_read(self, large: TransportPair) -> None:
        num_pages, _ = LARGE_SHAPES[0]
        sources = np.random.default_rng(3).permutation(num_pages)
        groups = [whole_pages(sources, range(num_pages), LARGE_PAGE_BYTES)]
        transfer = large.writer.read(large.read(large.attach(), groups))
        large.pump(lambda: bool(large.seen(ReadCompleted)))
        assert large.seen(ReadCompleted) == [ReadCompleted(transfer, num_pages * LARGE_PAGE_BYTES)]
        assert (large.writer.pages() == large.reader.pages()[sources]).all()

    def test_reads_and_writes_are_reported_once_each_by_their_own_name(
        self, reading: TransportPair
    ) -> None:
        remote, grant = reading.attach(), reading.open_grant(range(NUM_PAGES))
        reads: list[TransferId] = []
        lower = [whole_pages(range(32), range(32), PAGE_BYTES)]
        upper = [whole_pages(range(32, 64), range(32, 64), PAGE_BYTES)]
        for _ in range(10):
            reads.append(reading.writer.read(reading.read(remote, upper)))
            check_write(reading, remote, grant, lower)  # perhaps while the read is under way
        reading.pump(lambda: len(reading.seen(ReadCompleted)) == len(reads))
        reading.poll_for()
        assert sorted(event.transfer for event in reading.seen(ReadCompleted)) == reads
        assert len(set(reads)) == len(reads)

    def test_a_read_sees_what_the_owner_stored_before_it(self, reading: TransportPair) -> None:
        remote = reading.attach()
        for round_ in range(10):
            reading.reader.paint(round_)
            check_read(reading, remote, ALL_PAGES)

    def test_the_owner_gets_no_event_of_a_read(self, reading: TransportPair) -> None:
        remote = reading.attach()
        check_read(reading, remote, ALL_PAGES)
        reading.poll_for()
        assert not reading.reader_events


class FailedReadContract(ReadingKit):
    """Reads that are not taken, and reads that fail."""

    def test_a_read_out_of_range_is_refused(self, reading: TransportPair) -> None:
        remote = reading.attach()
        for groups in OUT_OF_RANGE:
            check_read_refused(reading, reading.read(remote, groups))

    def test_a_read_of_an_array_that_is_not_there_is_refused(self, reading: TransportPair) -> None:
        remote = reading.attach()
        for array in (-1, 2):
            check_read_refused(reading, reading.read(remote, [], array=array))

    def test_the_owners_region_bounds_a_read(self, unlike: TransportPair) -> None:
        remote = unlike.attach()
        beyond = spans_of_pages([0], [0], [(600, 0, 41)])
        check_read_refused(unlike, unlike.read(remote, [beyond], array=1))
        check_read(unlike, remote, [spans_of_pages([0], [0], [(600, 0, 40)])], array=1)

    def test_the_readers_region_bounds_a_read(self, unlike: TransportPair) -> None:
        remote = unlike.attach()
        beyond = spans_of_pages([0], [0], [(0, 1, PAGE_BYTES)])
        check_read_refused(unlike, unlike.read(remote, [beyond]))
        check_read(unlike, remote, [spans_of_pages([0], [0], [(PAGE_BYTES + 1, 0, PAGE_BYTES)])])

    def test_a_read_into_a_region_that_was_not_exposed_is_refused(
        self, reading: TransportPair
    ) -> None:
        copies = PageCopies(0, tuple(ALL_PAGES))
        check_read_refused(reading, PageRead(reading.attach(), new_region_handle(), copies))

    def test_a_read_from_an_unknown_or_attaching_remote_is_refused(
        self, reading: TransportPair
    ) -> None:
        check_read_refused(reading, reading.read(RemoteId(99), ALL_PAGES))
        attaching = reading.writer.transport.attach(reading.reader.descriptor)
        check_read_refused(reading, reading.read(attaching, ALL_PAGES))
        detached = reading.attach()
        reading.writer.transport.detach(detached)
        check_read_refused(reading, reading.read(detached, ALL_PAGES))

    def test_detaching_ends_reads_once(self, reading: TransportPair) -> None:
        remote, transport = reading.attach(), reading.writer.transport
        reads = [reading.writer.read(reading.read(remote, ALL_PAGES)) for _ in range(5)]
        transport.detach(remote)
        reading.pump(lambda: len(ended(reading)) == len(reads))
        reading.poll_for()
        assert sorted(ended(reading)) == reads
        check_read(reading, reading.attach(), ALL_PAGES)

    def test_an_owner_that_leaves_is_lost_and_reads_fail(self, reading: TransportPair) -> None:
        remote = reading.attach()
        check_read(reading, remote, ALL_PAGES)
        reading.reader.transport.close()
        reading.pump(lambda: bool(reading.seen(RemoteLost)))
        before = reading.writer.snapshot()
        transfer = reading.writer.read(reading.read(remote, ALL_PAGES))
        reading.pump(lambda: bool(reading.seen(ReadFailed)))
        assert [failed.transfer for failed in reading.seen(ReadFailed)] == [transfer]
        assert reading.writer.snapshot() == before

    def test_a_region_that_is_not_what_was_described_is_not_read(
        self, reading: TransportPair
    ) -> None:
        transport, before = reading.writer.transport, reading.writer.snapshot()
        for num_before, lie in enumerate(LIES):
            remote = transport.attach(lie(reading.reader.descriptor))
            reading.pump(lambda: any(is_about(event, remote) for event in reading.writer_events))  # noqa: B023 -- at once
            assert reading.seen(RemoteLost)[num_before].remote == remote
            transfer = reading.writer.read(reading.read(remote, ALL_PAGES))
            reading.pump(lambda: len(reading.seen(ReadFailed)) > num_before)  # noqa: B023 -- at once
            assert reading.seen(ReadFailed)[num_before].transfer == transfer
        assert len(reading.seen(RemoteLost)) == len(LIES) == len(reading.seen(ReadFailed))
        assert reading.writer.snapshot() == before


class ReadingContract(CompletedReadContract, FailedReadContract):
    """For transports that claim `Capabilities.reads`."""


class ViewContract(TransportKit):
    """For transports that claim `Capabilities.views`."""

    @pytest.fixture
    def viewing(self) -> Generator[TransportPair]:
        """Two regions alike, full of different bytes."""
        pair = TransportPair.of(self.make_side(), self.make_side())
        pair.writer.fill(seed=1)
        pair.reader.fill(seed=2)
        yield pair
        pair.close()

    def test_a_view_shows_the_owners_pages(self, viewing: TransportPair) -> None:
        remote = viewing.attach()
        for array in (0, 1):
            seen = viewing.writer.view(remote, array)
            assert (seen.dtype, seen.shape) == (np.dtype("u1"), viewing.reader.pages(array).shape)
            assert (seen == viewing.reader.pages(array)).all()

    def test_a_view_is_no_copy_and_the_owner_gets_no_event(self, viewing: TransportPair) -> None:
        seen = viewing.writer.view(viewing.attach(), 0)
        for value in range(1, 4):
            viewing.reader.pages()[:] = value
            assert (seen == value).all()
        viewing.poll_for()
        assert not viewing.reader_events

    def test_a_view_cannot_be_written(self, viewing: TransportPair) -> None:
        seen = viewing.writer.view(viewing.attach(), 0)
        before = viewing.reader.snapshot()
        for attempt in WRITING_ATTEMPTS:
            with pytest.raises((ValueError, TypeError, BufferError)):
                attempt(seen)
        assert viewing.reader.snapshot() == before

    def test_writes_and_reads_go_on_beside_a_view(self, viewing: TransportPair) -> None:
        remote, grant = viewing.attach(), viewing.open_grant(range(NUM_PAGES))
        seen = viewing.writer.view(remote, 0)
        check_write(viewing, remote, grant, ALL_PAGES)
        assert (seen == viewing.writer.pages()).all()

    def test_an_array_that_is_not_there_is_not_shown(self, viewing: TransportPair) -> None:
        remote = viewing.attach()
        for array in (-1, 2, 1 << 40):
            with pytest.raises(TransferError, match="no array"):
                viewing.writer.view(remote, array)

    def test_nothing_is_shown_of_an_unknown_attaching_or_detached_remote(
        self, viewing: TransportPair
    ) -> None:
        transport = viewing.writer.transport
        attaching = transport.attach(viewing.reader.descriptor)
        for remote in (RemoteId(99), attaching):
            with pytest.raises(TransferError, match="not attached"):
                viewing.writer.view(remote, 0)
        detached = viewing.attach()
        transport.detach(detached)
        with pytest.raises(TransferError, match="not attached"):
            viewing.writer.view(detached, 0)

    def test_nothing_is_shown_of_an_owner_that_left(self, viewing: TransportPair) -> None:
        remote = viewing.attach()
        viewing.writer.view(remote, 0)
        viewing.reader.transport.close()
        viewing.pump(lambda: bool(viewing.seen(RemoteLost)))
        with pytest.raises(PeerLostError):
            viewing.writer.view(remote, 0)

    @pytest.mark.parametrize("end", ["detach", "close"])
    def test_a_view_that_is_kept_stays_readable(self, viewing: TransportPair, end: str) -> None:
        remote, transport = viewing.attach(), viewing.writer.transport
        seen, had = viewing.writer.view(remote, 0), viewing.reader.pages().copy()
        if end == "detach":
            transport.detach(remote)
            viewing.poll_for(0.01)
        else:
            transport.close()
        assert (seen == had).all()

    def test_a_view_that_is_kept_keeps_no_grant_from_quiescence(
        self, viewing: TransportPair
    ) -> None:
        remote, grant = viewing.attach(), viewing.open_grant(range(NUM_PAGES))
        seen = viewing.writer.view(remote, 0)
        check_write(viewing, remote, grant, ALL_PAGES)
        viewing.reader.transport.close_grant(grant)
        viewing.writer.transport.detach(remote)
        viewing.pump(lambda: viewing.seen(GrantQuiescent) == [GrantQuiescent(grant)])
        again = viewing.attach()
        assert (viewing.writer.view(again, 0) == seen).all()


def check_read(
    pair: TransportPair,
    remote: RemoteId,
    groups: Sequence[CopyGroup],
    *,
    array: int = 0,
    num_arrays: int = 1,
) -> None:
    """Post a read, wait for its end, and compare *all* bytes of both regions."""
    theirs, expected = pair.reader.snapshot(), bytearray(pair.writer.snapshot())
    for each in range(array, array + num_arrays):
        target = view_pages(memoryview(expected), pair.writer.region.arrays[each])
        apply_slowly(groups, pair.reader.pages(each), target)
    read = pair.read(remote, groups, array=array, num_arrays=num_arrays)
    done = ReadCompleted(pair.writer.read(read), read.copies.num_bytes)
    pair.pump(lambda: done in pair.writer_events)
    assert pair.writer.snapshot() == expected
    assert pair.reader.snapshot() == theirs


def check_read_refused(pair: TransportPair, read: PageRead) -> None:
    """The read is not taken: nothing changes, and nothing is reported of it."""
    before = pair.writer.snapshot()
    with pytest.raises(TransferError):
        pair.writer.read(read)
    pair.poll_for(0.01)
    assert pair.writer.snapshot() == before
    assert ended(pair) == []


def ended(pair: TransportPair) -> list[TransferId]:
    """Reads of which something was reported."""
    return [
        event.transfer
        for event in pair.writer_events
        if isinstance(event, ReadCompleted | ReadFailed)
    ]


def _make_writable(seen: NDArray[np.uint8]) -> None:
    seen.flags.writeable = True


def _store(seen: NDArray[np.uint8]) -> None:
    seen[3] = 0


def _store_behind(seen: NDArray[np.uint8]) -> None:
    """Through what the view stands on."""
    behind: Any = seen
    while isinstance(behind, np.ndarray):
        behind = behind.base
    memoryview(behind).cast("B")[:1] = b"x"


WRITING_ATTEMPTS: list[Callable[[NDArray[np.uint8]], None]] = [
    _store,
    _make_writable,
    _store_behind,
]
