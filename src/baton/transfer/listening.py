"""Accept peers, bounded in number and in time, until they have proved the key."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from baton.transfer.channel import Channel
from baton.transfer.connection import Connection
from baton.transfer.handshake import MAX_BODY_BYTES, ListenerHandshake

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from baton.auth.key import ClusterKey
    from baton.errors import TransferError
    from baton.transfer.reactor import Reactor

_log = logging.getLogger(__name__)

BACKLOG: Final = 128
MAX_CONNECTIONS: Final = 256
MAX_UNPROVED: Final = 64
"""Strangers have places of their own: they cannot take those of peers that hold the key."""
PROOF_TIMEOUT_S: Final = 2.0
ATTACH_TIMEOUT_S: Final = 5.0


class Listener:
    """One listening socket. `on_peer(connection)` is called for each peer that proved the key.

    The receiver of `on_peer` gives the connection its next phase, settles its timer, and says
    `forget` when the connection is over.
    """

    def __init__(
        self,
        sock: socket.socket,
        reactor: Reactor,
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
        """A peer's connection is over: its place is free again."""
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
        except OSError as exc:  # gone again, or no descriptors left: others are served all the same
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

        connection = Connection(self._reactor, Channel(sock, MAX_BODY_BYTES), check, lose)
        connection.fail_after(PROOF_TIMEOUT_S, "a peer's proof of the key")
        self._unproved.add(connection)
