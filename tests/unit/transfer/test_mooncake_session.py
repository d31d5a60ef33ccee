"""Mooncake's process, where it cannot be started, or reports what is not so."""

import os
import select
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.clock import MachineClock
from baton.config.sections import HandoffSection
from baton.errors import TransferError
from baton.net.framing import decode, encode
from baton.testing.clocks import ManualClock
from baton.transfer.region import allocate_shared_region, release_region
from baton.transfer.transports.mooncake import child
from baton.transfer.transports.mooncake import session as mooncake
from baton.transfer.transports.mooncake.child import ChildServer
from baton.transfer.transports.mooncake.session import (
    MooncakeHandle,
    MooncakeOptions,
    MooncakeSession,
    Open,
    Registered,
    Started,
    TransferDone,
)
from tests.descriptors import no_descriptors


class StandIn:
    """In place of Mooncake's process: its end of the socket. Peers may have taken it over."""

    def __init__(self, _, *, stdin, env, **__):
        self.sock, self.env = socket.socket(fileno=os.dup(stdin)), env

    def kill(self):
        self.sock.close()

    def wait(self):
        pass


class SlowClock(ManualClock):
    """Each look at it takes a while."""

    def now(self):
        self.advance(0.02)
        return super().now()


def start(clock=None, host="127.0.0.1", protocol="tcp"):
    return MooncakeSession(host, "lo", protocol=protocol, devices="", clock=clock or MachineClock())


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
    session = start(SlowClock(), protocol="rdma")
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


@pytest.mark.parametrize(
    ("protocol", "forced"), [("tcp", "MC_FORCE_TCP"), ("rdma", "MC_FORCE_HCA")]
)
def test_mooncake_is_forced_to_the_protocol_whatever_devices_there_are(
    monkeypatch, protocol, forced
):
    for variable in ("MC_FORCE_TCP", "MC_FORCE_HCA"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(mooncake.subprocess, "Popen", StandIn)
    session = start(protocol=protocol)
    assert [name for name in session._process.env if name.startswith("MC_FORCE")] == [forced]
    session.close()


@pytest.mark.parametrize(("host", "is_ipv6"), [("10.1.2.3", False), ("fd00::2", True)])
def test_mooncake_listens_over_ipv6_where_its_host_is_such_an_address(monkeypatch, host, is_ipv6):
    monkeypatch.setattr(mooncake.subprocess, "Popen", StandIn)
    session = start(host=host)
    assert ("MC_USE_IPV6" in session._process.env) == is_ipv6
    session.close()


class Mooncake:
    """In place of Mooncake's engine: it opens its listeners, or does not start."""

    num_listeners = 1
    status = 0

    def initialize(self, *_):
        self.listeners = [socket.create_server(("0.0.0.0", 0)) for _ in range(self.num_listeners)]
        return self.status


@pytest.fixture
def engine(monkeypatch):
    """What the child makes of it; the listeners of the process that runs this are not confined."""
    made = []

    def open_engine():
        made.append(Mooncake())
        return made[-1]

    module = SimpleNamespace(TransferEngine=open_engine)
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    monkeypatch.setattr(child, "CONFINING_TIMEOUT_S", 0.02)
    monkeypatch.setattr(child, "_WILDCARDS", ("0.0.0.0",))
    yield made
    for listener in made[0].listeners:
        listener.close()


def test_with_rdma_mooncake_has_one_listener_which_is_confined(engine):
    ChildServer(Open("127.0.0.1", "lo", "rdma", ""))
    (listener,) = engine[0].listeners
    bound = listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
    assert bound.rstrip(b"\0") == b"lo"


def test_listeners_that_are_not_there_are_counted_in_the_reason(engine):
    with pytest.raises(TransferError, match="opened 1 of 2 listeners"):
        ChildServer(Open("127.0.0.1", "lo", "tcp", ""))


def test_without_an_rdma_device_the_reason_names_it_and_what_to_set(engine, monkeypatch):
    monkeypatch.setattr(Mooncake, "status", -1)
    with pytest.raises(TransferError, match=r"among mlx5_0 .*mooncake\.protocol"):
        ChildServer(Open("127.0.0.1", "lo", "rdma", "mlx5_0"))


def test_the_reason_reaches_a_peer_before_it_gives_up():
    assert 0.5 * MooncakeOptions().connect_timeout_s > child.CONFINING_TIMEOUT_S
