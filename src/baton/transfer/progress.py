"""Whether the other end of a TCP connection still takes part."""

from __future__ import annotations

import fcntl
import sys
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.transfer.channel import Channel


def count_moved_bytes(channel: Channel) -> int:
    """A number that changes while the peer's kernel takes bytes, or the peer sends some.

    What the own kernel holds and has not delivered does not count: a socket takes megabytes for a
    peer that is stopped. What it holds and nobody has read yet does.
    """
    num_unsent, num_unread = (
        _ask(channel.socket.fileno(), question) for question in (termios.TIOCOUTQ, termios.FIONREAD)
    )
    return channel.num_sent_bytes - num_unsent + channel.num_received_bytes + num_unread


def _ask(fd: int, question: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, question, bytes(4)), sys.byteorder)
