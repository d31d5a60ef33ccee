"""`tcp` counts what its kernel sent to each peer: once, at the sending end, and what was lost."""

import socket
import struct
import threading

import pytest

from baton.telemetry.transfer_report import SegmentCounts
from baton.testing.network_namespaces import NoNamespaceError, bridged_hosts
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, TransportKit
from baton.testing.transport_contract.peers import ALL_PAGES
from baton.transfer.interface import CountsSegments, ReadCompleted, WriteCompleted
from baton.transfer.transports.tcp.segments import (
    count_growth,
    decode_segment_counts,
    read_segment_counts,
)

KV_BYTES = NUM_PAGES * PAGE_BYTES
MESSAGE_BYTES = 20_000
"""More than handshakes and answers take, and far less than the pages."""
RATE_BYTES, QUEUE_BYTES = 25_000_000, 64_000
SENT_BYTES = 12_000_000


def taken(side):
    assert isinstance(side.transport, CountsSegments)
    counts = side.transport.take_segments()
    assert counts is not None, "this kernel counts no segments"
    return counts


class TestCounting(TransportKit):
    kind = "tcp"

    def write(self, pair, remote):
        num_before = len(pair.seen(WriteCompleted))
        grant = pair.open_grant(range(NUM_PAGES))
        pair.writer.transport.submit(pair.write(remote, grant, ALL_PAGES))
        pair.pump(lambda: len(pair.seen(WriteCompleted)) > num_before)

    def test_a_write_counts_where_it_is_sent_from_and_once(self, pair):
        remote = pair.attach()
        for _ in range(10):  # on a busy machine segments are sent twice, even here
            self.write(pair, remote)
            (sent,), (answered,) = taken(pair.writer).items(), taken(pair.reader).items()
            assert (sent[0], answered[0]) == (pair.reader.epoch, pair.writer.epoch)
            if not sent[1].num_retransmitted:
                break
        assert sent[1].num_bytes > KV_BYTES
        assert sent[1].num_bytes < 2 * KV_BYTES
        assert 0 < answered[1].num_bytes < MESSAGE_BYTES
        assert not taken(pair.writer), "nothing was sent since"

    def test_a_read_counts_where_the_pages_lie(self, pair):
        remote = pair.attach()
        pair.writer.read(pair.read(remote, ALL_PAGES))
        pair.pump(lambda: bool(pair.seen(ReadCompleted)))
        assert taken(pair.reader)[pair.writer.epoch].num_bytes > KV_BYTES
        assert taken(pair.writer)[pair.reader.epoch].num_bytes < MESSAGE_BYTES

    def test_closed_connections_are_not_lost_and_not_counted_twice(self, pair):
        total = SegmentCounts()
        for _ in range(3):
            remote = pair.attach()
            self.write(pair, remote)
            total = total.plus(taken(pair.writer)[pair.reader.epoch])
            self.write(pair, remote)
            pair.writer.transport.detach(remote)
            total = total.plus(taken(pair.writer)[pair.reader.epoch])
            assert not taken(pair.writer)
        resent = 65_536 * total.num_retransmitted
        assert 6 * KV_BYTES < total.num_bytes < 6 * KV_BYTES + 6 * MESSAGE_BYTES + resent
        pair.pump(lambda: not pair.reader.transport._inbound)
        assert taken(pair.reader)[pair.writer.epoch].num_bytes < 6 * MESSAGE_BYTES
        assert not pair.writer.transport._meter._open
        assert not pair.reader.transport._meter._open

    def test_a_kernel_that_counts_nothing_known_reports_nothing(self, monkeypatch):
        monkeypatch.setattr(
            "baton.transfer.transports.tcp.segments.read_segment_counts", lambda _: None
        )
        side = self.make_side()
        assert side.transport.take_segments() is None
        side.close()


def test_fields_are_read_where_the_kernel_has_them_and_a_short_answer_is_none():
    info = bytearray(256)
    struct.pack_into("=I", info, 100, 7)
    struct.pack_into("=I", info, 156, 4000)
    struct.pack_into("=QQI", info, 200, 5_000_000_000, 9000, 3)
    assert decode_segment_counts(bytes(info)) == SegmentCounts(4000, 7, 3, 5_000_000_000)
    assert decode_segment_counts(bytes(info[:220])) is not None
    assert decode_segment_counts(bytes(info[:219])) is None, "Linux before 4.19"


def test_counters_of_32_bits_go_on_from_0():
    before = SegmentCounts((1 << 32) - 10, 5, 2, 6_000_000_000_000)
    after = SegmentCounts(90, 8, 2, 6_000_000_150_000)
    assert count_growth(after, before) == SegmentCounts(100, 3, 0, 150_000)


def test_a_socket_that_is_not_tcp_or_closed_has_no_counts():
    local, other = socket.socketpair()
    with local, other:
        assert read_segment_counts(local) is None
    assert read_segment_counts(local) is None


@pytest.mark.parametrize("congestion", ["cubic", "bbr"])
def test_lost_segments_are_the_packets_that_a_switch_dropped(congestion):
    """Its port has a tenth of the cable's rate and a short queue: it counts what it drops."""
    try:
        with bridged_hosts(2) as (sender, receiver):
            sender.send_single_packets()
            with receiver.behind_a_full_port(RATE_BYTES, QUEUE_BYTES):
                counts = send_over(sender, receiver, congestion)
                num_dropped = receiver.count_port_drops()
    except NoNamespaceError as exc:
        pytest.skip(str(exc))
    assert num_dropped >= 20, "the port dropped too few: the fault did not happen"
    assert counts.num_lost == pytest.approx(num_dropped, rel=0.1, abs=5)
    assert counts.num_bytes >= SENT_BYTES


def send_over(sender, receiver, congestion):
    """What the sender's kernel counted, once all has arrived."""
    with (
        receiver.open_socket(socket.SOCK_STREAM) as listener,
        sender.open_socket(socket.SOCK_STREAM) as near,
    ):
        listener.bind((receiver.address, 0))
        listener.listen()
        try:
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        except OSError:
            pytest.skip(f"this kernel has no {congestion}")
        near.settimeout(20)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        with far:
            far.settimeout(20)
            reading = threading.Thread(target=read_all, args=(far,))
            reading.start()
            near.sendall(bytes(SENT_BYTES))
            near.shutdown(socket.SHUT_WR)
            reading.join(20)
            assert not reading.is_alive()
            return read_segment_counts(near)


def read_all(sock):
    left = SENT_BYTES
    while left:
        left -= len(sock.recv(1 << 16))
    sock.send(b".")
