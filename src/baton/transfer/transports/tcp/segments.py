"""What the kernel sent over this transport's connections: segments, and those sent again.

Read from `TCP_INFO` of each socket, as Linux has it (include/uapi/linux/tcp.h). The struct only
grows at its end, so that the length which the kernel returns shows whether it has a field. Whoever
sends the bytes sees what was lost: for a write the end that dialed, for a read the end that
listens. So both ends' connections are counted, each for what it sends.
"""

from __future__ import annotations

import socket
import struct
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.telemetry.transfer_report import SegmentCounts

if TYPE_CHECKING:
    from baton.ids import Epoch
    from baton.net.connection import Connection

_FIELDS: Final = struct.Struct("=100xI52xI40xQ8xI")
"""tcpi_total_retrans, tcpi_data_segs_out, tcpi_bytes_sent, tcpi_dsack_dups: since Linux 4.19."""
_MAX_INFO_BYTES: Final = 512
_COUNTER_BITS: Final = 32
"""Of all but the bytes: 4 billion segments are 6 TB, which one connection may well carry."""
_NONE: Final = SegmentCounts()


def read_segment_counts(sock: socket.socket) -> SegmentCounts | None:
    """What was sent over a TCP socket; None where the kernel does not count it, or not so.

    Segments are modulo 2^32.
    """
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MAX_INFO_BYTES)
    except OSError:
        return None
    return decode_segment_counts(info)


def decode_segment_counts(info: bytes) -> SegmentCounts | None:
    """Of a `tcp_info`; None where it ends before the last field."""
    if len(info) < _FIELDS.size:
        return None
    num_retransmitted, num, num_bytes, num_duplicates = _FIELDS.unpack_from(info)
    return SegmentCounts(num, num_retransmitted, num_duplicates, num_bytes)


def count_growth(now: SegmentCounts, before: SegmentCounts) -> SegmentCounts:
    """What was sent over one socket in between."""

    def grown(late: int, early: int) -> int:
        return (late - early) % (1 << _COUNTER_BITS)

    return SegmentCounts(
        grown(now.num, before.num),
        grown(now.num_retransmitted, before.num_retransmitted),
        grown(now.num_duplicates, before.num_duplicates),
        now.num_bytes - before.num_bytes,
    )


class SegmentMeter:
    """What a transport's connections sent to each peer since it was last taken.

    A connection is read when that is asked for, and once more before its socket is closed. Owner:
    the transport's thread.
    """

    def __init__(self) -> None:
        self._open: dict[Connection, tuple[Epoch, SegmentCounts]] = {}
        self._untaken: dict[Epoch, SegmentCounts] = {}
        self._can_read = False

    def check(self, sock: socket.socket) -> None:
        """Learn from any TCP socket whether the kernel counts segments."""
        self._can_read = read_segment_counts(sock) is not None

    def add(self, connection: Connection, peer: Epoch) -> None:
        """Count a connection to a peer from its start, until it is closed."""
        self._open[connection] = peer, _NONE
        connection.channel.before_close = partial(self._remove, connection)

    def take(self) -> dict[Epoch, SegmentCounts] | None:
        """See `CountsSegments`."""
        for connection in self._open:
            self._read(connection)
        untaken, self._untaken = self._untaken, {}
        return untaken if self._can_read else None

    def _read(self, connection: Connection) -> None:
        counts = read_segment_counts(connection.channel.socket)
        if counts is None:
            return
        peer, before = self._open[connection]
        if counts != before:
            self._open[connection] = peer, counts
            grown = count_growth(counts, before)
            self._untaken[peer] = self._untaken.get(peer, _NONE).plus(grown)

    def _remove(self, connection: Connection) -> None:
        self._read(connection)
        del self._open[connection]
