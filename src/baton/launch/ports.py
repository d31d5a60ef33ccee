"""Which ports are free, and who holds one that is not."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from baton.errors import ConfigError

LISTEN = "0A"
"""TCP_LISTEN in /proc/net/tcp."""


def require_free_port(host: str, port: int) -> None:
    """Refuse early, before models are loaded. Port 0 is always free.

    Raises:
        ConfigError: the port is taken, or this process may not listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise ConfigError(_refusal(host, port, exc)) from exc


def find_free_ports(host: str, num_ports: int) -> list[int]:
    """Ports that are free now, for processes that have to know each other's before they start."""
    with ExitStack() as bound:
        probes = [bound.enter_context(socket.create_server((host, 0))) for _ in range(num_ports)]
        return [probe.getsockname()[1] for probe in probes]


def find_listener(port: int) -> str | None:
    """`pid N (command)` of this user's process that listens on a TCP port, if it can be seen."""
    inodes = _listening_inodes(port)
    for process in Path("/proc").glob("[0-9]*"):
        if inodes & _socket_inodes(process):
            return f"pid {process.name} ({_command(process)})"
    return None


def _refusal(host: str, port: int, exc: OSError) -> str:
    if exc.errno == errno.EADDRINUSE:
        holder = find_listener(port) or "a process of another user"
        return f"port {port} on {host} is taken by {holder}; stop it or choose another with --port"
    return f"cannot listen on {host}:{port}: {exc.strerror}; choose another with --host or --port"


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in _lines(table)[1:]:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found


def _socket_inodes(process: Path) -> set[str]:
    """What its descriptors point to; nothing of a process that ended or is somebody else's."""
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:
        return set()
    found = set()
    for descriptor in descriptors:
        with suppress(OSError):  # it was closed in between
            found.add(str(descriptor.readlink()))
    return found


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return b" ".join(words).decode(errors="replace").strip()[:80]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
