"""A network namespace that has loopback only: a library that listens everywhere is alone there."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

from baton.errors import TransferError

CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
SIOCGIFFLAGS: Final = 0x8913
SIOCSIFFLAGS: Final = 0x8914
IFF_UP: Final = 1
_REQUEST: Final = struct.Struct("16sh14x")

_libc = ctypes.CDLL(None, use_errno=True)


def enter_new_network() -> None:
    """Leave the host's network for one with loopback only; before any thread starts.

    Raises:
        TransferError: this system does not let this user have one.
    """
    is_root = os.geteuid() == 0
    _check(_libc.unshare(CLONE_NEWNET | (0 if is_root else CLONE_NEWUSER)), "make")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = _REQUEST.pack(b"lo", 0)
        _, flags = _REQUEST.unpack(fcntl.ioctl(sock, SIOCGIFFLAGS, request))
        fcntl.ioctl(sock, SIOCSIFFLAGS, _REQUEST.pack(b"lo", flags | IFF_UP))


def join_network_of(pid: int) -> None:
    """Enter the network of another process of this user; before any thread starts.

    Raises:
        TransferError: it has ended, or this system does not allow it.
    """
    # Without root, its network belongs to a user namespace, which must be entered first.
    kinds = (("user", CLONE_NEWUSER), ("net", CLONE_NEWNET))
    for name, flag in kinds[os.geteuid() == 0 :]:
        try:
            fd = os.open(Path("/proc") / str(pid) / "ns" / name, os.O_RDONLY)
        except OSError as exc:
            raise TransferError(f"cannot join a network namespace: {exc.strerror}") from exc
        try:
            _check(_libc.setns(fd, flag), "join")
        finally:
            os.close(fd)


def _check(code: int, verb: str) -> None:
    if code != 0:
        reason = os.strerror(ctypes.get_errno())
        raise TransferError(
            f"cannot {verb} a network namespace ({reason}), and its library would listen on "
            "all interfaces"
        )
