"""A grant admits its pages only; closed, it becomes quiescent, and then nothing lands."""

from __future__ import annotations

import numpy as np
import pytest

from baton.errors import TransferError
from baton.ids import TicketId, new_epoch, new_region_handle, new_ticket_id
from baton.kv.copies import CopyGroup, PageCopies
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, TransportKit, check_write
from baton.testing.transport_pair import TransportPair, spans_of_pages, whole_pages
from baton.transfer.interface import (
    Arrived,
    GrantQuiescent,
    PageWrite,
    RemoteAttached,
    RemoteId,
    WriteCompleted,
    WriteFailed,
    WriteGrant,
    as_admitter,
)
from baton.transfer.region import release_region

ONE_PAGE = [whole_pages([0], [0], PAGE_BYTES)]
OUT_OF_BOUNDS = (
    PageCopies(0, (whole_pages([0], [NUM_PAGES], PAGE_BYTES),)),
    PageCopies(0, (whole_pages([NUM_PAGES], [0], PAGE_BYTES),)),
    PageCopies(0, (whole_pages([-1], [0], PAGE_BYTES),)),
    PageCopies(0, (whole_pages([0], [-1], PAGE_BYTES),)),
    PageCopies(0, (whole_pages([0, 1], [0], PAGE_BYTES),)),
    PageCopies(0, (spans_of_pages([0], [0], [(0, 1, PAGE_BYTES)]),)),
    PageCopies(0, (spans_of_pages([0], [0], [(1, 0, PAGE_BYTES)]),)),
    PageCopies(0, (spans_of_pages([0], [0], [(0, -1, 8)]),)),
    PageCopies(0, (spans_of_pages([0], [0], [(-1, 0, 8)]),)),
    PageCopies(0, (spans_of_pages([0], [0], [(0, 0, 0)]),)),
    PageCopies(0, (spans_of_pages([0], [0], [(0, 0, 1 << 62)]),)),
    PageCopies(2, tuple(ONE_PAGE)),
    PageCopies(-1, tuple(ONE_PAGE)),
)


class WriteGrantContract(TransportKit):  # noqa: PLR0904 - a method for each test
    """Permission and its end."""

    def test_pages_outside_the_grant_are_refused(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), pair.open_grant([*range(10, 20), 30])
        for pages in [0], [9, 30], [10, 11, 12, 40]:
            groups = [whole_pages([1], [10], PAGE_BYTES), whole_pages(pages, pages, PAGE_BYTES)]
            self.check_refused(pair, remote, grant, groups=groups, may_land=[10])

    def test_an_unknown_grant_is_refused(self, pair: TransportPair) -> None:
        remote = pair.attach()
        self.check_refused(pair, remote, new_ticket_id())

    def test_another_writers_grant_is_refused(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), new_ticket_id()
        pages = np.arange(NUM_PAGES)
        pair.reader.transport.open_grant(
            WriteGrant(grant, pair.reader.region.handle, new_epoch(), pages)
        )
        self.check_refused(pair, remote, grant)

    def test_another_regions_grant_is_refused(self) -> None:
        pair = TransportPair.of(self.make_side(), self.make_side())
        other = self.allocate([(NUM_PAGES, PAGE_BYTES)])
        pair.reader.transport.expose(other)
        remote, grant, pages = pair.attach(), new_ticket_id(), np.arange(NUM_PAGES)
        pair.reader.transport.open_grant(WriteGrant(grant, other.handle, pair.writer.epoch, pages))
        self.check_refused(pair, remote, grant)
        assert not any(other.memory)
        pair.close()
        release_region(other)

    def test_a_bad_grant_is_not_opened(self, pair: TransportPair) -> None:
        reader, epoch = pair.reader, pair.writer.epoch
        for region, pages in (
            (reader.region.handle, [NUM_PAGES]),
            (reader.region.handle, [-1]),
            (new_region_handle(), [0]),
        ):
            grant = WriteGrant(new_ticket_id(), region, epoch, np.array(pages))
            with pytest.raises(TransferError):
                reader.transport.open_grant(grant)
        grant = WriteGrant(new_ticket_id(), reader.region.handle, epoch, np.array([0]))
        reader.transport.open_grant(grant)
        with pytest.raises(TransferError):
            reader.transport.open_grant(grant)

    def test_a_write_out_of_bounds_is_not_posted(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        for bad in OUT_OF_BOUNDS:
            with pytest.raises(TransferError):
                pair.writer.transport.submit(
                    PageWrite(remote, grant, pair.writer.region.handle, bad, b"")
                )
        assert not any(pair.reader.snapshot())
        check_write(pair, remote, grant, ONE_PAGE)

    def test_a_write_from_or_to_the_unknown_is_not_posted(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        copies = PageCopies(0, tuple(ONE_PAGE))
        for write in (
            PageWrite(remote, grant, new_region_handle(), copies, b""),
            PageWrite(RemoteId(99), grant, pair.writer.region.handle, copies, b""),
        ):
            with pytest.raises(TransferError):
                pair.writer.transport.submit(write)

    def test_a_write_to_a_remote_that_is_still_attaching_is_not_posted(
        self, pair: TransportPair
    ) -> None:
        grant = pair.open_grant(range(NUM_PAGES))
        remote = pair.writer.transport.attach(pair.reader.descriptor)
        with pytest.raises(TransferError):
            pair.writer.transport.submit(pair.write(remote, grant, ONE_PAGE))

    def test_an_unused_grant_is_quiescent_once(self, pair: TransportPair) -> None:
        grant = pair.open_grant(range(NUM_PAGES))
        pair.reader.transport.close_grant(grant)
        pair.reader.transport.close_grant(grant)
        pair.reader.transport.close_grant(new_ticket_id())
        pair.pump(lambda: bool(pair.seen(GrantQuiescent)))
        pair.poll_for()
        assert pair.seen(GrantQuiescent) == [GrantQuiescent(grant)]

    def test_a_grant_closed_before_the_writer_attached_is_refused(
        self, pair: TransportPair
    ) -> None:
        grant, kept = pair.open_grant(range(NUM_PAGES)), pair.open_grant(range(NUM_PAGES))
        pair.reader.transport.close_grant(grant)
        pair.pump(lambda: bool(pair.seen(GrantQuiescent)))
        remote = pair.attach()
        self.check_refused(pair, remote, grant)
        check_write(pair, remote, kept, ONE_PAGE)

    def test_nothing_lands_after_quiescence(self, pair: TransportPair) -> None:
        """The writer never stops to write; the grant's pages stop to change."""
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        groups = [whole_pages(range(NUM_PAGES), range(NUM_PAGES), PAGE_BYTES)]

        def write_on() -> None:
            pair.writer.fill(seed=len(pair.writer_events))
            pair.writer.transport.submit(pair.write(remote, grant, groups, notification=b"n"))

        for _ in range(6):
            write_on()
        pair.pump(lambda: len(pair.seen(Arrived)) >= 3)
        for _ in range(6):
            write_on()
        pair.reader.transport.close_grant(grant)
        num_arrived = len(pair.seen(Arrived))
        pair.pump(lambda: bool(pair.seen(GrantQuiescent)))
        at_quiescence = pair.reader.snapshot()
        for _ in range(20):
            write_on()
            pair.poll()
        pair.pump(lambda: len(pair.seen(WriteFailed) + pair.seen(WriteCompleted)) == 32)
        assert pair.reader.snapshot() == at_quiescence
        assert len(pair.seen(WriteFailed)) >= 20
        assert pair.seen(GrantQuiescent) == [GrantQuiescent(grant)]
        assert len(pair.seen(Arrived)) == num_arrived

    def test_other_grants_stay_open(self, pair: TransportPair) -> None:
        remote = pair.attach()
        closed, kept = pair.open_grant(range(32)), pair.open_grant(range(32, 64))
        pair.reader.transport.close_grant(closed)
        groups = [whole_pages(range(32), range(32, 64), PAGE_BYTES)]
        pair.pump(lambda: pair.seen(GrantQuiescent) == [GrantQuiescent(closed)])
        check_write(pair, remote, kept, groups)

    @pytest.mark.parametrize("is_admitted", [True, False])
    def test_a_grant_of_the_handoffs_is_known_from_it_or_asked_for(
        self, pair: TransportPair, *, is_admitted: bool
    ) -> None:
        remote, grant = pair.attach(), pair.open_grant([0, 1], is_announced=True)
        admitter = as_admitter(pair.writer.transport)
        if is_admitted and admitter is not None:
            admitter.admit_writes(remote, grant, np.array([0, 1]))
            admitter.admit_writes(remote, grant, np.array([0, 1]))
        check_write(pair, remote, grant, ONE_PAGE)
        outside = [whole_pages([0], [2], PAGE_BYTES)]
        self.check_refused(pair, remote, grant, groups=outside, may_land=[0])

    def test_a_close_that_overtakes_the_handoffs_grant_holds(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), pair.open_grant([0, 1], is_announced=True)
        pair.reader.transport.close_grant(grant)
        pair.pump(lambda: pair.seen(GrantQuiescent) == [GrantQuiescent(grant)])
        admitter = as_admitter(pair.writer.transport)
        if admitter is not None:
            admitter.admit_writes(remote, grant, np.array([0, 1]))
        self.check_refused(pair, remote, grant)

    def test_a_close_between_both_announcements_holds(self, pair: TransportPair) -> None:
        """The transport announces what is open as its peer attaches; the handoff follows."""
        grant = pair.open_grant([0, 1], is_announced=True)
        remote = pair.attach()
        check_write(pair, remote, grant, ONE_PAGE)
        pair.reader.transport.close_grant(grant)
        pair.pump(lambda: pair.seen(GrantQuiescent) == [GrantQuiescent(grant)])
        admitter = as_admitter(pair.writer.transport)
        if admitter is not None:
            admitter.admit_writes(remote, grant, np.array([0, 1]))
        self.check_refused(pair, remote, grant, may_land=[0])

    @pytest.mark.parametrize("is_closed", [True, False])
    def test_what_is_announced_while_the_writer_attaches_is_opened_by_its_owner(
        self, pair: TransportPair, *, is_closed: bool
    ) -> None:
        """Closed before the owner knows the writer, it stays closed: no writer is asked to stop."""
        grant = pair.open_grant([0, 1], is_announced=True)
        remote = pair.writer.transport.attach(pair.reader.descriptor)
        admitter = as_admitter(pair.writer.transport)
        if admitter is not None:
            admitter.admit_writes(remote, grant, np.array([0, 1]))
        if is_closed:
            pair.reader.transport.close_grant(grant)
            pair.pump(lambda: pair.seen(GrantQuiescent) == [GrantQuiescent(grant)])
        pair.pump(lambda: RemoteAttached(remote) in pair.writer_events)
        if is_closed:
            self.check_refused(pair, remote, grant)
            return
        check_write(pair, remote, grant, ONE_PAGE)
        pair.reader.transport.close_grant(grant)
        pair.pump(lambda: pair.seen(GrantQuiescent) == [GrantQuiescent(grant)])
        self.check_refused(pair, remote, grant, may_land=[0])

    def test_a_grant_that_went_well_is_finished_without_asking(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), pair.open_grant([0, 1], is_announced=True)
        check_write(pair, remote, grant, ONE_PAGE)
        if not pair.reader.transport.finish_grant(grant):
            assert pair.reader.transport.capabilities.late_writes
            pair.pump(lambda: pair.seen(GrantQuiescent) == [GrantQuiescent(grant)])
        admitter = as_admitter(pair.writer.transport)
        if admitter is not None:
            admitter.forget_grant(remote, grant)
        self.check_refused(pair, remote, grant, may_land=[0])
        check_write(pair, remote, pair.open_grant([0, 1]), ONE_PAGE)

    def test_a_finished_grant_of_a_lost_writer_waits_for_its_end(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), pair.open_grant([0, 1])
        check_write(pair, remote, grant, ONE_PAGE)
        pair.writer.transport.close()
        pair.poll_for()
        if not pair.reader.transport.finish_grant(grant):
            pair.pump(lambda: pair.seen(GrantQuiescent) == [GrantQuiescent(grant)])

    def check_refused(
        self,
        pair: TransportPair,
        remote: RemoteId,
        grant: TicketId,
        *,
        groups: list[CopyGroup] = ONE_PAGE,
        may_land: list[int] | None = None,
    ) -> None:
        """A write fails, is not announced, and no byte outside `may_land` changes."""
        num_arrived, num_failed = len(pair.seen(Arrived)), len(pair.seen(WriteFailed))
        transfer = pair.writer.transport.submit(pair.write(remote, grant, groups))
        pair.pump(lambda: len(pair.seen(WriteFailed)) > num_failed)
        pair.poll_for()
        assert [failed.transfer for failed in pair.seen(WriteFailed)][num_failed:] == [transfer]
        assert len(pair.seen(Arrived)) == num_arrived
        untouched = np.delete(pair.reader.pages(), may_land or [], axis=0)
        assert not untouched.any()
        assert not pair.reader.pages(1).any()
