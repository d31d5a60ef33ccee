"""Where the processes of a pair come from: child processes here, or listeners on other hosts."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Annotated, Final, Protocol

import msgspec

from baton.errors import AuthenticationError, ConfigError, PeerLostError, PeerUnreachableError
from baton.net.parent_process import exit_with_parent
from baton.rig.channel import Channel, Frames, authenticate_as_dialer, runner_channel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.auth.credentials import Credentials
    from baton.clock import Clock
    from baton.rig.backend import Command, Reply, Role

CONNECT_TIMEOUT_S: Final = 5.0
EXIT_TIMEOUT_S: Final = 2.0
LOOPBACK: Final = "127.0.0.1"
MAX_STDERR_BYTES: Final = 2000
TRANSPORT_NODE: Final = (sys.executable, "-m", "baton.rig.node")
"""A node that knows the registered transports."""


class NodeTerms(msgspec.Struct, frozen=True):
    """What a node reads from standard input: the key is never on a command line.

    `network_of`: None the host's network, 0 a new namespace, else that of this process id.
    `session_keys`: of the connection (`Session.keys`), where another host dialed it.
    """

    key_hex: str
    host: str
    network_of: Annotated[int, msgspec.Meta(ge=0)] | None = None
    session_keys: tuple[bytes, bytes] | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """Where a remote host listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Node(Protocol):
    """One process of a pair, as the runner sees it."""

    channel: Channel[Command, Reply]

    @property
    def pid(self) -> int | None:
        """Its process id, where it runs on this host."""
        ...

    def last_error(self) -> str:
        """The last line of its standard error, where that can be read."""
        ...

    def close(self) -> None:
        """Close the channel and make sure that the process ends."""
        ...


class Nodes(Protocol):
    """Starts both processes of a pair."""

    is_local: bool

    def check(self) -> None:
        """Before anything is measured: whether nodes can be started.

        Raises:
            ConfigError: a listener cannot be reached.
            AuthenticationError: it does not hold the same cluster key.
        """
        ...

    def open(self, role: Role, network_of: int | None) -> Node:
        """Start a new process for this role; see `NodeTerms` for `network_of`.

        Raises:
            PeerUnreachableError: the listener does not answer.
            AuthenticationError: it does not hold the same cluster key.
        """
        ...


class LocalNodes:
    """Both processes are children of this one, with a key made for them alone."""

    is_local = True

    def __init__(self, clock: Clock, command: Sequence[str] = TRANSPORT_NODE) -> None:
        self._clock, self._command = clock, command
        self._key_hex = secrets.token_hex(32)

    def check(self) -> None:
        """See `Nodes`."""

    def open(self, role: Role, network_of: int | None) -> Node:
        """See `Nodes`."""
        del role
        ours, theirs = socket.socketpair()
        with theirs:
            terms = NodeTerms(self._key_hex, LOOPBACK, network_of)
            process = start_node(theirs, terms, self._command)
        return LocalNode(process, Frames(ours, self._clock))


class LocalNode:
    """See `Node`."""

    def __init__(self, process: NodeProcess, frames: Frames) -> None:
        self.channel = runner_channel(frames)
        self._process = process
        self.last_error = process.read_last_line

    @property
    def pid(self) -> int | None:
        """See `Node`."""
        return self._process.pid

    def close(self) -> None:
        """See `Node`."""
        self.channel.close()
        self._process.end()


class RemoteNodes:
    """The processes are children of two listeners, which hold the cluster key."""

    is_local = False

    def __init__(
        self, driver: Address, owner: Address, credentials: Credentials, clock: Clock
    ) -> None:
        self._addresses: dict[Role, Address] = {"driver": driver, "owner": owner}
        self._credentials, self._clock = credentials, clock

    def check(self) -> None:
        """See `Nodes`."""
        for role in self._addresses:
            try:
                self.open(role, None).close()
            except PeerUnreachableError as exc:
                raise ConfigError(str(exc)) from exc

    def open(self, role: Role, network_of: int | None) -> Node:
        """See `Nodes`."""
        if network_of is not None:
            raise ConfigError("the processes of a listener stay in their host's network")
        address = self._addresses[role]
        try:
            sock = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)
        except OSError as exc:
            raise PeerUnreachableError(
                f"nothing answers at {address} ({exc}); start it there: "
                f"baton bench link --listen {address}"
            ) from exc
        frames = Frames(sock, self._clock)
        try:
            authenticate_as_dialer(frames, self._credentials)
        except PeerLostError as exc:
            frames.close()
            raise AuthenticationError(
                f"{address} hung up ({exc}): is it `baton bench link --listen`, "
                "with the same cluster key?"
            ) from exc
        except BaseException:
            frames.close()
            raise
        return RemoteNode(frames)


class RemoteNode:
    """See `Node`. The process ends when its connection is closed."""

    pid = None

    def __init__(self, frames: Frames) -> None:
        self.channel = runner_channel(frames)
        self.close = frames.close

    def last_error(self) -> str:
        """See `Node`: it is on the other host's terminal."""
        return ""


class NodeProcess:
    """A node's process: leader of its own session, so that Ctrl-C on the terminal spares it."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: IO[bytes]) -> None:
        self._process, self._stderr = process, stderr

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has ended; reaps it."""
        return self._process.poll() is not None

    def read_last_line(self) -> str:
        """The last line of its standard error, and the signal that killed it, if one did."""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - MAX_STDERR_BYTES))
        lines = self._stderr.read().decode(errors="replace").split("\n")
        parts = [next((line.strip() for line in reversed(lines) if line.strip()), "")]
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(EXIT_TIMEOUT_S)
            parts += [f"killed by {signal.Signals(-code).name}"] if code < 0 else []
        return ", ".join(text for text in reversed(parts) if text)

    def end(self) -> None:
        """After its channel was closed: wait a moment, then kill it and all its children."""
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except BaseException as exc:
            self.kill()
            if not isinstance(exc, subprocess.TimeoutExpired):
                raise
        finally:
            self._stderr.close()

    def kill(self) -> None:
        """Kill it and all its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def start_node(
    sock: socket.socket, terms: NodeTerms, command: Sequence[str] = TRANSPORT_NODE
) -> NodeProcess:
    """Start a node that runs the commands on `sock`, which the caller may close.

    It is killed when this process ends.
    """
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
    process = subprocess.Popen(  # noqa: S603 - this program, a number
        [*command, "--fd", str(sock.fileno())],
        stdin=subprocess.PIPE,
        stdout=stderr,
        stderr=stderr,
        pass_fds=(sock.fileno(),),
        start_new_session=True,
        preexec_fn=partial(exit_with_parent, os.getpid()),  # noqa: PLW1509 - it takes no lock
    )
    if process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin as stdin:  # died: the channel reports it
            stdin.write(msgspec.json.encode(terms))
    return NodeProcess(process, stderr)
