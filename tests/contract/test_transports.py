"""Every installed transport against the public contract."""

import importlib.util
import os
import resource
import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.errors import TransferError
from baton.ids import new_ticket_id
from baton.testing.transport_contract import (
    LateNotificationContract,
    MultiArrayContract,
    NetworkReadingContract,
    NetworkTransportContract,
    NetworkViewContract,
    ReaderTrackingContract,
)
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, TransportKit, check_write
from baton.testing.transport_contract.peers import ended
from baton.testing.transport_contract.writing import ShownPages
from baton.testing.transport_pair import TransportPair, whole_pages
from baton.transfer.interface import (
    TRANSPORTS,
    GrantQuiescent,
    RemoteAttached,
    RemoteLost,
    WriteFailed,
)
from tests.descriptors import no_descriptors


class OneConnection(TransportKit):
    """A transport whose owner admits one peer."""

    def __init__(self, kind, options):
        self.kind, self.options = kind, {**options, "max_connections": 1}


def start_one_connection(kind, folder):
    """An attached pair, its remote, and a second writer for the same owner."""
    if kind == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("NIXL is not installed")
    kit = OneConnection(kind, {"directory": str(folder)} if kind == "file" else {})
    pair = TransportPair.of(kit.make_side(), kit.make_side())
    return pair, pair.attach(), TransportPair.of(kit.make_side(), pair.reader)


def find_refusal(refused):
    """Why the owner does not admit it."""
    refused.writer.transport.attach(refused.reader.descriptor)
    refused.pump(lambda: bool(refused.seen(RemoteLost)))
    (lost,) = refused.seen(RemoteLost)
    return str(lost.error)


@pytest.mark.parametrize("kind", ["shared", "file", "nixl"])
def test_a_peer_beyond_the_bound_is_refused_with_the_reason_until_there_is_room(
    kind, tmp_path, caplog
):
    first, remote, second = start_one_connection(kind, tmp_path)
    reason = f"1 connections of {kind} are open, which is the most ({kind}.max_connections)"
    assert find_refusal(second) == f"the peer refused to attach: {reason}"
    ours = [each.message for each in caplog.records if each.name.startswith("baton")]
    assert ours == [f"refused a peer: {reason}"]  # NIXL logs, too, in a process's first use
    first.writer.transport.detach(remote)
    first.pump(lambda: not first.reader.transport._listener.num_peers)
    second.attach()
    first.writer.close()
    second.close()


def test_a_peer_that_is_lost_and_may_still_write_counts_as_one_that_is_connected(tmp_path):
    first, remote, second = start_one_connection("shared", tmp_path)
    first.open_grant([1])
    first.poll_for()
    first.writer.transport._remotes[remote]._connection.channel.socket.shutdown(socket.SHUT_RDWR)
    first.pump(lambda: bool(first.seen(RemoteLost)))
    assert "shared.max_connections" in find_refusal(second)
    first.writer.close()
    second.close()


def test_a_peer_that_cannot_be_served_is_refused_with_the_reason(tmp_path, caplog, monkeypatch):
    first, remote, second = start_one_connection("shared", tmp_path)
    first.writer.transport.detach(remote)
    first.pump(lambda: not first.reader.transport._listener.num_peers)

    def fail(*_):
        raise TransferError("no descriptor is left")

    monkeypatch.setattr(first.reader.transport, "_make_writer", fail)
    assert find_refusal(second) == "the peer refused to attach: no descriptor is left"
    assert caplog.messages == ["refused a peer: no descriptor is left"]
    first.writer.close()
    second.close()


class TestShared(
    NetworkTransportContract,
    NetworkReadingContract,
    NetworkViewContract,
    MultiArrayContract,
    LateNotificationContract,
    ReaderTrackingContract,
):
    kind = "shared"
    peer_writes = True

    def connect_unauthenticated(self, descriptor):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect(b"\0" + descriptor.endpoint.encode())
        return sock

    def test_of_two_that_attach_at_once_neither_claims_to_be_the_only_one(self, pair):
        remotes = [pair.writer.transport.attach(pair.reader.descriptor) for _ in range(2)]
        pair.pump(lambda: all(RemoteAttached(remote) in pair.writer_events for remote in remotes))
        grant = pair.open_grant([1, 2])
        for remote in remotes:
            check_write(pair, remote, grant, [whole_pages([1], [2], PAGE_BYTES)])
        pair.reader.transport.close_grant(grant)
        pair.pump(lambda: bool(pair.seen(GrantQuiescent)))
        assert not pair.seen(RemoteLost)

    @pytest.mark.parametrize("is_view_kept", [False, True])
    def test_a_writer_that_attaches_again_has_let_go_of_the_old_mapping(self, pair, is_view_kept):
        remote, grant = pair.attach(), pair.open_grant([1, 2])
        check_write(pair, remote, grant, [whole_pages([1], [2], PAGE_BYTES)])
        (mapped,) = pair.writer.transport._remotes.values()
        kept = mapped._pages._own.views[0] if is_view_kept else None
        mapped._connection.channel.socket.shutdown(socket.SHUT_RDWR)
        pair.pump(lambda: bool(pair.seen(RemoteLost)))
        pair.reader.transport.close_grant(grant)
        pair.poll_for()
        assert not pair.seen(GrantQuiescent)  # a broken connection proves nothing
        pair.writer.transport.detach(remote)
        pair.attach()
        pair.poll_for()
        assert pair.seen(GrantQuiescent) == ([] if is_view_kept else [GrantQuiescent(grant)])
        del kept

    def test_a_view_that_is_kept_does_not_hold_back_that_proof(self, pair):
        remote, grant = pair.attach(), pair.open_grant([1, 2])
        kept = pair.writer.transport.view(remote, 0)
        (mapped,) = pair.writer.transport._remotes.values()
        mapped._connection.channel.socket.shutdown(socket.SHUT_RDWR)
        pair.pump(lambda: bool(pair.seen(RemoteLost)))
        pair.reader.transport.close_grant(grant)
        pair.writer.transport.detach(remote)
        pair.attach()
        pair.pump(lambda: pair.seen(GrantQuiescent) == [GrantQuiescent(grant)])
        assert (kept == pair.reader.pages()).all()
        del kept  # the loss' traceback keeps this frame

    def test_writes_that_wait_for_a_grant_fail_if_the_first_finds_the_peer_gone(self, pair):
        remote, grant = pair.attach(), new_ticket_id()
        groups = [whole_pages([1], [1], PAGE_BYTES)]
        write = pair.write(remote, grant, groups)
        transfers = [pair.writer.transport.submit(write) for _ in range(3)]
        pair.reader.transport.close()
        pair.writer.transport.admit_writes(remote, grant, np.arange(NUM_PAGES))
        pair.pump(lambda: len(ended(pair)) == len(transfers))
        assert ended(pair) == transfers
        assert [type(event) for event in pair.writer_events[1:]] == [RemoteLost] + [WriteFailed] * 3

    def test_without_a_descriptor_left_no_reader_is_watched(self, pair):
        pair.attach()
        with no_descriptors():
            assert pair.reader.transport.open_reader(pair.writer.epoch) is None
        os.close(pair.reader.transport.open_reader(pair.writer.epoch))

    def test_the_kernel_itself_lets_nobody_write_through_a_view(self, pair):
        seen = pair.writer.transport.view(pair.attach(), 0)
        for line in Path("/proc/self/maps").read_text().splitlines():
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            if low <= seen.ctypes.data < high:
                assert line.split()[1] == "r--s"
                break
        else:
            pytest.fail("the view is not mapped")

    def test_pages_that_were_lent_are_prefaulted_when_idle(self):
        shapes = [(2048, PAGE_BYTES)]
        pair = TransportPair.of(self.make_side(shapes), self.make_side(shapes))
        seen = pair.writer.transport.view(pair.attach(), 0)
        (mapped,) = pair.writer.transport._remotes.values()
        while mapped.prefault():
            pass
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seen[:, 0].sum()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 64
        pair.close()
        del seen


class TestTcp(NetworkTransportContract, NetworkReadingContract, MultiArrayContract):
    kind = "tcp"
    peer_writes = False

    def connect_unauthenticated(self, descriptor):
        host, port = descriptor.endpoint.split(":")
        return socket.create_connection((host, int(port)), timeout=5)

    def test_a_notification_made_in_the_copy_is_refused_where_others_copy(self, pair):
        late = ShownPages(pair, {1: 1})
        groups = [whole_pages([1], [1], PAGE_BYTES)]
        write = pair.write(pair.attach(), pair.open_grant([1]), groups)
        with pytest.raises(TransferError, match="tcp"):
            pair.writer.transport.submit(msgspec.structs.replace(write, late_notification=late))
        assert (late.shown, late.num_finished) == ([], 0)


def test_every_installed_transport_runs_the_contract():
    """Those that need a library have a module of their own, which is skipped without it."""
    tested = {suite.kind for suite in NetworkTransportContract.__subclasses__()}
    modules = {path.name for path in Path(__file__).parent.glob("test_*_transport.py")}
    elsewhere = {kind for kind in TRANSPORTS.kinds() if f"test_{kind}_transport.py" in modules}
    assert tested | elsewhere >= set(TRANSPORTS.kinds())
