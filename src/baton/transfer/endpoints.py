"""Listening sockets and their endpoints: a Unix socket on one host, TCP between hosts."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import math
import re
import secrets
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.errors import TransferError

if TYPE_CHECKING:
    from typing import Literal

Address: TypeAlias = tuple[str, int] | bytes

_NAME: Final = re.compile(r"baton-[0-9a-f]{32}")
_MAX_PORT: Final = 65_535
_SILENCE_TIMEOUT_S: Final = 10.0
_MAX_KEEPALIVE_S: Final = 32_767
"""Linux' own bound."""


def open_listener(
    reach: Literal["host", "network"], bind_host: str, advertise_host: str | None
) -> tuple[socket.socket, str]:
    """A bound socket, and the endpoint for peers.

    Raises:
        TransferError: it cannot be bound, or no peer can use the address.
    """
    if reach == "host":
        return _bind_unix()
    return _bind_tcp(bind_host, advertise_host)


def parse_endpoint(reach: Literal["host", "network"], endpoint: str) -> Address:
    """What to connect to: an endpoint that came from a peer.

    Raises:
        TransferError: it is none of this reach.
    """
    if reach == "host":
        if not _NAME.fullmatch(endpoint):
            raise TransferError(f"{endpoint[:80]!r} is no endpoint on this host")
        return _abstract(endpoint)
    return parse_tcp_endpoint(endpoint)


def open_dialer(reach: Literal["host", "network"], endpoint: str) -> tuple[socket.socket, Address]:
    """A fresh socket, and what to connect it to.

    Raises:
        TransferError: the endpoint is none of this reach, or no descriptor is left.
    """
    address = parse_endpoint(reach, endpoint)
    sock = open_socket(address)
    if isinstance(address, tuple):
        tune_tcp(sock, _SILENCE_TIMEOUT_S)
    return sock, address


def tune_tcp(sock: socket.socket, silence_timeout_s: float) -> None:
    """Send at once, and have the kernel find a peer that is cut off, also while nothing is sent.

    Accepted connections inherit it from their listener.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _whole_seconds(silence_timeout_s / 2)),
        (socket.TCP_KEEPINTVL, _whole_seconds(silence_timeout_s / 4)),
        (socket.TCP_KEEPCNT, 2),
        (socket.TCP_USER_TIMEOUT, _whole_seconds(silence_timeout_s) * 1000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _whole_seconds(duration_s: float) -> int:
    return min(max(1, math.ceil(duration_s)), _MAX_KEEPALIVE_S)


def open_socket(address: Address) -> socket.socket:
    """A socket of the family of `address`, not connected.

    Raises:
        TransferError: no descriptor is left.
    """
    family = socket.AF_UNIX
    if isinstance(address, tuple):
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise TransferError(f"cannot open a socket: {exc.strerror}") from exc


def _bind_unix() -> tuple[socket.socket, str]:
    name = f"baton-{secrets.token_hex(16)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_abstract(name))
    except OSError as exc:
        sock.close()
        raise TransferError(f"cannot listen on a Unix socket: {exc}") from exc
    return sock, name


def _bind_tcp(bind_host: str, advertise_host: str | None) -> tuple[socket.socket, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(bind_host, 0, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise TransferError(f"cannot listen on {bind_host}: {exc}") from exc
    try:
        tune_tcp(sock, _SILENCE_TIMEOUT_S)
        sock.bind(address)
        bound, port = sock.getsockname()[:2]
        advertised = advertise_host or bound
        endpoint = format_endpoint(advertised, port)
        parse_tcp_endpoint(endpoint)
    except (OSError, TransferError) as exc:
        sock.close()
        raise TransferError(
            f"cannot listen on {bind_host} for peers ({exc}); bind to an address of this host, or "
            "set advertise_host to a numeric one"
        ) from exc
    return sock, endpoint


def format_endpoint(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_tcp_endpoint(endpoint: str) -> tuple[str, int]:
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


def _abstract(name: str) -> bytes:
    """A name in the abstract namespace: no file, gone with the socket."""
    return b"\0" + name.encode()


_SIOCGIFCONF: Final = 0x8912
_ENTRY_BYTES: Final = 40
"""Of struct ifreq: a name of 16 bytes, then an address."""
_MAX_ADDRESSES: Final = 4096
_IPV6_ADDRESSES: Final = Path("/proc/net/if_inet6")


def find_interface(host: str, advertise_host: str | None) -> str:
    """The name of the interface that `host`, an address of this machine, belongs to.

    Of all addresses (`0.0.0.0`) that is none: then the one that `advertise_host` belongs to.

    Raises:
        TransferError: no interface has it.
    """
    try:
        wanted = ipaddress.ip_address(socket.getaddrinfo(host, 0)[0][4][0])
    except (OSError, ValueError) as exc:
        raise TransferError(f"cannot find the address of {host}: {exc}") from exc
    if wanted.is_unspecified and advertise_host is not None:
        return find_interface(advertise_host, None)
    if wanted.is_loopback:
        return "lo"
    name = _list_ipv4().get(str(wanted))
    if name is not None:
        return name
    for line in _read_ipv6():
        digits, *_, name = line.split()
        if wanted == ipaddress.IPv6Address(bytes.fromhex(digits)):
            return name
    raise TransferError(f"no network interface has the address {host}")


def _list_ipv4() -> dict[str, str]:
    """By each address of this host, the name of its interface. `eth0:1` is a label within one."""
    entries = ctypes.create_string_buffer(_MAX_ADDRESSES * _ENTRY_BYTES)
    request = struct.pack("iP", len(entries), ctypes.addressof(entries))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        (num_bytes,) = struct.unpack_from("i", fcntl.ioctl(sock, _SIOCGIFCONF, request))
    found: dict[str, str] = {}
    for name, address in struct.iter_unpack("16s4x4s16x", entries.raw[:num_bytes]):
        found[socket.inet_ntoa(address)] = name.rstrip(b"\0").decode().partition(":")[0]
    return found


def _read_ipv6() -> list[str]:
    try:
        return _IPV6_ADDRESSES.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:  # a kernel without IPv6
        return []
