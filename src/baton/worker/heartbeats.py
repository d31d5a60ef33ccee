"""Sends a worker's heartbeats to the gateways that have granted them."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from baton.protocol.heartbeats import make_heartbeat

if TYPE_CHECKING:
    from baton.protocol.heartbeats import HeartbeatGrant


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

    def close(self) -> None:
        """Send none any more."""
        self._targets.clear()
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()

    def _socket_for(self, host: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = self._sockets.get(family)
        if sock is None:
            sock = self._sockets[family] = socket.socket(family, socket.SOCK_DGRAM)
            sock.settimeout(0)
        return sock
