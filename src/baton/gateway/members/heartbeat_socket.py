"""Where a gateway receives heartbeats.

They are read when the leases are looked at, not when they arrive: so many small datagrams cost no
wake-up each, and whatever waits is read before any worker is found silent.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError
from baton.protocol.heartbeats import HEARTBEAT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_READ: Final = 4096
"""Datagrams at once; the socket's buffer holds fewer."""
BUFFER_BYTES: Final = 1 << 20
"""Asked for; the kernel's limit (net.core.rmem_max) may be less."""


class HeartbeatSocket:
    """Bound to `host` and the UDP port `port`. Owner: the event loop's thread.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.settimeout(0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        try:
            self._socket.bind((host, port))
        except OSError as exc:
            self._socket.close()
            raise ConfigError(
                f"cannot receive heartbeats at UDP port {port} of {host}: {exc.strerror or exc}; "
                "choose another gateway.announce_port, whose UDP port is free too"
            ) from exc

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def read(self) -> Iterator[bytes]:
        """The datagrams that have arrived, `MAX_READ` at most. Does not block."""
        for _ in range(MAX_READ):
            try:
                yield self._socket.recv(HEARTBEAT_BYTES + 1)
            except OSError:  # BlockingIOError: that was all
                return
