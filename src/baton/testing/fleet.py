"""A fleet of real processes on this machine, for end-to-end tests, chaos and benchmarks.

Every process is started as a user would start it (`baton worker …`, `baton gateway …`) and is ended
by `Fleet.close`, whatever happened before.
"""

from __future__ import annotations

import http.client
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Protocol, Self
from urllib.parse import urlsplit

import msgspec

from baton.clock import Clock, MachineClock
from baton.engines.interface import ENGINE_SERVERS
from baton.errors import BatonError
from baton.telemetry.process_status import Ready, read_status

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from baton.config.sections import Role, Tls

START_TIMEOUT_S: Final = 180.0
SERVER_START_TIMEOUT_S: Final = 240.0
"""Of an engine with a server of its own, where several start at once on few cores."""
STOP_TIMEOUT_S: Final = 15.0


class FleetError(BatonError):
    """A process of the fleet did not do what the test needs; its log's end is in the message."""


class Child(Protocol):
    """What is used of a `subprocess.Popen[bytes]`."""

    stdout: IO[bytes] | None

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit status, minus the signal that ended it; None before `poll` or `wait` saw it."""
        ...

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; raises subprocess.TimeoutExpired."""
        ...


class StartChild(Protocol):
    """Starts `baton` in a session of its own, with a pipe as its standard output."""

    def __call__(
        self, arguments: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes]
    ) -> Child:
        """Start it."""
        ...


def start_command(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stderr: IO[bytes],
    prefix: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start `baton` as a user does."""
    return subprocess.Popen(  # noqa: S603 - our own command line
        [*prefix, sys.executable, "-m", "baton.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=dict(environment),
        start_new_session=True,
        bufsize=0,
    )


@dataclass(eq=False)
class FleetProcess:
    """One process. `log` is the file that gets its standard error."""

    name: str
    popen: Child
    log: Path
    clock: Clock
    ready: Ready | None = None
    start_timeout_s: float = START_TIMEOUT_S

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.popen.pid

    @property
    def url(self) -> str:
        """Where it answers."""
        if self.ready is None:
            raise FleetError(f"{self.name} is not ready")
        return self.ready.url

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.popen.poll() is None

    def wait_ready(self) -> Self:
        """Block until it announces that it answers.

        Raises:
            FleetError: it ended, or sent no line in time.
        """
        deadline = self.clock.now() + self.start_timeout_s
        pipe: IO[bytes] | None = self.popen.stdout
        while pipe is not None and self.ready is None:
            left_s = deadline - self.clock.now()
            readable, _, _ = select.select([pipe], [], [], max(0.0, left_s))
            line = pipe.readline() if readable else b""
            if not line:
                raise FleetError(f"{self.name} did not become ready\n{self.tail()}")
            status = read_status(line)
            if isinstance(status, Ready):
                self.ready = status
        return self

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it and its children.

        An engine process has a group of its own, and ends with its server, but does not stop with
        it: it gets the two signals that no process can hand on.
        """
        if not self.is_alive:
            return
        engines = _children(self.pid) if number in {signal.SIGSTOP, signal.SIGCONT} else []
        for group_or_process in (-self.pid, *engines):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(group_or_process, number)

    def stop(self) -> int:
        """Drain and end it; its exit status.

        Raises:
            FleetError: it had to be killed.
        """
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            return self.popen.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as exc:
            self.kill()
            raise FleetError(f"{self.name} did not drain\n{self.tail()}") from exc
        finally:
            self.close_pipe()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.send(signal.SIGKILL)
        self.popen.wait(STOP_TIMEOUT_S)
        self.close_pipe()

    def tail(self, num_lines: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def close_pipe(self) -> None:
        """It announces nothing any more."""
        if self.popen.stdout is not None:
            self.popen.stdout.close()


@contextmanager
def sigterm_as_ctrl_c() -> Generator[None]:
    """Within the block SIGTERM raises KeyboardInterrupt, as SIGINT does: children are ended.

    Its default action would end this process at once, and leave children that have sessions of
    their own. Nothing changes in other threads than the main one, or where the signal is handled.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass
class Fleet:
    """Processes that share a cluster key. Use as a context manager; `logs` is a folder.

    `start` starts each of them; with a `prefix` (`partial(start_command, prefix=…)`), `ip netns
    exec …` makes them those of another host.
    """

    logs: Path
    environment: Mapping[str, str]
    clock: Clock = field(default_factory=MachineClock)
    processes: list[FleetProcess] = field(default_factory=list)
    start: StartChild = start_command
    tls: Tls = "off"
    """Off, since tests and benchmarks ask workers themselves."""
    _ending: ExitStack = field(default_factory=ExitStack, init=False, repr=False)

    def __enter__(self) -> Self:
        """Nothing is started yet. SIGTERM ends this process with all that will be."""
        self._ending.enter_context(sigterm_as_ctrl_c())
        self._ending.callback(self.close)
        return self

    def __exit__(self, *_: object) -> None:
        """End every process that still lives."""
        self._ending.close()

    def start_worker(
        self,
        name: str,
        role: Role,
        settings: Mapping[str, object],
        cores: Sequence[int] = (),
    ) -> FleetProcess:
        """Start a worker, without waiting for it; `settings` are `section.key` → value.

        `worker.engine` may be any; start several before waiting for one: they load in parallel.
        """
        pinned = {"worker.cpu_affinity": list(cores)} if cores else {}
        words = ("worker", "--role", role, "--name", name)
        worker = self._start(name, words, {**settings, **pinned})
        if settings.get("worker.engine") in ENGINE_SERVERS.kinds():
            worker.start_timeout_s = SERVER_START_TIMEOUT_S
        return worker

    def start_gateway(
        self,
        prefill: Sequence[FleetProcess],
        decode: Sequence[FleetProcess],
        *,
        both: Sequence[FleetProcess] = (),
        settings: Mapping[str, object] | None = None,
    ) -> FleetProcess:
        """Start a gateway in front of workers that are ready, and wait until it is."""
        lists = {
            "gateway.port": 0,
            "gateway.prefill": [worker.url for worker in prefill],
            "gateway.decode": [worker.url for worker in decode],
            "gateway.workers": [worker.url for worker in both],
        }
        # A name of its own: `stop` gives exit statuses by name.
        name = f"gateway-{len(self.processes)}"
        gateway = self._start(name, ("gateway",), {**lists, **(settings or {})}).wait_ready()
        self._wait_serving(gateway)
        return gateway

    def stop(self) -> dict[str, int]:
        """Drain all, gateway first; exit status by name."""
        alive = [process for process in reversed(self.processes) if process.is_alive]
        return {process.name: process.stop() for process in alive}

    def close(self) -> None:
        """Kill what is left: all first, since each one takes a while to end on a busy machine."""
        for process in self.processes:
            process.send(signal.SIGKILL)
        for process in self.processes:
            if process.is_alive:
                process.kill()
            else:
                process.close_pipe()

    def _wait_serving(self, gateway: FleetProcess) -> None:
        """Until the gateway has found its workers."""
        deadline = self.clock.now() + START_TIMEOUT_S
        while get_status(f"{gateway.url}/ready") != HTTPStatus.OK:
            if self.clock.now() > deadline or not gateway.is_alive:
                raise FleetError(f"the gateway finds no workers\n{gateway.tail()}")
            select.select([], [], [], 0.05)

    def _start(
        self, name: str, command: Sequence[str], settings: Mapping[str, object]
    ) -> FleetProcess:
        words = [*command, "--status-fd", "1"]
        for key, value in {"security.tls": self.tls, **settings}.items():
            words += ["--set", f"{key}={_as_toml(value)}"]
        log = self.logs / f"{name}-{len(self.processes)}.log"
        with log.open("wb") as log_file:
            child = self.start(words, self.environment, log_file)
        process = FleetProcess(name, child, log, self.clock)
        self.processes.append(process)
        return process


def _children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for children in lists for word in children.read_text("ascii").split()]


def get_status(url: str) -> int:
    """The HTTP status of a GET of `url`; 0 without an answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=5.0)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _as_toml(value: object) -> str:
    """A value as `--set` reads it: plain strings stand alone, all else is JSON, which is TOML."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
