"""The network interface that has an address: libraries are told of interfaces."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import Final

from baton.errors import TransferError

_SIOCGIFADDR: Final = 0x8915
_IPV6_ADDRESSES: Final = Path("/proc/net/if_inet6")


def find_interface(host: str) -> str:
    """The name of the interface that `host`, an address of this machine, belongs to.

    Raises:
        TransferError: no interface has it (`0.0.0.0` neither).
    """
    try:
        wanted = ipaddress.ip_address(socket.getaddrinfo(host, 0)[0][4][0])
    except (OSError, ValueError) as exc:
        raise TransferError(f"cannot find the address of {host}: {exc}") from exc
    for _, name in socket.if_nameindex():
        if wanted == _find_ipv4(name) or (wanted.is_loopback and name == "lo"):
            return name
    for line in _read_ipv6():
        digits, *_, name = line.split()
        if wanted == ipaddress.IPv6Address(bytes.fromhex(digits)):
            return name
    raise TransferError(f"no network interface has the address {host}")


def _find_ipv4(name: str) -> ipaddress.IPv4Address | None:
    request = struct.pack("16s24x", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, request)
        except OSError:  # it has none
            return None
    return ipaddress.IPv4Address(answer[20:24])


def _read_ipv6() -> list[str]:
    try:
        return _IPV6_ADDRESSES.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:  # a kernel without IPv6
        return []
