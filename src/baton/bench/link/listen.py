"""`--listen`: starts a node for every runner that proves the cluster key."""

from __future__ import annotations

import errno
import select
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.bench.link.node import COMMAND
from baton.errors import BatonError, ConfigError
from baton.launch.ports import find_listener
from baton.rig.channel import Frames, authenticate_as_listener
from baton.rig.nodes import Address, NodeProcess, NodeTerms, start_node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.auth.credentials import Credentials
    from baton.clock import Clock

MAX_NODES: Final = 8
REAP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Listener:
    """Starts nodes by `command`; each of its events is one line of `log`."""

    credentials: Credentials
    clock: Clock
    log: Callable[[str], None]
    command: Sequence[str] = COMMAND

    def accept(self, listener: socket.socket, *, is_full: bool) -> NodeProcess | None:
        """Accept one connection and start its node; None if it is refused."""
        try:
            sock, peer = listener.accept()
        except OSError as exc:
            self.log(f"could not accept a connection: {exc}")
            return None
        with sock:
            if is_full:
                self.log(f"refused {peer[0]}: {MAX_NODES} processes run already")
                return None
            frames = Frames(sock, self.clock)
            try:
                authenticate_as_listener(frames, self.credentials)
            except BatonError as exc:
                self.log(f"refused {peer[0]}: {exc}")
                return None
            # The other node can reach this one at the address that the runner connected to.
            keys = None if frames.session is None else frames.session.keys
            terms = NodeTerms(
                self.credentials.key.secret.hex(), sock.getsockname()[0], session_keys=keys
            )
            self.log(f"a process for {peer[0]}")
            return start_node(sock, terms, self.command)


def listen(address: Address, accepting: Listener) -> None:
    """Serve runners until Ctrl-C, which kills all nodes.

    A connection without the key delays the others by at most the handshake's timeout.

    Raises:
        ConfigError: the port is taken, or this process may not listen there.
    """
    nodes: list[NodeProcess] = []
    log = accepting.log
    with _open(address) as listener:
        port = listener.getsockname()[1]
        log(f"listening on {Address(address.host, port)}; end with Ctrl-C")
        try:
            while True:
                nodes = _reap(nodes)
                if select.select([listener], [], [], REAP_S)[0]:
                    node = accepting.accept(listener, is_full=len(nodes) >= MAX_NODES)
                    nodes += [] if node is None else [node]
        finally:
            for node in nodes:
                node.kill()


def _open(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            holder = find_listener(address.port) or "a process of another user"
            raise ConfigError(
                f"cannot listen on {address}: the port is taken by {holder}; choose another"
            ) from exc
        raise ConfigError(f"cannot listen on {address}: {exc.strerror or exc}") from exc


def _reap(nodes: list[NodeProcess]) -> list[NodeProcess]:
    running = [node for node in nodes if not node.has_ended]
    for node in nodes:
        if node not in running:
            node.end()
    return running
