"""Network interfaces and socket buffers. Read from files alone."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.ops.doctor.finding import Area, Finding, Level, write_bytes

if TYPE_CHECKING:
    from baton.ops.doctor.host import Host

INTERFACES: Final = "/sys/class/net"
PAGE_BYTES: Final = 4096
SOCKET_BUFFER_BYTES: Final = 4 << 20
"""What `tcp` asks for each socket by default (transfer.options.tcp.socket_buffer_bytes)."""
MIN_TCP_BYTES: Final = 64 << 20
FAST_MBIT: Final = 25_000
JUMBO_BYTES: Final = 9000


def check_interfaces(host: Host) -> list[Finding]:
    """Interfaces that have a device behind them: state, speed, MTU, NUMA node."""
    names = [
        name for name in host.entries(INTERFACES) if host.exists(f"{INTERFACES}/{name}/device")
    ]
    return [_describe(host, name) for name in names] or [
        _interface("NIC", Level.OK, "none with a device behind it", "Handoffs stay on this host.")
    ]


def check_socket_buffers(host: Host) -> list[Finding]:
    """How large a socket's buffers may be, and all of TCP's together."""
    ceilings = {
        name: host.read_number(f"/proc/sys/net/core/{name}") for name in ("rmem_max", "wmem_max")
    }
    return [*_check_ceilings(ceilings), *_check_tcp_mem(host)]


def _describe(host: Host, name: str) -> Finding:
    at = f"{INTERFACES}/{name}"
    state = host.read(f"{at}/operstate") or "unknown"
    speed = host.read_number(f"{at}/speed")
    mtu = host.read_number(f"{at}/mtu")
    node = host.read_number(f"{at}/device/numa_node")
    known_speed = speed if speed is not None and speed > 0 else None
    parts = [
        state,
        "speed unknown" if known_speed is None else f"{known_speed / 1000:g} Gbit/s",
        f"MTU {mtu}",
        *([] if node is None or node < 0 else [f"NUMA node {node}"]),
    ]
    found = ", ".join(parts)
    if state == "up" and (known_speed or 0) >= FAST_MBIT and (mtu or JUMBO_BYTES) < JUMBO_BYTES:
        return _interface(
            name,
            Level.NOTE,
            found,
            "On a fast network, frames of 1,500 bytes cost `tcp` several times as many packets; "
            "all hosts and switches must agree on the larger size.",
            fix=f"sudo ip link set {name} mtu {JUMBO_BYTES}",
        )
    return _interface(name, Level.OK, found, "What `tcp` can reach between hosts.")


def _interface(name: str, level: Level, found: str, why: str, *, fix: str | None = None) -> Finding:
    return Finding(area=Area.NETWORK, name=name, level=level, found=found, why=why, fix=fix)


def _check_ceilings(ceilings: dict[str, int | None]) -> list[Finding]:
    known = {name: value for name, value in ceilings.items() if value is not None}
    if not known:
        return [
            _interface(
                "socket buffers",
                Level.NOTE,
                "the kernel does not show net.core.rmem_max in this network namespace",
                "`tcp` leaves the kernel's own tuning on.",
            )
        ]
    is_enough = min(known.values()) >= SOCKET_BUFFER_BYTES
    return [
        _interface(
            "socket buffers",
            Level.OK if is_enough else Level.WARNING,
            ", ".join(f"{name} {write_bytes(value)}" for name, value in known.items()),
            f"`tcp` asks for {write_bytes(SOCKET_BUFFER_BYTES)} for each socket; where less is "
            "allowed it wakes up more often for the same bytes.",
            fix=None
            if is_enough
            else "sudo sysctl -w net.core.rmem_max=16777216 net.core.wmem_max=16777216",
        )
    ]


def _check_tcp_mem(host: Host) -> list[Finding]:
    words = (host.read("/proc/sys/net/ipv4/tcp_mem") or "").split()
    if len(words) != 3 or not all(word.isdigit() for word in words):  # noqa: PLR2004
        return []
    pressure_bytes = int(words[1]) * PAGE_BYTES
    is_enough = pressure_bytes >= MIN_TCP_BYTES
    return [
        _interface(
            "tcp memory",
            Level.OK if is_enough else Level.WARNING,
            f"under pressure from {write_bytes(pressure_bytes)} on",
            "Buffers of all sockets together; under pressure the kernel shrinks each one.",
            fix=None if is_enough else "sudo sysctl -w net.ipv4.tcp_mem='65536 131072 262144'",
        )
    ]


Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

OWN_PROCESS: Final = Path("/proc/self")
LISTENING: Final = "0A"


def find_open_listeners(process: Path = OWN_PROCESS) -> tuple[str, ...]:
    """`address:port` of each one; none where there is no /proc, since nothing is known then."""
    own = _own_sockets(process / "fd")
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        for row in _rows(process / "net" / name):
            address, port = parse_address(row[1])
            if row[3] == LISTENING and row[9] in own and not _is_loopback(address):
                found.add(f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}")  # noqa: PLR2004
    return tuple(sorted(found))


def parse_address(text: str) -> tuple[Address, int]:
    """`0100007F:1F90` → 127.0.0.1, 8080: the kernel prints words as this machine stores them."""
    digits, _, port = text.partition(":")
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return ipaddress.ip_address(packed), int(port, 16)


def _is_loopback(address: Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _rows(table: Path) -> list[list[str]]:
    try:
        lines = table.read_text("ascii").splitlines()[1:]
    except OSError:
        return []
    return [line.split() for line in lines]


def _own_sockets(descriptors: Path) -> set[str]:
    """Inodes of the process's sockets."""
    inodes: set[str] = set()
    try:
        entries = list(descriptors.iterdir())
    except OSError:
        return inodes
    for entry in entries:
        try:
            target = str(entry.readlink())
        except OSError:  # closed meanwhile: the listing's own descriptor
            continue
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    return inodes
