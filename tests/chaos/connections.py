"""Cutting connections of a living process, without its help: through a copy of its descriptor.

`pidfd_getfd(2)` copies another process' descriptor; disconnecting the copy resets the connection
for both ends. Needs the right to trace the process (root, or its parent in most kernels).
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.process_state import LISTEN, read_tcp_sockets, read_unix_inodes

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIDFD_GETFD = 438
_ESTABLISHED = "01"
_libc = ctypes.CDLL(None, use_errno=True)


class BadDescriptorError(OSError):
    """The process has no such descriptor any more, or may not be traced."""


@dataclass(frozen=True)
class Link:
    """An established TCP connection, as one end has it."""

    fd: int
    local_port: int
    inode: str


def find_links(pid: int, port: int | None) -> list[Link]:
    """Established connections that came in at `port` of a process (None: at any of its ports)."""
    sockets = read_tcp_sockets(pid)
    fds = _socket_fds(pid)
    own_endpoints = {s.local_port for s in sockets if s.state == LISTEN and s.inode in fds}
    endpoints = own_endpoints if port is None else {port}
    return [
        Link(fds[s.inode], s.local_port, s.inode)
        for s in sockets
        if s.state == _ESTABLISHED and s.inode in fds and s.local_port in endpoints
    ]


def find_unix_connections(pid: int) -> list[int]:
    """Descriptors of a process' Unix sockets that are connected to another process."""
    unix = read_unix_inodes(pid)
    found: list[int] = []
    for inode, fd in _socket_fds(pid).items():
        if inode in unix:
            with suppress(OSError), _borrowed(pid, fd) as sock:
                credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                peer, _, _ = struct.unpack("3i", credentials)
                sock.getpeername()
                if peer not in {0, pid}:
                    found.append(fd)
    return found


def reset_link(pid: int, link: Link) -> str:
    """Reset one connection, unless its owner closed it meanwhile; its inode."""
    if _socket_fds(pid).get(link.inode) != link.fd:
        return link.inode
    with suppress(BadDescriptorError), _borrowed(pid, link.fd) as sock:
        nowhere = struct.pack("H14x", socket.AF_UNSPEC)
        if _libc.connect(sock.fileno(), nowhere, len(nowhere)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return link.inode


def shut_unix(pid: int, fd: int) -> None:
    """End one Unix connection in both directions."""
    with _borrowed(pid, fd) as sock:
        sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(pid: int, fd: int) -> Iterator[socket.socket]:
    pidfd = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
        if copy < 0:
            raise BadDescriptorError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        with socket.socket(fileno=copy) as sock:
            yield sock
    finally:
        os.close(pidfd)


def _socket_fds(pid: int) -> dict[str, int]:
    """Descriptors of a process' sockets, by inode."""
    fds: dict[str, int] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
            if found:
                fds[found[1]] = int(link.name)
    return fds
