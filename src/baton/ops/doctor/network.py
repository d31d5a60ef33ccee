"""Network interfaces and socket buffers. Read from files alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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
