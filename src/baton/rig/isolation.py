"""Isolation of one process: its own core, its own network, and no life after its parent."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.errors import TransferError

if TYPE_CHECKING:
    from baton.rig.backend import Role

CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
SIOCGIFFLAGS: Final = 0x8913
SIOCSIFFLAGS: Final = 0x8914
IFF_UP: Final = 1
PR_SET_PDEATHSIG: Final = 1
_REQUEST: Final = struct.Struct("16sh14x")

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, where it can."""
    with suppress(AttributeError, OSError):
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def pin_to_core(role: Role) -> None:
    """Pin this process to the first core of one half of the cores; before any thread starts."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0 if role == "driver" else len(cores) // 2]})


def enter_network(network_of: int | None) -> None:
    """Choose the network namespace: None the host's, 0 a new one, else that of a process id.

    Before any thread starts.

    Raises:
        TransferError: the process has ended, or this user may not.
    """
    if network_of == 0:
        _enter_new_network()
    elif network_of is not None:
        _join_network_of(network_of)


def _enter_new_network() -> None:
    """Leave the host's network namespace for one with loopback only."""
    is_root = os.geteuid() == 0
    _check(_libc.unshare(CLONE_NEWNET | (0 if is_root else CLONE_NEWUSER)), "make")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = _REQUEST.pack(b"lo", 0)
        _, flags = _REQUEST.unpack(fcntl.ioctl(sock, SIOCGIFFLAGS, request))
        fcntl.ioctl(sock, SIOCSIFFLAGS, _REQUEST.pack(b"lo", flags | IFF_UP))


def _join_network_of(pid: int) -> None:
    # Without root, the network belongs to a user namespace, which must be entered first.
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
