"""Connections between peers that have proved the cluster key: dialed, or accepted."""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

from baton.clock import MachineClock
from baton.errors import PeerLostError, PeerUnreachableError, TransferError
from baton.net.channel import Channel, needs_sealing
from baton.net.connection import Connection, EventReactor
from baton.net.framing import MAX_HANDSHAKE_BYTES, DialerHandshake, ListenerHandshake
from baton.telemetry.log_limit import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.auth.credentials import Credentials

_log = logging.getLogger(__name__)

BACKLOG: Final = 128
MAX_CONNECTIONS: Final = 256
MAX_UNPROVED: Final = 128
"""Places of their own, of which a new one takes the oldest's: they take none of proved peers'."""
PROOF_TIMEOUT_S: Final = 2.0
ACCEPT_PAUSE_S: Final = 0.5
"""Where no descriptor is left: a listener that stays readable would spin."""
REVOCATION_INTERVAL_S: Final = 1.0
OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
ATTACH_TIMEOUT_S: Final = 5.0
_STARTED: Final = (0, errno.EINPROGRESS)
"""A Unix socket whose listener has a full backlog answers EAGAIN instead: that is unreachable."""
_SO_PEERPIDFD: Final = 77
"""Linux 6.5 and later; the `socket` module of Python 3.11 has no name for it."""
_CREDENTIALS: Final = struct.Struct("3i")


class Dialer:
    """Opens connections of one purpose, until both sides are authenticated."""

    def __init__(
        self,
        reactor: EventReactor[Any],
        credentials: Credentials,
        purpose: str,
        *,
        timeout_s: float,
    ) -> None:
        self._reactor, self._credentials, self._purpose = reactor, credentials, purpose
        self._timeout_s = timeout_s

    def dial(
        self,
        sock: socket.socket,
        address: tuple[str, int] | bytes,
        on_proved: Callable[[Connection], None],
        on_failed: Callable[[TransferError], None],
    ) -> Connection:
        """Connect `sock`, which this owns from now on, and prove who this is.

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
        handshake = DialerHandshake(self._credentials, self._purpose)

        def prove(channel: Channel) -> None:
            body = channel.receive_body()
            if body is not None:
                connection.send_raw(handshake.reply(body))
                channel.session = handshake.session if needs_sealing(channel.socket) else None
                channel.peer = handshake.peer
                if connection.is_open:  # the peer may be gone by now: `on_failed` was called
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
        credentials: Credentials,
        purpose: str,
        *,
        on_peer: Callable[[Connection], None],
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._socket, self._reactor = sock, reactor
        self._credentials, self._purpose, self._on_peer = credentials, purpose, on_peer
        self._max_connections = max_connections
        self._unproved: dict[Connection, None] = {}  # the oldest first
        self._log = LimitedLog(_log, MachineClock())
        self._peers: set[Connection] = set()
        self._num_readings = credentials.number
        sock.settimeout(0)
        sock.listen(BACKLOG)
        self._watch()
        self._close_revoked()

    @property
    def num_peers(self) -> int:
        """Connections of peers that have proved the key."""
        return len(self._peers)

    def forget(self, connection: Connection) -> None:
        """A peer's connection is over: it counts no longer."""
        self._peers.discard(connection)

    def close(self) -> None:
        """Close the listener and all its connections."""
        self._reactor.unwatch(self._socket.fileno())
        self._reactor.cancel_call(self._socket.fileno())
        self._reactor.cancel_call(~self._socket.fileno())
        self._socket.close()
        for connection in (*self._unproved, *self._peers):
            connection.close()
        self._unproved.clear()
        self._peers.clear()

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError as exc:
            if exc.errno in OUT_OF_RESOURCES:
                self._pause(exc)
            return  # or it left again before it was accepted
        if len(self._peers) >= self._max_connections:
            text = f"refused a transfer connection: {self._max_connections} are open"
            self._log.warning("peers", text)
            sock.close()
            return
        if len(self._unproved) >= MAX_UNPROVED:
            self._close_oldest_unproved(f"{MAX_UNPROVED} others have not proved the key either")
        sock.settimeout(0)
        self._challenge(sock)

    def _close_revoked(self) -> None:
        """And again after a while: connections of peers last as long as they live."""
        number = self._credentials.number
        if number != self._num_readings:
            self._num_readings = number
            for connection in tuple(self._peers):
                peer = connection.channel.peer
                if peer is not None and self._credentials.is_revoked(peer):
                    connection.fail(PeerLostError(f"the certificate of {peer} was revoked"))
        self._reactor.call_after(~self._socket.fileno(), REVOCATION_INTERVAL_S, self._close_revoked)

    def _watch(self) -> None:
        self._reactor.watch(self._socket.fileno(), self._accept)

    def _pause(self, exc: OSError) -> None:
        self._log.warning("accept", f"no transfer connection can be accepted: {exc.strerror}")
        self._reactor.unwatch(self._socket.fileno())
        self._reactor.call_after(self._socket.fileno(), ACCEPT_PAUSE_S, self._watch)
        self._close_oldest_unproved("no file descriptor is left")

    def _close_oldest_unproved(self, reason: str) -> None:
        oldest = next(iter(self._unproved), None)
        if oldest is not None:
            del self._unproved[oldest]
            self._log.warning("unproved", f"a transfer connection was closed: {reason}")
            oldest.close()

    def _challenge(self, sock: socket.socket) -> None:
        handshake = ListenerHandshake(self._credentials, self._purpose)

        def check(channel: Channel) -> None:
            body = channel.receive_body()
            if body is None:
                return
            reply = handshake.reply(body)
            if not handshake.done:
                connection.send_raw(reply)
                return
            channel.session = handshake.session if needs_sealing(channel.socket) else None
            channel.peer = handshake.peer
            self._unproved.pop(connection, None)
            self._peers.add(connection)
            connection.fail_after(ATTACH_TIMEOUT_S, "attaching")
            self._on_peer(connection)

        def lose(error: TransferError) -> None:
            self._unproved.pop(connection, None)
            self._log.warning("unauthenticated", f"a transfer connection was closed: {error}")

        connection = Connection(self._reactor, Channel(sock, MAX_HANDSHAKE_BYTES), check, lose)
        connection.fail_after(PROOF_TIMEOUT_S, "a peer's proof of the key")
        self._unproved[connection] = None


def open_peer_process(sock: socket.socket) -> int | None:
    """A pidfd that becomes readable when the process that connected has died.

    None where the kernel gives none (a peer in a PID namespace that is not visible here): then only
    the writer itself can report that it stopped.

    Raises:
        TransferError: no descriptor is left.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return os.pidfd_open(_CREDENTIALS.unpack(credentials)[0])
    except (OSError, ValueError) as exc:
        if isinstance(exc, OSError) and exc.errno in OUT_OF_RESOURCES:
            raise TransferError(f"cannot watch a writer's process: {exc.strerror}") from exc
        _log.warning("cannot watch a writer's process: its exit will go unnoticed: %s", exc)
        return None
