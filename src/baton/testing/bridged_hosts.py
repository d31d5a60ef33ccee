"""Several hosts on one switch, as far as the network is concerned, and whose packets are lost.

Each is a network namespace on a bridge. What one sends to another can be lost in that direction
alone, in silence, as in a partition: the sender is given a link address that no host has. This
takes no packet filter, so it works on any kernel that has namespaces.

Needs CAP_NET_ADMIN and iproute2; without them it raises `NoNamespaceError`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.testing.far_network import NoNamespaceError, run

if TYPE_CHECKING:
    from collections.abc import Iterator

UNUSED_LINK_ADDRESS: Final = "02:00:00:00:de:ad"
RECEIVE_TIMEOUT_S: Final = 0.3
_CLONE_NEWNET: Final = 0x40000000
_NUMBERS: Final = itertools.count()
_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class BridgedHost:
    """One host: its namespace and its address. This process reaches it over the bridge."""

    namespace: str
    address: str

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

    def open_socket(self) -> socket.socket:
        """A datagram socket of that host, for this process."""
        with ThreadPoolExecutor(1) as elsewhere:  # a thread of its own: it moves there, and ends
            return elsewhere.submit(self._open_there).result()

    def _open_there(self) -> socket.socket:
        with Path(f"/run/netns/{self.namespace}").open("rb") as namespace:
            if _libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


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
    # Of those that RFC 2544 keeps for measuring; another third of them than `far_host` takes.
    network = f"198.19.{os.getpid() % 250}"
    with ExitStack() as undo:
        try:
            run("ip", "link", "add", bridge, "type", "bridge")
        except (OSError, subprocess.CalledProcessError) as exc:
            stderr = exc.stderr.decode(errors="replace") if hasattr(exc, "stderr") else str(exc)
            raise NoNamespaceError(f"cannot make a bridge: {stderr.strip()}") from exc
        undo.callback(run, "ip", "link", "del", bridge)
        run("ip", "addr", "add", f"{network}.1/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        hosts: list[BridgedHost] = []
        for number in range(num_hosts):
            host = BridgedHost(f"{bridge}h{number}", f"{network}.{number + 2}")
            undo.enter_context(_plugged_in(host, bridge, f"{bridge}v{number}"[-15:]))
            hosts.append(host)
        yield tuple(hosts)


@contextmanager
def _plugged_in(host: BridgedHost, bridge: str, port: str) -> Iterator[None]:
    run("ip", "netns", "add", host.namespace)
    try:
        inside = ("ip", "-n", host.namespace)
        ends = (port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        run("ip", "link", "add", *ends)
        run("ip", "link", "set", port, "master", bridge, "up")
        run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "link", "set", "eth0", "up")
        yield
    finally:
        with suppress(subprocess.CalledProcessError):
            run("ip", "link", "del", port)
        run("ip", "netns", "del", host.namespace)
