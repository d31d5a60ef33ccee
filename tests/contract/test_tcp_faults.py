"""`tcp` and its links: striped, stopped, slowed and cut in mid-transfer."""

import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from baton.errors import PeerLostError, PeerUnreachableError
from baton.ids import new_ticket_id
from baton.kv.copies import PageCopies
from baton.net.connection import count_moved_bytes
from baton.testing import network_namespaces
from baton.testing.network_namespaces import NoNamespaceError
from baton.testing.transport_contract import (
    MultiArrayContract,
    NetworkReadingContract,
    NetworkTransportContract,
)
from baton.testing.transport_contract.kit import PAGE_BYTES, TransportKit
from baton.testing.transport_pair import TransportPair, whole_pages
from baton.testing.transport_peer import OWNED_BYTE
from baton.transfer.interface import (
    PageRead,
    PageWrite,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteAttached,
    RemoteLost,
    WriteCompleted,
    WriteFailed,
)
from tests.contract.receiver_on_a_host import Task
from tests.forked_module import ForkingSubprocess

STALL_TIMEOUT_S = 1.0
SHAPES = ((512, 65_536),)
"""32 MiB: more than all sockets on the way hold."""
RATE_BYTES = 16_000_000


class TestStripedTcp(NetworkTransportContract, NetworkReadingContract, MultiArrayContract):
    """Three streams, and nearly every write of the suite spread over them."""

    kind = "tcp"
    options: ClassVar = {"streams": 3, "stripe_bytes": 65_536}
    peer_writes = False

    def connect_unauthenticated(self, descriptor):
        host, port = descriptor.endpoint.split(":")
        return socket.create_connection((host, int(port)), timeout=5)

    def test_a_large_write_is_spread_over_all_streams(self, pair):
        remote, grant = pair.attach(), pair.open_grant(range(64))
        streams = pair.writer.transport._remotes[remote]._streams
        before = [stream.connection.channel.num_sent_bytes for stream in streams]
        groups = [whole_pages(range(64), range(64), 8192)]
        pair.writer.transport.submit(pair.write(remote, grant, groups))
        pair.pump(lambda: bool(pair.seen(WriteCompleted)))
        after = [stream.connection.channel.num_sent_bytes for stream in streams]
        for sent_before, sent_after in zip(before, after, strict=True):
            assert 64 * 8192 // 3 - 8192 <= sent_after - sent_before <= 64 * 8192 // 3 + 9000


class FewConnections(TransportKit):
    kind = "tcp"
    options: ClassVar = {"streams": 2, "max_connections": 3}


def test_a_peer_beyond_the_bound_is_refused_with_the_reason_until_there_is_room():
    kit = FewConnections()
    reader = kit.make_side()
    first, second = (TransportPair.of(kit.make_side(), reader) for _ in range(2))
    remote = first.attach()
    second.writer.transport.attach(reader.descriptor)
    second.pump(lambda: bool(second.seen(RemoteLost)))
    (lost,) = second.seen(RemoteLost)
    assert "3 connections of tcp are open" in str(lost.error)
    first.poll_for()
    assert first.seen(RemoteLost) == []
    first.writer.transport.detach(remote)
    first.pump(lambda: not reader.transport._inbound)
    second.attach()
    first.writer.close()
    second.close()


class TcpKit(TransportKit):
    kind = "tcp"
    options: ClassVar = {"stall_timeout_s": STALL_TIMEOUT_S, "connect_timeout_s": STALL_TIMEOUT_S}


class Far:
    """A receiver in a process of its own, and this side's transport that attached its region."""

    def __init__(self, *, host="127.0.0.1", namespace=None):
        self.kit = TcpKit()
        self.side = self.kit.make_side(SHAPES)
        self.side.fill(seed=1)
        self.grant, self.events, self.sockets_before = new_ticket_id(), [], []
        task = Task(
            "tcp",
            dict(self.kit.options),
            self.kit.credentials.key.secret.hex(),
            host,
            SHAPES,
            self.side.epoch,
            self.grant,
            namespace,
        )
        command = [sys.executable, "-m", "tests.contract.receiver_on_a_host"]
        self.process = ForkingSubprocess.Popen(
            [*command, msgspec.json.encode(task).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.descriptor = msgspec.json.decode(self.process.stdout.readline(), type=RegionDescriptor)

    def __enter__(self):
        self.remote = self.side.transport.attach(self.descriptor)
        self.wait_for(RemoteAttached)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.side.close()

    def post(self, direction, num_pages=512):
        pages = range(num_pages)
        copies = PageCopies(0, (whole_pages(pages, pages, 65_536),))
        handle = self.side.region.handle
        if direction == "write":
            write = PageWrite(self.remote, self.grant, handle, copies, b"n")
            return self.side.transport.submit(write)
        return self.side.transport.read(PageRead(self.remote, handle, copies))

    def wait_for(self, kind, timeout_s=30.0):
        """The first event of this kind, and how long it took."""
        begin = time.monotonic()
        while not (found := [event for event in self.events if isinstance(event, kind)]):
            assert time.monotonic() < begin + timeout_s, self.events
            self.events += self.side.transport.poll()
            time.sleep(0.001)
        return found[0], time.monotonic() - begin

    def poll_for(self, duration_s):
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            self.events += self.side.transport.poll()
            time.sleep(0.001)

    def check_lost(self, transfer, direction):
        """The transfer fails by a typed error before long, and nothing is held any more."""
        failed = WriteFailed if direction == "write" else ReadFailed
        event, elapsed_s = self.wait_for(failed)
        assert event.transfer == transfer
        assert STALL_TIMEOUT_S * 0.5 <= elapsed_s <= 2 * STALL_TIMEOUT_S + 8.0
        assert [type(each) for each in self.events] == [RemoteAttached, RemoteLost, failed]
        assert isinstance(event.error, PeerLostError | PeerUnreachableError)
        self.post(direction)
        self.poll_for(0.02)
        assert [type(each) for each in self.events[3:]] == [failed]
        self.side.transport.detach(self.remote)
        assert list_sockets() == self.sockets_before


def list_sockets():
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found.append(target)
    return sorted(found)


def test_what_was_read_ahead_is_in_no_page_of_a_read_that_failed():
    """The owner answers some reads and leaves, which a request for the next ones shows."""
    kit = TcpKit()
    pair = TransportPair.of(kit.make_side(), kit.make_side())
    pair.reader.fill(seed=1)
    remote = pair.attach()
    pages = {}
    for page in range(12):
        copies = [whole_pages([page], [page], PAGE_BYTES)]
        pages[pair.writer.read(pair.read(remote, copies))] = page
    for _ in range(10):
        pair.reader.transport.poll()
    pair.reader.transport.close()
    pair.pump(lambda: len(pair.seen(ReadCompleted) + pair.seen(ReadFailed)) >= len(pages))
    ended = [event.transfer for event in pair.seen(ReadCompleted) + pair.seen(ReadFailed)]
    assert sorted(ended) == list(pages)
    assert pair.seen(ReadCompleted)
    for failed in pair.seen(ReadFailed):
        assert not pair.writer.pages()[pages[failed.transfer]].any()
    pair.close()


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_peer_that_is_stopped_in_mid_transfer_is_lost_in_time(direction):
    with Far() as far:
        far.sockets_before = [s for s in list_sockets() if s not in sockets_of(far)]
        if direction == "write":  # it goes on until the sockets between the two are full
            stop(far.process)
            transfer = far.post(direction)
        else:  # the same, the other way round: nobody takes what comes
            transfer = far.post(direction)
            time.sleep(0.2)
            stop(far.process)
        far.poll_for(0.05)
        assert far.events == [RemoteAttached(far.remote)]
        if direction == "read":
            assert (far.side.pages() == OWNED_BYTE).all(axis=1).any()  # some of it has come
        else:
            assert any(each.connection.channel.has_unsent for each in streams_of(far))
            assert all(
                count_moved_bytes(each.connection.channel) > 65_536 for each in streams_of(far)
            )
        far.check_lost(transfer, direction)


def stop(process):
    process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


def streams_of(far):
    return far.side.transport._remotes[far.remote]._streams


def sockets_of(far):
    fds = [each.connection.channel.socket.fileno() for each in streams_of(far)]
    return {str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in fds}


@contextmanager
def made_host():
    try:
        with network_namespaces.far_host() as far:
            yield far
    except NoNamespaceError as exc:
        pytest.skip(str(exc))


@pytest.fixture(scope="module")
def standing_host():
    """To lay a cable takes two seconds."""
    with made_host() as far:
        yield far


@pytest.fixture
def far_host(standing_host):
    """A host at the end of a slow cable: its name, its address and this end of the cable."""
    with standing_host.limited(RATE_BYTES):
        yield standing_host.name, standing_host.address, standing_host.link


@pytest.fixture
def host_to_cut():
    """As `far_host`, for a test that cuts the cable."""
    with made_host() as far, far.limited(RATE_BYTES):
        yield far.name, far.address, far.link


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_slow_link_is_no_lost_peer(far_host, direction):
    """32 MiB take longer than the stall timeout; they go on moving, so nobody is given up."""
    name, address, _ = far_host
    with Far(host=address, namespace=name) as far:
        transfer = far.post(direction)
        done = WriteCompleted if direction == "write" else ReadCompleted
        event, elapsed_s = far.wait_for((done, RemoteLost))
        num_bytes = SHAPES[0][0] * SHAPES[0][1]
        assert event == done(transfer, num_bytes)
        assert elapsed_s > max(0.8 * num_bytes / RATE_BYTES, 1.5 * STALL_TIMEOUT_S)
        if direction == "read":
            assert (far.side.pages() == OWNED_BYTE).all()


def test_what_drains_from_this_hosts_own_buffers_is_moving(far_host):
    """3 MiB that the kernel takes at once, and takes three seconds to deliver."""
    name, address, link = far_host
    with Far(host=address, namespace=name) as far:
        limits = ["rate", f"{RATE_BYTES // 2}bit", "burst", "64kb", "latency", "1s"]
        network_namespaces.run("tc", "qdisc", "change", "dev", link, "root", "tbf", *limits)
        transfer = far.post("write", num_pages=48)
        far.poll_for(0.3)
        channels = [each.connection.channel for each in streams_of(far)]
        assert not any(channel.has_unsent for channel in channels)
        event, elapsed_s = far.wait_for((WriteCompleted, RemoteLost))
        assert event == WriteCompleted(transfer, 3 << 20)
        assert elapsed_s > 2 * STALL_TIMEOUT_S


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_link_that_is_cut_in_mid_transfer_loses_the_peer_in_time(host_to_cut, direction):
    name, address, link = host_to_cut
    with Far(host=address, namespace=name) as far:
        far.sockets_before = [s for s in list_sockets() if s not in sockets_of(far)]
        transfer = far.post(direction)
        far.poll_for(0.3)
        assert far.events == [RemoteAttached(far.remote)]  # at this rate it takes two seconds
        if direction == "read":
            assert (far.side.pages()[:8] == OWNED_BYTE).all()  # some of it has come
        network_namespaces.run("ip", "link", "set", link, "down")
        far.check_lost(transfer, direction)
        assert far.process.poll() is None


def test_a_cut_link_is_noticed_while_nothing_moves(host_to_cut):
    name, address, link = host_to_cut
    with Far(host=address, namespace=name) as far:
        network_namespaces.run("ip", "link", "set", link, "down")
        event, elapsed_s = far.wait_for(RemoteLost)
        assert isinstance(event.error, PeerLostError | PeerUnreachableError)
        assert elapsed_s < 10 * STALL_TIMEOUT_S
