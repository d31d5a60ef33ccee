"""The worker's listening socket: bound before the model loads, so that a taken port fails early.

Connections are refused until `start_listening`: a probe learns at once that nothing answers yet.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator

BACKLOG: Final = 2048


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; `port` 0 takes a free one.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.settimeout(0)
        with _explained(host, port):
            listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


def start_listening(listener: socket.socket) -> None:
    """Accept connections from now on.

    Raises:
        ConfigError: another process took the port in the meantime.
    """
    host, port = listener.getsockname()[:2]
    with _explained(host, port):
        listener.listen(BACKLOG)


def url_of(listener: socket.socket, host: str) -> str:
    """The URL under which a bound socket is reached; `host` as the operator wrote it."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _explained(host: str, port: int) -> Generator[None]:
    try:
        yield
    except OSError as exc:
        where = f"{host}:{port}"
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{where} is taken by another process; stop that one, choose another --port, or "
                "let the system choose with --port 0"
            ) from exc
        raise ConfigError(f"cannot listen on {where}: {exc.strerror or exc}") from exc
