"""Sends a worker's heartbeats and renewals to the gateways that have granted them."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from baton.protocol.heartbeats import (
    HEARTBEAT_BYTES,
    ID_BYTES,
    make_heartbeat,
    make_renewal,
    read_acknowledgement,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.protocol.heartbeats import Acknowledgement, HeartbeatGrant


class HeartbeatSender:
    """Owner: the event loop's thread. Sockets are opened when they are needed first."""

    def __init__(self) -> None:
        self._targets: dict[str, tuple[HeartbeatGrant, tuple[str, int]]] = {}
        self._sockets: dict[socket.AddressFamily, socket.socket] = {}
        self._sequence = 0

    def add(self, gateway: str, grant: HeartbeatGrant, address: tuple[str, int]) -> None:
        """Send them to a gateway, at an address and UDP port, from now on."""
        self._targets[gateway] = grant, address

    def remove(self, gateway: str) -> None:
        """Send none there any more."""
        self._targets.pop(gateway, None)

    def send(self) -> None:
        """One to each gateway. Does not block; one that cannot be sent is lost, as any datagram."""
        self._sequence += 1
        for grant, address in self._targets.values():
            with suppress(OSError):
                self._socket_for(address[0]).sendto(make_heartbeat(grant, self._sequence), address)

    def send_renewal(self, gateway: str, sealed: bytes) -> bool:
        """Send an announcement to a gateway by a datagram; False: not possible. Does not block."""
        target = self._targets.get(gateway)
        renewal = None if target is None else make_renewal(target[0], sealed)
        if target is None or renewal is None:
            return False
        try:
            self._socket_for(target[1][0]).sendto(renewal, target[1])
        except OSError:
            return False
        return True

    def read_acknowledgements(self) -> Iterator[tuple[str, Acknowledgement]]:
        """Those that have arrived, each with its gateway. Does not block."""
        by_id = {grant.id: (url, grant) for url, (grant, _) in self._targets.items()}
        for datagram in self._read():
            if (found := by_id.get(datagram[:ID_BYTES])) is not None:
                url, grant = found
                if (acknowledgement := read_acknowledgement(datagram, grant)) is not None:
                    yield url, acknowledgement

    def close(self) -> None:
        """Send none any more."""
        self._targets.clear()
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()

    def _read(self) -> Iterator[bytes]:
        """At most as many as gateways may send at once; what is left is read the next time."""
        for sock in self._sockets.values():
            for _ in range(2 * len(self._targets)):
                try:
                    yield sock.recv(HEARTBEAT_BYTES + 1)
                except BlockingIOError:
                    break
                except OSError:  # of a datagram sent before: nothing listens there
                    continue

    def _socket_for(self, host: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = self._sockets.get(family)
        if sock is None:
            sock = self._sockets[family] = socket.socket(family, socket.SOCK_DGRAM)
            sock.settimeout(0)
        return sock
