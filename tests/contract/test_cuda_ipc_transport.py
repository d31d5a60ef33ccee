"""`cuda_ipc` against the public contract, over memory of this host in place of a GPU's.

What a GPU does itself is tested where there is one: tests/gpu.
"""

import socket
from typing import ClassVar

import pytest

from baton.errors import TransferError
from baton.testing.transport_contract import (
    MultiArrayContract,
    NetworkReadingContract,
    NetworkTransportContract,
)
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, check_write
from baton.testing.transport_pair import whole_pages
from baton.transfer.interface import (
    GrantQuiescent,
    RemoteAttached,
    RemoteLost,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.transports.cuda_ipc.session import CudaIpcSession
from tests.host_device import HostDevice, allocate_region, build_transport


def fail(*_):
    raise TransferError("the device has failed")


class TestCudaIpc(NetworkTransportContract, NetworkReadingContract, MultiArrayContract):
    kind = "cuda_ipc"
    peer_writes = True
    peer_module: ClassVar[str] = "tests.host_device"

    def make_transport(self, context):
        return build_transport(self.kind, self.options)(context)

    def allocate(self, shapes):
        return allocate_region(shapes)

    def connect_unauthenticated(self, descriptor):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect(b"\0" + descriptor.endpoint.encode())
        return sock

    def test_a_broken_connection_does_not_prove_that_copies_have_ended(self, pair):
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        check_write(pair, remote, grant, [whole_pages([1], [2], PAGE_BYTES)])
        (known,) = pair.writer.transport._remotes.values()
        known._connection.channel.socket.shutdown(socket.SHUT_RDWR)
        pair.pump(lambda: bool(pair.seen(RemoteLost)))
        pair.reader.transport.close_grant(grant)
        pair.poll_for()
        assert not pair.seen(GrantQuiescent)  # the writer's process lives

    @pytest.mark.parametrize(
        ("of", "fails"),
        [(CudaIpcSession, "load_metadata"), (HostDevice, "map"), (HostDevice, "enqueue"),
         (HostDevice, "is_done")],
    )  # fmt: skip
    def test_a_session_that_fails_and_closes_gives_back_all_grants(
        self, pair, monkeypatch, of, fails
    ):
        monkeypatch.setattr(of, fails, fail)
        grants = [pair.open_grant([each]) for each in range(3)]
        self.lose_session(pair, grants[0])
        for grant in grants:
            pair.reader.transport.close_grant(grant)
        pair.pump(lambda: pair.seen(GrantQuiescent) == [GrantQuiescent(each) for each in grants])

    def test_a_grant_that_closed_before_the_session_failed_is_given_back(self, pair, monkeypatch):
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        group = whole_pages(range(NUM_PAGES), range(NUM_PAGES), PAGE_BYTES)
        monkeypatch.setattr(HostDevice, "is_done", lambda *_: False)
        pair.pump(lambda: bool(pair.writer.transport._remotes[remote]._grants._open))
        pair.writer.transport.submit(pair.write(remote, grant, [group]))
        pair.reader.transport.close_grant(grant)
        pair.poll_for()
        assert not pair.seen(GrantQuiescent)
        monkeypatch.setattr(HostDevice, "is_done", fail)
        pair.pump(lambda: pair.seen(GrantQuiescent) == [GrantQuiescent(grant)])
        assert len(pair.seen(WriteFailed)) == len(pair.seen(RemoteLost)) == 1

    def test_a_session_that_fails_and_does_not_close_gives_nothing_back(self, pair, monkeypatch):
        remote, grant, close = pair.attach(), pair.open_grant([0]), HostDevice.close
        monkeypatch.setattr(HostDevice, "enqueue", fail)
        monkeypatch.setattr(HostDevice, "close", lambda device: fail(close(device)))
        pair.writer.transport.submit(pair.write(remote, grant, [whole_pages([1], [0], PAGE_BYTES)]))
        pair.pump(lambda: bool(pair.seen(RemoteLost)))
        pair.reader.transport.close_grant(grant)
        pair.poll_for()
        assert not pair.seen(GrantQuiescent)  # the writer's process lives

    def lose_session(self, pair, grant):
        remote = pair.writer.transport.attach(pair.reader.descriptor)
        pair.pump(lambda: bool(pair.writer_events))
        if RemoteAttached(remote) in pair.writer_events:
            pair.writer.transport.submit(
                pair.write(remote, grant, [whole_pages([1], [0], PAGE_BYTES)])
            )
        pair.pump(lambda: bool(pair.seen(RemoteLost)))

    def test_a_grant_is_not_quiescent_while_copies_are_under_way(self, pair, monkeypatch):
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        group = whole_pages(range(NUM_PAGES), range(NUM_PAGES), PAGE_BYTES)
        check_write(pair, remote, grant, [group])
        monkeypatch.setattr(HostDevice, "is_done", lambda *_: False)
        pair.writer.transport.submit(pair.write(remote, grant, [group]))
        pair.reader.transport.close_grant(grant)
        pair.poll_for()
        assert not pair.seen(GrantQuiescent)
        monkeypatch.undo()
        pair.pump(lambda: pair.seen(GrantQuiescent) == [GrantQuiescent(grant)])
        assert len(pair.seen(WriteCompleted)) == 2
