"""Proof of a writer's death: a descriptor of the process at the other end of a Unix socket."""

from __future__ import annotations

import logging
import os
import socket
import struct
from typing import Final

_log = logging.getLogger(__name__)

_SO_PEERPIDFD: Final = 77
"""Linux 6.5 and later; the `socket` module of Python 3.11 has no name for it."""
_CREDENTIALS: Final = struct.Struct("3i")


def open_peer_process(sock: socket.socket) -> int | None:
    """A pidfd that becomes readable when the process that connected has died.

    None where the kernel cannot give one (a peer from a PID namespace that is not ours to see):
    then only the writer itself can say that it stopped.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return os.pidfd_open(_CREDENTIALS.unpack(credentials)[0])
    except (OSError, ValueError) as exc:
        _log.warning("cannot watch a writer's process, its death will prove nothing: %s", exc)
        return None
