"""The faulty wrapper: silent without a plan, and every fault it counts really happened."""

import numpy as np
import pytest

from baton.errors import TransferError
from baton.testing.faulty_transport import Fault, FaultPlan, FaultyTransport
from baton.testing.transport_contract import (
    LateNotificationContract,
    MultiArrayContract,
    ReadingContract,
    TransportContract,
    ViewContract,
)
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, TransportKit
from baton.testing.transport_pair import TransportPair, whole_pages
from baton.transfer.interface import (
    Arrived,
    GrantQuiescent,
    ReadCompleted,
    ReadFailed,
    WriteCompleted,
    WriteFailed,
)

ALL_PAGES = [whole_pages(range(NUM_PAGES), range(NUM_PAGES), PAGE_BYTES)]


class TestFaultlessWrapper(
    TransportContract,
    ReadingContract,
    ViewContract,
    MultiArrayContract,
    LateNotificationContract,
):
    """A wrapper that injects nothing is a transport like any other."""

    kind = "shared"
    peer_writes = True

    def make_transport(self, context):
        return FaultyTransport(super().make_transport(context), FaultPlan(seed=0, rates={}))


class Faulty(TransportKit):
    kind = "tcp"
    plan = FaultPlan(seed=0, rates={})

    def make_transport(self, context):
        return FaultyTransport(super().make_transport(context), self.plan)


def faulty_pair(fault, *, rate=1.0, kind="tcp", max_faults=1 << 30):
    kit = Faulty()
    kit.kind = kind
    kit.plan = FaultPlan(seed=3, rates={fault: rate}, max_faults=max_faults)
    pair = TransportPair.of(kit.make_side(), kit.make_side())
    pair.writer.fill(seed=1)
    return pair


def write_series(pair, num_writes):
    remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
    for number in range(num_writes):
        write = pair.write(remote, grant, ALL_PAGES, notification=bytes([number]))
        pair.writer.transport.submit(write)
        pair.pump(
            lambda: len(pair.seen(WriteCompleted) + pair.seen(WriteFailed)) == number + 1  # noqa: B023
        )
    pair.poll_for()
    return grant


@pytest.mark.parametrize("kind", ["shared", "tcp"])
@pytest.mark.parametrize(
    ("fault", "num_pages_changed"), [("flip_bit", 1), ("zero_page", 1), ("swap_pages", 2)]
)
def test_spoilt_bytes_arrive_and_the_source_is_unharmed(kind, fault, num_pages_changed):
    pair = faulty_pair(Fault(fault), kind=kind)
    before = pair.writer.snapshot()
    write_series(pair, 1)
    is_changed = (pair.reader.pages() != pair.writer.pages()).any(axis=1)
    assert np.count_nonzero(is_changed) == num_pages_changed
    assert pair.writer.transport.injected == {Fault(fault): 1}
    assert pair.writer.snapshot() == before
    assert len(pair.seen(WriteCompleted)) == 1 == len(pair.seen(Arrived))
    pair.close()


def reading_pair(fault):
    pair = faulty_pair(fault, kind="shared")
    pair.reader.fill(seed=2)
    return pair


@pytest.mark.parametrize(
    ("fault", "num_pages_changed"), [("flip_bit", 1), ("zero_page", 1), ("swap_pages", 2)]
)
def test_spoilt_bytes_are_read_and_the_owners_are_unharmed(fault, num_pages_changed):
    pair = reading_pair(Fault(fault))
    before = pair.reader.snapshot()
    transfer = pair.writer.transport.read(pair.read(pair.attach(), ALL_PAGES))
    pair.pump(lambda: bool(pair.seen(ReadCompleted)))
    assert pair.seen(ReadCompleted) == [ReadCompleted(transfer, NUM_PAGES * PAGE_BYTES)]
    is_changed = (pair.reader.pages() != pair.writer.pages()).any(axis=1)
    assert np.count_nonzero(is_changed) == num_pages_changed
    assert pair.writer.transport.injected == {Fault(fault): 1}
    assert pair.reader.snapshot() == before
    pair.close()


def test_failed_reads_fail_and_read_nothing():
    pair = reading_pair(Fault.FAIL_SUBMIT)
    before = pair.writer.snapshot()
    transfer = pair.writer.transport.read(pair.read(pair.attach(), ALL_PAGES))
    pair.pump(lambda: bool(pair.seen(ReadFailed)))
    assert [failed.transfer for failed in pair.seen(ReadFailed)] == [transfer]
    assert pair.writer.snapshot() == before
    pair.close()


def test_a_delayed_read_reads_late():
    pair = reading_pair(Fault.DELAY_READ)
    before = pair.writer.snapshot()
    transfer = pair.writer.transport.read(pair.read(pair.attach(), ALL_PAGES))
    for _ in range(3):
        pair.poll()
        assert pair.writer.snapshot() == before
        assert not pair.seen(ReadCompleted)
    pair.reader.fill(seed=3)
    pair.poll()
    assert pair.seen(ReadCompleted) == [ReadCompleted(transfer, NUM_PAGES * PAGE_BYTES)]
    assert (pair.writer.pages() == pair.reader.pages()).all()
    pair.close()


def test_a_delayed_read_from_a_remote_that_is_gone_fails():
    pair = reading_pair(Fault.DELAY_READ)
    remote, before = pair.attach(), pair.writer.snapshot()
    transfer = pair.writer.transport.read(pair.read(remote, ALL_PAGES))
    pair.writer.transport.detach(remote)
    pair.pump(lambda: bool(pair.seen(ReadFailed)))
    assert [failed.transfer for failed in pair.seen(ReadFailed)] == [transfer]
    assert pair.writer.snapshot() == before
    pair.close()


def test_failed_submits_fail_and_send_nothing():
    pair = faulty_pair(Fault.FAIL_SUBMIT)
    write_series(pair, 3)
    assert len(pair.seen(WriteFailed)) == 3 == pair.writer.transport.injected[Fault.FAIL_SUBMIT]
    assert not any(pair.reader.region.memory)
    pair.close()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault.DROP_NOTIFICATION, []),
        (Fault.DUPLICATE_NOTIFICATION, [0, 0, 1, 1, 2, 2, 3, 3]),
        (Fault.DELAY_NOTIFICATION, [0, 1, 2, 3]),
    ],
)
def test_notices_go_wrong(fault, expected):
    pair = faulty_pair(fault)
    write_series(pair, 4)
    assert sorted(arrived.notification[0] for arrived in pair.seen(Arrived)) == expected
    assert pair.reader.transport.injected == {fault: 4}
    pair.close()


def test_reordered_notifications_all_arrive_in_another_order():
    pair = faulty_pair(Fault.REORDER_NOTIFICATION, rate=0.5)
    write_series(pair, 12)
    order = [arrived.notification[0] for arrived in pair.seen(Arrived)]
    assert sorted(order) == list(range(12))
    assert (order != sorted(order)) == (pair.reader.transport.injected.total() > 0)
    pair.close()


def test_quiescence_is_hidden_and_faults_end():
    pair = faulty_pair(Fault.HIDE_QUIESCENCE, max_faults=1)
    for _ in range(2):
        grant = pair.open_grant([1])
        pair.reader.transport.close_grant(grant)
        pair.poll_for(0.02)
    assert pair.seen(GrantQuiescent) == [GrantQuiescent(grant)]
    assert pair.reader.transport.injected == {Fault.HIDE_QUIESCENCE: 1}
    pair.close()


def test_a_seed_repeats_its_faults():
    found = []
    for _ in range(2):
        pair = faulty_pair(Fault.FAIL_SUBMIT, rate=0.5)
        write_series(pair, 10)
        found.append([failed.transfer for failed in pair.seen(WriteFailed)])
        pair.close()
    assert found[0] == found[1]
    assert 0 < len(found[0]) < 10


@pytest.mark.parametrize(
    ("fault", "num_pages_changed"), [("flip_bit", 1), ("zero_page", 1), ("swap_pages", NUM_PAGES)]
)
def test_a_spoilt_view_shows_other_bytes_and_leaves_the_owners_alone(fault, num_pages_changed):
    pair = reading_pair(Fault(fault))
    remote, before = pair.attach(), pair.reader.snapshot()
    seen = pair.writer.transport.view(remote, 0)
    is_changed = (seen != pair.reader.pages()).any(axis=1)
    assert np.count_nonzero(is_changed) == num_pages_changed
    assert pair.writer.transport.injected == {Fault(fault): 1}
    assert not seen.flags.writeable
    assert pair.reader.snapshot() == before
    pair.close()


def test_a_view_that_fails_on_purpose():
    pair = reading_pair(Fault.FAIL_SUBMIT)
    with pytest.raises(TransferError, match="on purpose"):
        pair.writer.transport.view(pair.attach(), 0)
    assert pair.writer.transport.injected == {Fault.FAIL_SUBMIT: 1}
    pair.close()
