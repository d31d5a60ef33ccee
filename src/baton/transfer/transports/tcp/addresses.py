"""Sockets and endpoints of `tcp`: numeric addresses only, so that nothing waits for a resolver."""

from __future__ import annotations

import ipaddress
import math
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.errors import TransferError

if TYPE_CHECKING:
    from baton.transfer.transports.tcp.options import TcpOptions

_MAX_PORT: Final = 65_535
_MAX_KEEPALIVE_S: Final = 32_767
"""Linux' own bound."""
_SEND_CEILING: Final = Path("/proc/sys/net/core/wmem_max")
_RECEIVE_CEILING: Final = Path("/proc/sys/net/core/rmem_max")


def open_listener(host: str, options: TcpOptions) -> tuple[socket.socket, str]:
    """Bind to a free port of `host`; the socket and the endpoint to tell peers.

    Raises:
        TransferError: the address cannot be bound, or says nothing to a peer.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise TransferError(f"cannot listen on {host}: {exc}") from exc
    _tune(sock, options)
    try:
        sock.bind(address)
    except OSError as exc:
        sock.close()
        raise TransferError(f"cannot listen on {host}: {exc}") from exc
    bound, port = sock.getsockname()[:2]
    advertised = options.advertise_host or bound
    try:
        is_useful = not ipaddress.ip_address(advertised).is_unspecified
    except ValueError:
        is_useful = False
    if not is_useful:
        sock.close()
        raise TransferError(
            f"peers cannot connect to {advertised}; bind to an address of this host, or set "
            "advertise_host to a numeric one"
        )
    return sock, format_endpoint(advertised, port)


def open_stream(endpoint: tuple[str, int], options: TcpOptions) -> socket.socket:
    """A fresh socket that can connect to `endpoint`."""
    family = socket.AF_INET6 if ":" in endpoint[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    _tune(sock, options)
    return sock


def fit_buffers(sock: socket.socket, options: TcpOptions) -> None:
    """Make a connected socket's buffers smaller if its peer is on this host."""
    try:
        is_local = sock.getsockname()[0] == sock.getpeername()[0]
    except OSError:  # it is gone already, which is found out when it is read
        return
    if is_local and options.socket_buffer_bytes is not None:
        _set_buffers(sock, min(options.socket_buffer_bytes, options.local_buffer_bytes))


def format_endpoint(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """The numeric address and the port of an endpoint that came from a peer.

    Raises:
        TransferError: it is not one.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        number = int(port)
    except ValueError as exc:
        raise TransferError(f"{endpoint[:80]!r} is no address of a peer") from exc
    if not 0 < number <= _MAX_PORT or address.is_unspecified or address.is_multicast:
        raise TransferError(f"{endpoint[:80]!r} is no address of a peer")
    return str(address), number


def explain_small_buffers(options: TcpOptions) -> str | None:
    """A warning for the operator if the kernel does not allow the buffers that were asked for."""
    asked = options.socket_buffer_bytes
    ceilings = [_read_ceiling(path) for path in (_SEND_CEILING, _RECEIVE_CEILING)]
    if asked is None or asked <= min(ceilings):
        return None
    return (
        f"tcp: socket buffers of {asked} bytes were asked for and the kernel allows "
        f"{ceilings[0]} to send and {ceilings[1]} to receive, so its own tuning stays on; "
        f"sysctl -w net.core.wmem_max={asked} net.core.rmem_max={asked}"
    )


def _tune(sock: socket.socket, options: TcpOptions) -> None:
    """Set what connections inherit from their listener, too."""
    _set_buffers(sock, options.socket_buffer_bytes)
    stall_s = options.stall_timeout_s
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        # A peer that is cut off while nothing is under way is found out by the kernel.
        (socket.TCP_KEEPIDLE, _whole_seconds(stall_s / 2)),
        (socket.TCP_KEEPINTVL, _whole_seconds(stall_s / 4)),
        (socket.TCP_KEEPCNT, 2),
        (socket.TCP_USER_TIMEOUT, _whole_seconds(stall_s) * 1000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _whole_seconds(duration_s: float) -> int:
    return min(max(1, math.ceil(duration_s)), _MAX_KEEPALIVE_S)


def _set_buffers(sock: socket.socket, asked: int | None) -> None:
    for option, ceiling in (
        (socket.SO_SNDBUF, _SEND_CEILING),
        (socket.SO_RCVBUF, _RECEIVE_CEILING),
    ):
        # Asking for more than is allowed gives the ceiling, and switches the kernel's tuning off.
        if asked is not None and asked <= _read_ceiling(ceiling):
            sock.setsockopt(socket.SOL_SOCKET, option, asked)


def _read_ceiling(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except FileNotFoundError:  # some kernels show it in the first network namespace alone
        return 0
