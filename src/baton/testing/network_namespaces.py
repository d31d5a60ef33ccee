"""Other hosts, as far as the network is concerned: network namespaces.

`far_host` is one at the end of a cable, which can be cut and slowed. `bridged_hosts` are several on
one switch: what one sends to another can be lost in that direction alone, in silence, as in a
partition. Its sender is given a link address that no host has; this takes no packet filter, so it
works on any kernel that has namespaces.

Needs CAP_NET_ADMIN and iproute2; without them it raises `NoNamespaceError`.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

CARRIER_TIMEOUT_S: Final = 5.0
UNUSED_LINK_ADDRESS: Final = "02:00:00:00:de:ad"
RECEIVE_TIMEOUT_S: Final = 0.3
_CLONE_NEWNET: Final = 0x40000000
_libc: Final = ctypes.CDLL(None, use_errno=True)
_NUMBERS: Final = itertools.count()


class NoNamespaceError(Exception):
    """This user cannot make a network namespace here."""


@dataclass(frozen=True, slots=True)
class FarHost:
    """A network namespace `name` with `address`; `link` is this side's end of the cable."""

    name: str
    address: str
    near_address: str
    link: str
    far_link: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What a command begins with that is to run there."""
        return ("ip", "netns", "exec", self.name)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Pull the cable: what is sent meanwhile is lost, without an error."""
        run("ip", "link", "set", self.link, "down")
        try:
            yield
        finally:
            run("ip", "link", "set", self.link, "up")
            _wait_for_carrier(self.link)

    @contextmanager
    def limited(self, rate_bytes: int) -> Iterator[None]:
        """So many bytes a second in each direction."""
        ends = ((("tc",), self.link), (("tc", "-n", self.name), self.far_link))
        limit = ("tbf", "rate", f"{rate_bytes * 8}bit", "burst", "64kb", "latency", "100ms")
        for command, device in ends:
            run(*command, "qdisc", "replace", "dev", device, "root", *limit)
        try:
            yield
        finally:
            for command, device in ends:
                run(*command, "qdisc", "del", "dev", device, "root")


def _free_network(beginning: str) -> str:
    """One that no link has: neither of another process, nor left by one that was killed."""
    used = run("ip", "-4", "-o", "addr").decode()
    numbers = (number % 250 for number in range(os.getpid(), os.getpid() + 250))
    return next(
        network
        for network in (f"{beginning}.{number}" for number in numbers)
        if f" {network}." not in used
    )


@contextmanager
def far_host() -> Iterator[FarHost]:
    """Gone, with its cable, at the end; so are processes' connections to it.

    Raises:
        NoNamespaceError: see there.
    """
    name = f"bt{os.getpid() % 10_000}-{next(_NUMBERS)}"
    try:
        run("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as exc:
        stderr = exc.stderr.decode(errors="replace") if hasattr(exc, "stderr") else str(exc)
        raise NoNamespaceError(f"cannot make a network namespace: {stderr.strip()}") from exc
    near, far = f"{name}n", f"{name}f"
    try:
        network = _free_network("198.18")  # of those that RFC 2544 keeps for measuring
        near_address, far_address = f"{network}.1", f"{network}.2"
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        run("ip", "addr", "add", f"{near_address}/30", "dev", near)
        run("ip", "-n", name, "addr", "add", f"{far_address}/30", "dev", far)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "link", "set", far, "up")
        run("ip", "link", "set", near, "up")
        _wait_for_carrier(near)
        yield FarHost(name, far_address, near_address, near, far)
    finally:
        # A connection that no process has any more, with bytes that a cut cable keeps it from
        # sending, keeps its namespace, and so the cable, for minutes.
        with suppress(subprocess.CalledProcessError):
            run("ip", "link", "del", near)
        run("ip", "netns", "del", name)


def _wait_for_carrier(link: str) -> None:
    """The kernel notices it a little later; until then it is as if there were no route."""
    state = Path(f"/sys/class/net/{link}/operstate")
    deadline = time.monotonic() + CARRIER_TIMEOUT_S  # noqa: TID251 -- a real cable, real time
    while state.read_text(encoding="ascii").strip() != "up" or _has_tentative_address(link):
        if time.monotonic() > deadline:  # noqa: TID251 -- see above
            raise NoNamespaceError(f"the cable {link} does not come up")
        time.sleep(0.01)


def _has_tentative_address(link: str) -> bool:
    command = ("ip", "-6", "-o", "addr", "show", "dev", link, "tentative")
    return bool(run(*command))


def move_thread_into(name: str) -> None:
    """Sockets that this thread opens are in that namespace from now on, and its new threads' too.

    Raises:
        OSError: there is no such namespace, or this process may not enter it.
    """
    with Path(f"/run/netns/{name}").open("rb") as namespace:
        if _libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def run(*command: str) -> bytes:
    """Run one of iproute2's commands; what it prints.

    Raises:
        OSError, subprocess.CalledProcessError: it is not there, or it failed.
    """
    done = subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - ours
    return done.stdout


@dataclass(frozen=True, slots=True)
class BridgedHost:
    """One host: its namespace and its address. This process reaches it over the bridge.

    `port` is the bridge's end of its cable: what is queued or dropped there was sent already.
    """

    namespace: str
    address: str
    port: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What a command begins with that is to run there."""
        return ("ip", "netns", "exec", self.namespace)

    def receives_from(self, other: BridgedHost) -> bool:
        """Whether a datagram of another host arrives here."""
        with self.open_socket() as receiver, other.open_socket() as sender:
            receiver.bind((self.address, 0))
            receiver.settimeout(RECEIVE_TIMEOUT_S)
            with suppress(OSError):
                sender.sendto(b"?", receiver.getsockname())
            try:
                return receiver.recv(1) == b"?"
            except TimeoutError:
                return False

    def open_socket(self, kind: socket.SocketKind = socket.SOCK_DGRAM) -> socket.socket:
        """A socket of that host, for this process."""
        with ThreadPoolExecutor(1) as elsewhere:  # a thread of its own: it moves there, and ends
            return elsewhere.submit(self._open_there, kind).result()

    def _open_there(self, kind: socket.SocketKind) -> socket.socket:
        move_thread_into(self.namespace)
        return socket.socket(socket.AF_INET, kind)

    @contextmanager
    def behind_a_full_port(self, rate_bytes: int, queue_bytes: int) -> Iterator[None]:
        """Its switch port sends it so many bytes a second, and drops what does not fit its queue.

        Of hosts that send packets, not segments for the network card to cut: see
        `send_single_packets`.
        """
        limit = ("rate", f"{rate_bytes * 8}bit", "burst", "16kb", "limit", str(queue_bytes))
        run("tc", "qdisc", "replace", "dev", self.port, "root", "tbf", *limit)
        try:
            yield
        finally:
            run("tc", "qdisc", "del", "dev", self.port, "root")

    def count_port_drops(self) -> int:
        """Packets that its port has dropped since its queue was made."""
        (queue,) = json.loads(run("tc", "-s", "-j", "qdisc", "show", "dev", self.port, "root"))
        return int(queue["drops"])

    def send_single_packets(self) -> None:
        """Send packets of the link's size, not of 64 KiB, which virtual cables pass whole."""
        run("ip", "-n", self.namespace, "link", "set", "dev", "eth0", "gso_max_segs", "1")


@contextmanager
def dropping_packets_from(listener: BridgedHost, speaker: BridgedHost) -> Iterator[None]:
    """Nothing that the speaker sends reaches the listener, without an error; the rest does.

    Raises:
        AssertionError: it did not take effect.
    """
    entry = (listener.address, "dev", "eth0")
    there = ("ip", "-n", speaker.namespace, "neigh")
    run(*there, "replace", *entry, "lladdr", UNUSED_LINK_ADDRESS, "nud", "permanent")
    try:
        if listener.receives_from(speaker):
            raise AssertionError(f"{listener.address} still receives from {speaker.address}")
        yield
    finally:
        run(*there, "del", *entry)


@contextmanager
def bridged_hosts(num_hosts: int) -> Iterator[tuple[BridgedHost, ...]]:
    """Gone at the end, with their connections.

    Raises:
        NoNamespaceError: see there.
    """
    bridge = f"btb{os.getpid() % 100_000}-{next(_NUMBERS)}"
    with ExitStack() as undo:
        try:
            run("ip", "link", "add", bridge, "type", "bridge")
        except (OSError, subprocess.CalledProcessError) as exc:
            stderr = exc.stderr.decode(errors="replace") if hasattr(exc, "stderr") else str(exc)
            raise NoNamespaceError(f"cannot make a bridge: {stderr.strip()}") from exc
        undo.callback(run, "ip", "link", "del", bridge)
        network = _free_network("198.19")  # as above; others than `far_host` takes
        run("ip", "addr", "add", f"{network}.1/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        hosts: list[BridgedHost] = []
        for number in range(num_hosts):
            port = f"{bridge}v{number}"[-15:]
            host = BridgedHost(f"{bridge}h{number}", f"{network}.{number + 2}", port)
            undo.enter_context(_plugged_in(host, bridge))
            hosts.append(host)
        yield tuple(hosts)


@contextmanager
def _plugged_in(host: BridgedHost, bridge: str) -> Iterator[None]:
    run("ip", "netns", "add", host.namespace)
    try:
        inside = ("ip", "-n", host.namespace)
        ends = (host.port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        run("ip", "link", "add", *ends)
        run("ip", "link", "set", host.port, "master", bridge, "up")
        run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "link", "set", "eth0", "up")
        yield
    finally:
        with suppress(subprocess.CalledProcessError):
            run("ip", "link", "del", host.port)
        run("ip", "netns", "del", host.namespace)
