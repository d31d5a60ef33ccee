"""A library that takes a while to start for each peer: its owner serves the others meanwhile."""

import os

import pytest

from baton.errors import TransferError
from baton.testing.transport_contract.kit import TransportKit
from baton.testing.transport_pair import TransportPair
from baton.transfer.interface import RemoteAttached, RemoteLost
from baton.transfer.onesided.session import Library
from baton.transfer.onesided.transport import OneSidedTransport


class Session:
    """Started once its descriptor is readable."""

    peer_process_writes = needs_serving = False
    fails = is_closed = False

    def __init__(self):
        self.fd = os.eventfd(0)

    def prepare(self, region):
        return self.fd

    def get_metadata(self, region):
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


class Kit(TransportKit):
    kind = "slow"

    def __init__(self):
        self.opened = []

    def make_transport(self, context):
        library = Library(self.open_session, reach="host")
        return OneSidedTransport(
            "slow", library, context, connect_timeout_s=5.0, max_connections=8, advertise_host=None
        )

    def open_session(self):
        self.opened.append(Session())
        return self.opened[-1]


class Start:
    """An owner, and two peers that attach: each has its session, started by `start`."""

    def __init__(self):
        owner, peers = Kit(), Kit()
        reader = owner.make_side()
        owner.opened.clear()  # the one that was tried
        self.pairs = [TransportPair.of(peers.make_side(), reader) for _ in range(2)]
        self.remotes, self.sessions, self.reader = [], owner.opened, reader
        for number, pair in enumerate(self.pairs, 1):
            self.remotes.append(pair.writer.transport.attach(reader.descriptor))
            pair.pump(lambda number=number: len(owner.opened) == number)

    def attached(self, number):
        return RemoteAttached(self.remotes[number]) in self.pairs[number].writer_events

    def start(self, number):
        os.eventfd_write(self.sessions[number].fd, 1)


@pytest.fixture
def start():
    started = Start()
    yield started
    started.pairs[0].writer.close()
    started.pairs[1].close()
    assert all(session.is_closed for session in started.sessions)


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
