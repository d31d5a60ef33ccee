"""A library that takes a while to start for each peer: its owner serves the others meanwhile."""

import os
import select

import pytest

from baton.errors import TransferError
from baton.testing.transport_contract.kit import TransportKit
from baton.testing.transport_pair import TransportPair
from baton.transfer.interface import RemoteAttached, RemoteLost
from baton.transfer.onesided import transport
from baton.transfer.onesided.session import Library
from baton.transfer.onesided.transport import OneSidedTransport


class Session:
    """Started once its descriptor is readable."""

    peer_process_writes = needs_serving = False
    fails = is_closed = is_described = False

    def __init__(self):
        self.fd = os.eventfd(0)

    def prepare(self, region):
        return self.fd

    def get_metadata(self, region):
        self.is_described = True
        os.eventfd_read(self.fd)  # would wait
        if self.fails:
            raise TransferError("the library does not start")
        return b"here"

    def load_metadata(self, *_):
        pass

    def close(self):
        if not self.is_closed:
            os.close(self.fd)
        self.is_closed = True


class QuickSession(Session):
    """Needs not be waited for, though `get_metadata` may take a while."""

    def prepare(self, region):
        os.eventfd_write(self.fd, 1)


class Kit(TransportKit):
    kind = "slow"

    def __init__(self, session_type=Session):
        self.opened, self.session_type = [], session_type

    def make_transport(self, context):
        library = Library(self.open_session, reach="host")
        return OneSidedTransport(
            "slow", library, context, connect_timeout_s=5.0, max_connections=8, advertise_host=None
        )

    def open_session(self):
        self.opened.append(self.session_type())
        return self.opened[-1]


class Start:
    """An owner, and peers that attach: each has its session, started by `start`."""

    def __init__(self, num_peers=2):
        owner, peers = Kit(), Kit()
        reader = owner.make_side()
        owner.opened.clear()  # the one that was tried
        self.pairs = [TransportPair.of(peers.make_side(), reader) for _ in range(num_peers)]
        self.remotes, self.sessions, self.reader = [], owner.opened, reader
        for number, pair in enumerate(self.pairs, 1):
            self.remotes.append(pair.writer.transport.attach(reader.descriptor))
            due = min(number, transport.MAX_STARTING)
            pair.pump(lambda due=due: len(owner.opened) >= due)
            pair.poll_for(0.01)

    def attached(self, number):
        return RemoteAttached(self.remotes[number]) in self.pairs[number].writer_events

    def start(self, number):
        os.eventfd_write(self.sessions[number].fd, 1)

    def close(self):
        for pair in self.pairs[1:]:
            pair.writer.close()
        self.pairs[0].close()
        assert all(session.is_closed for session in self.sessions)


@pytest.fixture
def start():
    started = Start()
    yield started
    started.close()


@pytest.fixture
def queue(monkeypatch):
    """Four peers, of which two have a session that starts."""
    monkeypatch.setattr(transport, "MAX_STARTING", 2)
    started = Start(4)
    assert len(started.sessions) == 2
    yield started
    started.close()


def test_a_peer_is_admitted_once_its_session_has_started_whatever_others_wait_for(start):
    start.start(1)
    start.pairs[1].pump(lambda: start.attached(1))
    start.pairs[0].poll_for()
    assert not start.attached(0)
    start.start(0)
    start.pairs[0].pump(lambda: start.attached(0))


def test_a_session_that_does_not_start_refuses_its_peer_with_the_reason(start):
    start.sessions[0].fails = True
    start.start(0)
    start.pairs[0].pump(lambda: bool(start.pairs[0].seen(RemoteLost)))
    (lost,) = start.pairs[0].seen(RemoteLost)
    assert "the library does not start" in str(lost.error)
    assert start.sessions[0].is_closed


def test_the_session_of_a_peer_that_leaves_meanwhile_is_closed(start, caplog):
    start.pairs[0].writer.transport.detach(start.remotes[0])
    start.pairs[1].pump(lambda: start.sessions[0].is_closed)
    assert "left before its session had started" in caplog.text
    start.start(1)
    start.pairs[1].pump(lambda: start.attached(1))


def test_sessions_that_start_are_closed_with_their_transport(start):
    start.reader.transport.close()
    assert all(session.is_closed for session in start.sessions)


def test_no_more_sessions_start_at_a_time_than_the_cores_are_for(queue):
    queue.start(0)
    queue.pairs[0].pump(lambda: queue.attached(0))
    assert len(queue.sessions) == 3
    queue.sessions[1].fails = True
    queue.start(1)
    queue.pairs[1].pump(lambda: bool(queue.pairs[1].seen(RemoteLost)))
    assert len(queue.sessions) == 4
    for number in (2, 3):
        queue.start(number)
        queue.pairs[number].pump(lambda number=number: queue.attached(number))


def test_the_next_session_starts_where_a_peer_leaves_and_none_for_one_that_left(queue, caplog):
    queue.pairs[2].writer.transport.detach(queue.remotes[2])
    queue.pairs[2].pump(lambda: "left before" in caplog.text)
    assert len(queue.sessions) == 2
    queue.pairs[0].writer.transport.detach(queue.remotes[0])
    queue.pairs[0].pump(lambda: len(queue.sessions) == 3)
    queue.start(2)
    queue.pairs[3].pump(lambda: queue.attached(3))


def test_peers_whose_sessions_have_not_started_are_left_with_their_transport(queue):
    queue.reader.transport.close()
    assert len(queue.sessions) == 2


def count_described(sessions):
    return sum(session.is_described for session in sessions)


def test_of_several_sessions_that_have_started_one_is_described_in_each_poll(start):
    for number in (0, 1):
        start.start(number)
    for num_described in (1, 2):
        start.reader.transport.poll()
        assert count_described(start.sessions) == num_described
    start.pairs[0].pump(lambda: start.attached(0))
    start.pairs[1].pump(lambda: start.attached(1))


def test_of_several_peers_that_attach_at_once_one_is_admitted_in_each_poll():
    owner, peers = Kit(QuickSession), Kit(QuickSession)
    reader = owner.make_side()
    owner.opened.clear()
    writers = [peers.make_side() for _ in range(3)]
    for writer in writers:
        writer.transport.attach(reader.descriptor)
    while not owner.opened:  # they attach at the same time
        for writer in writers:
            writer.transport.poll()
        while not owner.opened and select.select([reader.transport.readiness_fd], [], [], 0)[0]:
            reader.transport.poll()
    for num_admitted in (1, 2, 3):
        assert count_described(owner.opened) == num_admitted
        assert select.select([reader.transport.readiness_fd], [], [], 0)[0] or num_admitted == 3
        reader.transport.poll()
    for side in (reader, *writers):
        side.close()
