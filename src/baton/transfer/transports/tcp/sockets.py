"""Options, sockets and endpoints of `tcp`: numeric addresses only, so no name is resolved."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Annotated, Final

import msgspec

from baton.errors import TransferError
from baton.transfer.endpoints import format_endpoint, open_socket, tune_tcp
from baton.transfer.transports.tcp.wire import MAX_STREAMS

_SEND_CEILING: Final = Path("/proc/sys/net/core/wmem_max")
_RECEIVE_CEILING: Final = Path("/proc/sys/net/core/rmem_max")


class TlsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files in PEM format. Both ends present a certificate, and check the other's against `ca`.

    Names in certificates are ignored: `ca` should sign for this cluster's workers alone. The
    cluster key is proved inside, as without TLS.
    """

    certificate: str
    key: str
    ca: str


class TcpOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `tcp` transport.

    `port`: where this worker listens for pages and probes; rank r of an engine takes `port + r`. 0
    is any free one.
    `streams`: connections to each peer's region.
    `max_connections`: of peers to this worker at once; what exceeds them is refused. Each peer has
    `streams` to each region, and as many while its link is probed.
    `stripe_bytes`: a write of twice as much or more is spread over streams, so much or more on
    each; a read is requested in pieces of this size.
    `socket_buffer_bytes`: asked of the kernel for each socket: a larger one means fewer wake-ups.
    None leaves the kernel's own tuning on, and so does a kernel that allows less.
    `local_buffer_bytes`: at most so much where both ends have one address: bytes in flight then
    stay in the processor's caches. Ignored with the kernel's own tuning.
    `advertise_host`: the address for peers, where the bound one is unspecified (`0.0.0.0`).
    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    `stall_timeout_s`: a peer with an outstanding answer that neither takes nor sends a byte for so
    long is lost.
    `tls`: encrypt; all workers must, or none.
    """

    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    streams: Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)] = 2
    max_connections: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 4096
    stripe_bytes: Annotated[int, msgspec.Meta(ge=65_536, le=1 << 30)] = 8 << 20
    socket_buffer_bytes: Annotated[int, msgspec.Meta(ge=65_536, le=1 << 30)] | None = 4 << 20
    local_buffer_bytes: Annotated[int, msgspec.Meta(ge=65_536, le=1 << 30)] = 1 << 20
    advertise_host: str | None = None
    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    stall_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    tls: TlsOptions | None = None


def open_listener(host: str, options: TcpOptions, rank: int = 0) -> tuple[socket.socket, str]:
    """Bind to the rank's port of `host`, or a free one; the socket and the endpoint for peers.

    Raises:
        TransferError: the address cannot be bound, or peers cannot use it.
    """
    wanted = options.port + rank if options.port else 0
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise TransferError(f"cannot listen on {host}: {exc}") from exc
    _tune(sock, options)
    if wanted:  # one that is started again gets its port though old connections are still ending
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address[0], wanted, *address[2:]))
    except (OSError, OverflowError) as exc:
        sock.close()
        where = f"port {wanted} of {host} (tcp.port, plus the rank)" if wanted else host
        raise TransferError(f"cannot listen on {where}: {exc}") from exc
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
    """A fresh socket that can connect to `endpoint`.

    Raises:
        TransferError: no descriptor is left.
    """
    sock = open_socket(endpoint)
    _tune(sock, options)
    return sock


def fit_buffers(sock: socket.socket, options: TcpOptions) -> None:
    """Make a connected socket's buffers smaller if its peer is on this host."""
    try:
        is_local = sock.getsockname()[0] == sock.getpeername()[0]
    except OSError:  # closed already: the next read fails
        return
    if is_local and options.socket_buffer_bytes is not None:
        _set_buffers(sock, min(options.socket_buffer_bytes, options.local_buffer_bytes))


def explain_small_buffers(options: TcpOptions) -> str | None:
    """A warning for the operator if the kernel does not allow the configured buffers."""
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
    """Set options, which accepted connections inherit from their listener."""
    _set_buffers(sock, options.socket_buffer_bytes)
    tune_tcp(sock, options.stall_timeout_s)


def _set_buffers(sock: socket.socket, asked: int | None) -> None:
    for option, ceiling in (
        (socket.SO_SNDBUF, _SEND_CEILING),
        (socket.SO_RCVBUF, _RECEIVE_CEILING),
    ):
        # Asking for more gives the ceiling, and switches the kernel's own tuning off.
        if asked is not None and asked <= _read_ceiling(ceiling):
            sock.setsockopt(socket.SOL_SOCKET, option, asked)


def _read_ceiling(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except FileNotFoundError:  # some kernels show it in the first network namespace alone
        return 0
