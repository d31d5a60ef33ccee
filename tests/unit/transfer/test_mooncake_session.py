"""Mooncake's process, where it cannot be started, or reports what is not so."""

import os
import select
import socket
from pathlib import Path

import pytest

from baton.clock import MachineClock
from baton.config.sections import HandoffSection
from baton.errors import TransferError
from baton.net.framing import decode, encode
from baton.testing.clocks import ManualClock
from baton.transfer.region import allocate_shared_region, release_region
from baton.transfer.transports.mooncake import session as mooncake
from baton.transfer.transports.mooncake.session import (
    MooncakeHandle,
    MooncakeSession,
    Registered,
    Started,
    TransferDone,
)
from tests.descriptors import no_descriptors


class StandIn:
    """In place of Mooncake's process: its end of the socket. Peers may have taken it over."""

    def __init__(self, _, *, stdin, **__):
        self.sock = socket.socket(fileno=os.dup(stdin))

    def kill(self):
        self.sock.close()

    def wait(self):
        pass


class SlowClock(ManualClock):
    """Each look at it takes a while."""

    def now(self):
        self.advance(0.02)
        return super().now()


def start(clock=None):
    return MooncakeSession(
        "127.0.0.1", "lo", protocol="tcp", devices="", clock=clock or MachineClock()
    )


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(mooncake.subprocess, "Popen", StandIn)
    monkeypatch.setattr(mooncake, "START_TIMEOUT_S", 0.05)
    session = start()
    yield session
    session.close()


@pytest.fixture
def region():
    region = allocate_shared_region([(4, 4096)])
    yield region
    release_region(region)


def say(session, *reports):
    for report in reports:
        session._process.sock.send(encode(report))


def test_without_a_descriptor_left_a_session_fails_as_transfers_do():
    with no_descriptors(), pytest.raises(TransferError, match="Too many open files"):
        start()


def test_a_transfer_that_was_not_begun_cannot_be_done(session):
    say(session, TransferDone(7))
    with pytest.raises(TransferError, match="not begun"):
        session.is_done(MooncakeHandle([], {1}))


def test_a_process_that_has_started_describes_its_region_next(session, region):
    say(session, Started(), Started(), Registered(1, 4096))
    with pytest.raises(TransferError, match="no region"):
        session.get_metadata(region)


def test_what_a_session_is_prepared_by_is_readable_once_the_process_has_started(session, region):
    fd = session.prepare(region)
    assert select.select([fd], [], [], 0)[0] == []
    say(session, Started(), Registered(1, 4096))
    assert select.select([fd], [], [], 0)[0] == [fd]
    assert decode(mooncake._metadata, session.get_metadata(region)).port == 1


def test_the_whole_start_is_waited_for_no_longer_than_that(monkeypatch, region):
    monkeypatch.setattr(mooncake.subprocess, "Popen", StandIn)
    monkeypatch.setattr(mooncake, "START_TIMEOUT_S", 0.05)
    session = start(SlowClock())
    say(session, Started())
    with pytest.raises(TransferError, match="timed out"):
        session.get_metadata(region)
    assert session._socket.gettimeout() == pytest.approx(0.01)
    session.close()


def test_with_rdma_the_time_to_pin_the_region_is_added(monkeypatch, region):
    monkeypatch.setattr(mooncake.subprocess, "Popen", StandIn)
    monkeypatch.setattr(mooncake, "START_TIMEOUT_S", 0.05)
    monkeypatch.setattr(mooncake, "PINNED_BYTES_S", len(region.memory) / 0.1)
    session = MooncakeSession("127.0.0.1", "lo", protocol="rdma", devices="", clock=SlowClock())
    say(session, Started())
    with pytest.raises(TransferError, match="timed out"):
        session.get_metadata(region)
    assert session._socket.gettimeout() == pytest.approx(0.11)
    session.close()


def test_a_process_has_much_less_time_to_start_than_peers_wait_for_a_sign_of_life():
    assert HandoffSection().liveness_timeout_s > 1.4 * mooncake.START_TIMEOUT_S


def test_a_descriptor_that_the_process_sends_is_not_kept(session, tmp_path):
    sent = tmp_path / "sent"
    with sent.open("wb") as file:
        socket.send_fds(session._process.sock, [encode(Started())], [file.fileno()])
    assert not session.is_done(MooncakeHandle([], {1}))
    assert sent not in {entry.resolve() for entry in Path("/proc/self/fd").iterdir()}
