"""Who may read and write which pages: the worker that a grant names, and what it names."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from baton.clock import MachineClock
from baton.errors import TransferError
from baton.ids import WorkerId, new_epoch, new_region_handle, new_ticket_id
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, SHAPES
from baton.testing.transport_pair import Side, TransportPair, whole_pages
from baton.transfer.interface import (
    Arrived,
    PageRead,
    ReadCompleted,
    ReadFailed,
    ReadGrant,
    TransportContext,
    WriteCompleted,
    WriteFailed,
    WriteGrant,
    find_read_scopes,
)
from baton.transfer.transports.tcp import wire as tcp
from tests.contract.test_transfer_abuse import RawWriter, SharedKit, TcpKit
from tests.integration.identities import Identities

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.auth.credentials import Credentials
    from baton.ids import TicketId
    from baton.testing.transport_contract.kit import TransportKit
    from baton.transfer.interface import TransferEvent

OWNER, READER = WorkerId("owner"), WorkerId("reader")


def make_side(kit: TransportKit, credentials: Credentials, epoch: str) -> Side:
    context = TransportContext(credentials, epoch, "127.0.0.1", MachineClock())
    transport = kit.make_transport(context)
    return Side.start(transport, epoch, kit.allocate(SHAPES), is_public=False)


class Readers:
    """An owner whose region is not public, and a reader that is attached to it."""

    def __init__(self, reader: Credentials, owner: Credentials) -> None:
        kit = TcpKit()
        self.pair = TransportPair.of(
            make_side(kit, reader, new_epoch()), make_side(kit, owner, new_epoch())
        )
        self.owner, self.reader = self.pair.reader, self.pair.writer
        self.owner.fill(seed=1)
        self.remote = self.pair.attach()

    def admit(self, pages: list[int], array: int = 0, **changes: object) -> TicketId:
        fields = {
            "id": new_ticket_id(),
            "region": self.owner.region.handle,
            "reader": self.reader.epoch,
            "reader_name": READER,
        }
        grant = ReadGrant(**{**fields, **changes})
        (scope,) = find_read_scopes([self.owner.transport])
        scope.admit_reads(grant, range(array, array + 1), np.array(pages))
        return grant.id

    def close_grant(self, grant: TicketId) -> None:
        (scope,) = find_read_scopes([self.owner.transport])
        scope.close_read_grant(grant)

    def read(self, grant: TicketId | None, pages: list[int], array: int = 0) -> TransferEvent:
        """How a read of these pages ends."""
        page_bytes = self.owner.region.arrays[array].page_bytes
        read = self.pair.read(self.remote, [whole_pages(pages, pages, page_bytes)], array=array)
        transfer = self.reader.read(PageRead(read.remote, read.region, read.copies, grant))
        self.pair.pump(lambda: any(e.transfer == transfer for e in self.ends()))
        return self.ends()[-1]

    def ends(self) -> list[ReadCompleted | ReadFailed]:
        return [
            event
            for event in self.pair.writer_events
            if isinstance(event, ReadCompleted | ReadFailed)
        ]

    def check_refused(self, grant: TicketId | None, pages: list[int], why: str) -> None:
        before = self.reader.snapshot()
        failed = self.read(grant, pages)
        assert isinstance(failed, ReadFailed)
        assert why in str(failed.error)
        assert self.reader.snapshot() == before

    def check_read(self, grant: TicketId | None, pages: list[int], array: int = 0) -> None:
        assert isinstance(self.read(grant, pages, array), ReadCompleted)
        found = self.reader.pages(array)[pages]
        assert np.array_equal(found, self.owner.pages(array)[pages])


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


@pytest.fixture
def readers(identities: Identities) -> Iterator[Readers]:
    readers = Readers(identities.of("worker", READER), identities.of("worker", OWNER))
    yield readers
    readers.pair.close()


def test_what_was_admitted_is_read_and_nothing_else(readers: Readers) -> None:
    readers.check_refused(None, [0], "no grant for it is open")
    readers.check_refused(new_ticket_id(), [0], "no grant for it is open")
    grant = readers.admit([0, 1])
    readers.check_read(grant, [1, 0])
    readers.check_refused(grant, [2], "a page is outside the grant")
    readers.check_refused(grant, [0, 2], "a page is outside the grant")
    readers.check_refused(None, [0], "no grant for it is open")
    readers.admit([0, 1, 2], id=grant)
    readers.check_read(grant, [2])
    readers.check_read(readers.admit([3]), [3])
    readers.close_grant(grant)
    readers.check_refused(grant, [0], "no grant for it is open")


def test_each_array_is_admitted_by_itself(readers: Readers) -> None:
    grant = readers.admit([0], array=1)
    readers.check_refused(grant, [0], "a page is outside the grant")
    readers.check_read(grant, [0], array=1)


@pytest.mark.parametrize(
    "changes",
    [{"reader": new_epoch()}, {"reader_name": WorkerId("another")}],
    ids=["another life", "another worker"],
)
def test_a_grant_is_good_for_the_reader_that_it_names(
    readers: Readers, changes: dict[str, object]
) -> None:
    readers.check_refused(readers.admit([0], **changes), [0], "for another reader")
    readers.check_read(readers.admit([0]), [0])


@pytest.mark.parametrize(
    ("array", "pages", "changes"),
    [
        (0, [NUM_PAGES], {}),
        (0, [-1], {}),
        (2, [0], {}),
        (-1, [0], {}),
        (0, [0], {"region": new_region_handle()}),
    ],
)
def test_pages_that_are_not_there_cannot_be_admitted(
    readers: Readers, array: int, pages: list[int], changes: dict[str, object]
) -> None:
    with pytest.raises(TransferError):
        readers.admit(pages, array, **changes)


@pytest.mark.parametrize("kit", [TcpKit(), SharedKit()], ids=lambda kit: kit.kind)
def test_a_worker_with_anothers_epoch_does_not_write_into_its_grant(
    identities: Identities, kit: TransportKit
) -> None:
    """The epoch in `attach` is the peer's own word; its name is in its certificate."""
    epoch = new_epoch()
    owner = make_side(kit, identities.of("worker", OWNER), new_epoch())
    sides = {name: make_side(kit, identities.of("worker", name), epoch) for name in ("thief", "w")}
    grant = new_ticket_id()
    handle, pages = owner.region.handle, np.arange(NUM_PAGES)
    owner.transport.open_grant(WriteGrant(grant, handle, epoch, pages, WorkerId("w")))
    try:
        for name, side in sides.items():
            pair = TransportPair.of(side, owner)
            side.paint(ord(name[0]))
            write = pair.write(pair.attach(), grant, [whole_pages([0], [0], PAGE_BYTES)])
            side.transport.submit(write)
            pair.pump(lambda pair=pair: bool(pair.seen(WriteCompleted) + pair.seen(WriteFailed)))
            is_its_own = name == "w"
            assert bool(pair.seen(WriteFailed)) is not is_its_own
            pair.poll_for()
            assert bool(pair.seen(Arrived)) is is_its_own
            assert (owner.pages()[0] == ord("w")).all() == is_its_own
            assert not (owner.pages()[0] == ord("t")).any()
    finally:
        for side in (owner, *sides.values()):
            side.close()


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_slow_reader_gets_nothing_that_is_stored_after_its_grant(is_closed: bool) -> None:
    """Pages go to other requests once a grant is closed: what is unsent leaves as zeros."""
    kit = TcpKit()
    with RawWriter(kit, reader=make_side(kit, kit.credentials, new_epoch())) as reader:
        owner, grant = reader.reader, new_ticket_id()
        owner.paint(1)
        (scope,) = find_read_scopes([owner.transport])
        pages = np.arange(NUM_PAGES)
        scope.admit_reads(
            ReadGrant(grant, owner.region.handle, reader.epoch, READER), range(1), pages
        )
        asked = np.tile(pages, 64).astype("<u4").tobytes()
        whole = np.array([0, PAGE_BYTES]).astype("<u4").tobytes()
        num_bytes = len(asked) // 4 * PAGE_BYTES
        reader.say(tcp.Fetch(0, 0, asked, whole, grant))
        reader.receive_until(b"fetch_served")
        received = bytes(reader.decoder._buffer)
        reader.decoder._buffer.clear()
        assert len(received) < num_bytes // 2, "there is nothing that was not sent"
        if is_closed:
            scope.close_read_grant(grant)
        owner.paint(2)
        while len(received) < num_bytes:
            reader.poll()
            with suppress(TimeoutError):
                received += reader.sock.recv(1 << 20)
        assert set(received) == ({0, 1} if is_closed else {1, 2})
        if is_closed:
            reader.say(tcp.Fetch(1, 0, asked[:4], whole, grant))
            refused = tcp.decode_from_listener(reader.receive_until(b"fetch_refused"))
            assert refused == tcp.FetchRefused(1, "no grant for it is open")
