"""Connect to a peer and prove the key: what the writer's side of every transport begins with."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

from baton.errors import PeerUnreachableError, TransferError
from baton.transfer.channel import Channel
from baton.transfer.connection import Connection
from baton.transfer.handshake import MAX_BODY_BYTES, DialerHandshake

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from baton.auth.key import ClusterKey
    from baton.transfer.reactor import Reactor

_STARTED: Final = (0, errno.EINPROGRESS)
"""A Unix socket whose listener has a full backlog answers EAGAIN instead: that is unreachable."""


class Dialer:
    """Opens connections of one purpose, up to the moment when both sides have proved themselves."""

    def __init__(
        self, reactor: Reactor, key: ClusterKey, purpose: str, *, timeout_s: float
    ) -> None:
        self._reactor, self._key, self._purpose = reactor, key, purpose
        self._timeout_s = timeout_s

    def dial(
        self,
        sock: socket.socket,
        address: tuple[str, int] | bytes,
        on_proved: Callable[[Connection], None],
        on_failed: Callable[[TransferError], None],
    ) -> Connection:
        """Connect `sock`, which this owns from now on, and prove the key.

        Then `on_proved` gives the connection its next phase; its timer still runs and must be
        settled by that. Or `on_failed` is called, perhaps before this returns when the next phase
        has not begun.

        Raises:
            PeerUnreachableError: known at once; the socket is closed and nothing is called.
        """
        sock.settimeout(0)
        code = sock.connect_ex(address)
        if code not in _STARTED:
            sock.close()
            raise PeerUnreachableError(f"cannot connect: {os.strerror(code)}")
        handshake = DialerHandshake(self._key, self._purpose)

        def prove(channel: Channel) -> None:
            body = channel.receive_body()
            if body is not None:
                connection.send_raw(handshake.reply(body))
                on_proved(connection)

        def fail(error: TransferError) -> None:
            on_failed(PeerUnreachableError(f"cannot reach the peer: {error}"))

        connection = Connection(self._reactor, Channel(sock, MAX_BODY_BYTES), prove, fail)
        connection.fail_after(self._timeout_s, "connecting to the peer")
        connection.send_raw(handshake.opening())
        return connection
