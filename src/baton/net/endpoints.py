"""Connections between peers that have proved the cluster key: dialed, or accepted."""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

from baton.errors import PeerUnreachableError, TransferError
from baton.net.channel import Channel
from baton.net.connection import Connection
from baton.net.framing import MAX_HANDSHAKE_BYTES, DialerHandshake, ListenerHandshake

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.auth.key import ClusterKey
    from baton.net.connection import EventReactor

_log = logging.getLogger(__name__)

BACKLOG: Final = 128
MAX_CONNECTIONS: Final = 256
MAX_UNPROVED: Final = 64
"""A limit of its own: unauthenticated peers cannot use up the connections of authenticated ones."""
PROOF_TIMEOUT_S: Final = 2.0
ATTACH_TIMEOUT_S: Final = 5.0
_STARTED: Final = (0, errno.EINPROGRESS)
"""A Unix socket whose listener has a full backlog answers EAGAIN instead: that is unreachable."""
_SO_PEERPIDFD: Final = 77
"""Linux 6.5 and later; the `socket` module of Python 3.11 has no name for it."""
_CREDENTIALS: Final = struct.Struct("3i")


class Dialer:
    """Opens connections of one purpose, until both sides are authenticated."""

    def __init__(
        self, reactor: EventReactor[Any], key: ClusterKey, purpose: str, *, timeout_s: float
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

        Then `on_proved` sets the connection's next handlers; the timer still runs, so that it must
        cancel the deadline. Or `on_failed` is called, perhaps before this returns.

        Raises:
            PeerUnreachableError: at once; the socket is closed and nothing is called.
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

        connection = Connection(self._reactor, Channel(sock, MAX_HANDSHAKE_BYTES), prove, fail)
        connection.fail_after(self._timeout_s, "connecting to the peer")
        connection.send_raw(handshake.opening())
        return connection


class Listener:
    """One listening socket, with bounds on number and time of unauthenticated connections.

    `on_peer(connection)` is called for each peer that proved the key. It sets the connection's next
    handlers and cancels its deadline; call `forget` when the connection is over.
    """

    def __init__(
        self,
        sock: socket.socket,
        reactor: EventReactor[Any],
        key: ClusterKey,
        purpose: str,
        *,
        on_peer: Callable[[Connection], None],
    ) -> None:
        self._socket, self._reactor = sock, reactor
        self._key, self._purpose, self._on_peer = key, purpose, on_peer
        self._unproved: set[Connection] = set()
        self._peers: set[Connection] = set()
        sock.settimeout(0)
        sock.listen(BACKLOG)
        reactor.watch(sock.fileno(), self._accept)

    def forget(self, connection: Connection) -> None:
        """A peer's connection is over: it counts no longer."""
        self._peers.discard(connection)

    def close(self) -> None:
        """Close the listener and all its connections."""
        self._reactor.unwatch(self._socket.fileno())
        self._socket.close()
        for connection in self._unproved | self._peers:
            connection.close()
        self._unproved.clear()
        self._peers.clear()

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError as exc:  # gone again, or no descriptors left: serve the others
            _log.warning("could not accept a transfer connection: %s", exc)
            return
        if len(self._unproved) >= MAX_UNPROVED or len(self._peers) >= MAX_CONNECTIONS:
            _log.warning("refused a transfer connection: too many are open")
            sock.close()
            return
        sock.settimeout(0)
        self._challenge(sock)

    def _challenge(self, sock: socket.socket) -> None:
        handshake = ListenerHandshake(self._key, self._purpose)

        def check(channel: Channel) -> None:
            body = channel.receive_body()
            if body is None:
                return
            reply = handshake.reply(body)
            if not handshake.done:
                connection.send_raw(reply)
                return
            self._unproved.discard(connection)
            self._peers.add(connection)
            connection.fail_after(ATTACH_TIMEOUT_S, "attaching")
            self._on_peer(connection)

        def lose(_: TransferError) -> None:
            self._unproved.discard(connection)

        connection = Connection(self._reactor, Channel(sock, MAX_HANDSHAKE_BYTES), check, lose)
        connection.fail_after(PROOF_TIMEOUT_S, "a peer's proof of the key")
        self._unproved.add(connection)


def open_peer_process(sock: socket.socket) -> int | None:
    """A pidfd that becomes readable when the process that connected has died.

    None where the kernel gives none (a peer in a PID namespace that is not visible here): then only
    the writer itself can report that it stopped.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return os.pidfd_open(_CREDENTIALS.unpack(credentials)[0])
    except (OSError, ValueError) as exc:
        _log.warning("cannot watch a writer's process: its exit will go unnoticed: %s", exc)
        return None
