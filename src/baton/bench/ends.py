"""Where the processes of a pair come from: started here, or by listening ends on other hosts."""

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
from typing import IO, TYPE_CHECKING, Final, Protocol

import msgspec

from baton.bench.channel import Frames, conductors_end, prove_as_dialer
from baton.bench.part import Terms
from baton.errors import AuthenticationError, ConfigError, PeerLostError, PeerUnreachableError

if TYPE_CHECKING:
    from baton.auth.key import ClusterKey
    from baton.bench.channel import Channel
    from baton.bench.contender import Role
    from baton.bench.orders import Answer, Order
    from baton.clock import Clock

CONNECT_TIMEOUT_S: Final = 5.0
END_TIMEOUT_S: Final = 2.0
LOOPBACK: Final = "127.0.0.1"
MAX_SAID_BYTES: Final = 2000


@dataclass(frozen=True, slots=True)
class Address:
    """A listening end."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class End(Protocol):
    """One process of a pair, as the conductor has it."""

    channel: Channel[Order, Answer]

    @property
    def pid(self) -> int | None:
        """Its process id, where it runs on this host."""
        ...

    def explain(self) -> str:
        """What it said last on its standard error, if that can be seen."""
        ...

    def close(self) -> None:
        """Hang up, and see to it that the process ends."""
        ...


class Ends(Protocol):
    """Where both processes of a pair come from."""

    is_local: bool

    def check(self) -> None:
        """Before anything is measured.

        Raises:
            ConfigError: a listening end cannot be reached.
            AuthenticationError: it does not hold the same cluster key.
        """
        ...

    def open(self, role: Role, network_of: int | None) -> End:
        """A fresh process for this role; see `Terms` for `network_of`.

        Raises:
            PeerUnreachableError: the listening end does not answer.
            AuthenticationError: it does not hold the same cluster key.
        """
        ...


class LocalEnds:
    """Both processes are children of this one, and use a key that nobody else has."""

    is_local = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._key_hex = secrets.token_hex(32)

    def check(self) -> None:
        """See `Ends`: children can always be started."""

    def open(self, role: Role, network_of: int | None) -> End:
        """See `Ends`."""
        del role
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_part(theirs, Terms(self._key_hex, LOOPBACK, network_of))
        return LocalEnd(process, Frames(ours, self._clock))


class LocalEnd:
    """See `End`."""

    def __init__(self, process: PartProcess, frames: Frames) -> None:
        self.channel = conductors_end(frames)
        self._process = process

    @property
    def pid(self) -> int | None:
        """See `End`."""
        return self._process.pid

    def explain(self) -> str:
        """See `End`."""
        return self._process.read_last_line()

    def close(self) -> None:
        """See `End`."""
        self.channel.close()
        self._process.end()


class RemoteEnds:
    """The processes are children of two listening ends, which hold the cluster key."""

    is_local = False

    def __init__(self, driver: Address, owner: Address, key: ClusterKey, clock: Clock) -> None:
        self._addresses: dict[Role, Address] = {"driver": driver, "owner": owner}
        self._key, self._clock = key, clock

    def check(self) -> None:
        """See `Ends`."""
        for role in self._addresses:
            try:
                self.open(role, None).close()
            except PeerUnreachableError as exc:
                raise ConfigError(str(exc)) from exc

    def open(self, role: Role, network_of: int | None) -> End:
        """See `Ends`."""
        if network_of is not None:
            raise ConfigError("a listening end's processes stay in their host's network")
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
            prove_as_dialer(frames, self._key)
        except PeerLostError as exc:
            frames.close()
            raise AuthenticationError(
                f"{address} hung up ({exc}): is it `baton bench link --listen`, "
                "with the same cluster key?"
            ) from exc
        except BaseException:
            frames.close()
            raise
        return RemoteEnd(frames)


class RemoteEnd:
    """See `End`. The process ends when it is hung up on."""

    def __init__(self, frames: Frames) -> None:
        self.channel = conductors_end(frames)

    @property
    def pid(self) -> int | None:
        """See `End`."""
        return None

    def explain(self) -> str:
        """See `End`: that is on the other host's terminal."""
        return ""

    def close(self) -> None:
        """See `End`."""
        self.channel.close()


class PartProcess:
    """A running `baton.bench.part`, leader of a session that the terminal's Ctrl-C spares."""

    def __init__(self, process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
        self._process, self._said = process, said

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_over(self) -> bool:
        """Whether it has ended; reaps it."""
        return self._process.poll() is not None

    def read_last_line(self) -> str:
        """The last line on its standard error, and its signal if one killed it."""
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - MAX_SAID_BYTES))
        lines = self._said.read().decode(errors="replace").split("\n")
        said = [next((line.strip() for line in reversed(lines) if line.strip()), "")]
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(END_TIMEOUT_S)
            said += [f"killed by {signal.Signals(-code).name}"] if code < 0 else []
        return ", ".join(text for text in reversed(said) if text)

    def end(self) -> None:
        """After it was hung up on: give it a moment, then kill it and all its children."""
        try:
            self._process.wait(END_TIMEOUT_S)
        except BaseException as exc:
            self.kill()
            if not isinstance(exc, subprocess.TimeoutExpired):
                raise
        finally:
            self._said.close()

    def kill(self) -> None:
        """End it, and all its children, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def start_part(sock: socket.socket, terms: Terms) -> PartProcess:
    """Start a process that obeys the orders on `sock`, which the caller may close."""
    said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
    process = subprocess.Popen(  # noqa: S603 - this program, a number
        [sys.executable, "-m", "baton.bench.part", "--fd", str(sock.fileno())],
        stdin=subprocess.PIPE,
        stdout=said,
        stderr=said,
        pass_fds=(sock.fileno(),),
        start_new_session=True,
    )
    if process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin as stdin:  # died: it is heard on the socket
            stdin.write(msgspec.json.encode(terms))
    return PartProcess(process, said)
