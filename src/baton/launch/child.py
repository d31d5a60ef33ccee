"""One process: spawn, status messages, log lines, exit and its probable cause."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

from baton.errors import ProtocolError
from baton.net.parent_process import exit_with_parent
from baton.telemetry.process_status import Draining, Loading, ProcessStatus, Ready, read_status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NUM_LAST_LINES: Final = 20
MAX_LINE_BYTES: Final = 64 * 1024
READ_REST_TIMEOUT_S: Final = 1.0
REAPED_POLL_S: Final = 0.005
MAX_KILL_ROUNDS: Final = 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChildExited:
    """A process is over. A negative `returncode` is the signal that killed it."""

    returncode: int


class Child:
    """A running process of ours, in a session of its own. Owned by the launcher's event loop.

    A session of its own keeps the terminal's Ctrl-C from it: the launcher alone decides how it
    ends. The `until_*` methods may be awaited by many, and cancelled. `phase` is what takes the
    time while it loads, where it reports that. `preempted`: its machine will be taken, and why.
    """

    def __init__(
        self,
        name: str,
        process: Process,
        status_messages: _Pipe,
        on_line: Callable[[str], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self.phase: str | None = None
        self.preempted: str | None = None
        self._process = process
        self._url: asyncio.Future[str | ChildExited] = loop.create_future()
        self._ready: asyncio.Future[Ready | ChildExited] = loop.create_future()
        self._draining: asyncio.Future[float | None] = loop.create_future()
        self._ended = asyncio.create_task(self._follow(status_messages, on_line))

    @property
    def pid(self) -> int:
        """Its process id, which is its session's too."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it announced that it answers; stays true after its end."""
        return self._ready.done() and isinstance(self._ready.result(), Ready)

    @property
    def is_ended(self) -> bool:
        """Whether it has ended and all its output was read."""
        return self._ended.done()

    async def wait_for_url(self) -> str | ChildExited:
        """Until it knows where it will answer, or ends before that."""
        return await asyncio.shield(self._url)

    async def wait_until_ready(self) -> Ready | ChildExited:
        """Until it answers, or ends before that."""
        return await asyncio.shield(self._ready)

    async def wait_until_draining(self) -> float | None:
        """Until it drains, or has ended: within how many seconds it ends, where it reports that."""
        return await asyncio.shield(self._draining)

    async def wait_until_exited(self) -> ChildExited:
        """Until it has ended and all its output was read."""
        return await asyncio.shield(self._ended)

    async def wait_until_stopped(self) -> str:
        """Until it has ended as it was asked to: how, in words.

        One that loads has nothing to drain and handles no signal: SIGTERM ends it at once.
        """
        returncode = (await self.wait_until_exited()).returncode
        if returncode == -signal.SIGTERM and not self.is_ready:
            return "was still starting"
        return describe_exit(returncode)

    def terminate(self) -> None:
        """Ask it to drain and end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, and all processes of its session, at once."""
        self._signal(signal.SIGKILL)
        if self._process.returncode is None:
            kill_session(self.pid)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _follow(self, status_messages: _Pipe, on_line: Callable[[str], None]) -> ChildExited:
        readers = [asyncio.create_task(self._read_status_messages(status_messages.stream))]
        if self._process.stdout is not None:
            readers.append(asyncio.create_task(self._read_lines(self._process.stdout, on_line)))
        ended = ChildExited(await _wait_for_exit(self._process))
        kill_session(self.pid)
        # Who left the session could hold the pipes open without limit: what is in them is read.
        await asyncio.wait(readers, timeout=READ_REST_TIMEOUT_S)
        for reader in readers:
            reader.cancel()
        status_messages.close()
        if not self._url.done():
            self._url.set_result(ended)
        if not self._ready.done():
            self._ready.set_result(ended)
        if not self._draining.done():
            self._draining.set_result(None)
        return ended

    async def _read_status_messages(self, stream: asyncio.StreamReader) -> None:
        while line := await read_line(stream):
            try:
                self._apply(read_status(line))
            except ProtocolError as exc:
                log.warning("%s: %s", self.name, exc)

    def _apply(self, status: ProcessStatus) -> None:
        match status:
            case Loading():
                self._set_url(status.url)
                self.phase = status.phase
            case Ready():
                self._set_url(status.url)
                if not self._ready.done():
                    self._ready.set_result(status)
            case Draining(timeout_s, preempted):
                if preempted is not None:  # else it was our signal
                    self.preempted = preempted
                if not self._draining.done():
                    self._draining.set_result(timeout_s)
            case _:
                assert_never(status)

    def _set_url(self, url: str | None) -> None:
        if url is not None and not self._url.done():
            self._url.set_result(url)

    async def _read_lines(
        self, stream: asyncio.StreamReader, on_line: Callable[[str], None]
    ) -> None:
        while raw := await read_line(stream):
            line = raw.decode(errors="replace").rstrip("\n")
            self.last_lines.append(line)
            on_line(line)


async def _wait_for_exit(process: Process) -> int:
    """Its exit status, as soon as it has one.

    By its pidfd: asyncio's own `wait`, in Python 3.11, returns when no process holds its pipes any
    more, and a process that it started and left behind holds them.
    """
    with suppress(ProcessLookupError):  # asyncio has reaped it
        pidfd = os.pidfd_open(process.pid)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        try:
            loop.add_reader(pidfd, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
    while process.returncode is None:  # noqa: ASYNC110 - asyncio's thread is about to report it
        await asyncio.sleep(REAPED_POLL_S)
    return process.returncode


def kill_session(session: int) -> None:
    """End every process of a session, whatever its group and its parent.

    A worker's children tie themselves to it once they run; this reaches those that did not yet.
    """
    for _ in range(MAX_KILL_ROUNDS):  # some may be forking meanwhile
        members = list_session(session)
        if not members:
            return
        for pid in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def list_session(session: int) -> list[int]:
    """Processes of a session that are not dead: fields 3 and 6 of proc(5)'s `stat`."""
    members = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in {"Z", "X"}:
                members.append(int(folder.name))
    return members


async def spawn(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
    *,
    inherited: Sequence[int] = (),
) -> Child:
    """Start a process that ends when this one does; `--status-fd` is added to its command.

    `inherited` are file descriptors that it gets, under the same numbers.

    Raises:
        OSError: the process could not be started.
    """
    read_fd, write_fd = os.pipe()
    try:
        status_messages = await _open_pipe(read_fd)
        process = await _start(command, environment, (write_fd, *inherited), status_messages)
    finally:
        os.close(write_fd)
    # Nothing is awaited from here on: a process that exists always has a `Child` that ends it.
    return Child(name, process, status_messages, on_line)


async def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    fds: tuple[int, ...],
    status_messages: _Pipe,
) -> Process:
    try:
        pid_fd, own_pid_fd = os.pipe()
    except OSError:
        status_messages.close()
        raise
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            "--status-fd",
            str(fds[0]),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=environment,
            pass_fds=fds,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
            # Runs in the child before exec: it takes no lock that another thread could hold.
            preexec_fn=partial(_prepare, os.getpid(), own_pid_fd),
        )
    except BaseException:
        status_messages.close()
        _end_unwatched(pid_fd)
        raise
    finally:
        os.close(pid_fd)
        os.close(own_pid_fd)


def _prepare(parent_pid: int, pid_fd: int) -> None:
    """In a child before exec: see `exit_with_parent`, and report that it exists."""
    exit_with_parent(parent_pid)
    os.write(pid_fd, os.getpid().to_bytes(8, "little"))


def _end_unwatched(pid_fd: int) -> None:
    """End the process that was started, if there is one: asyncio could not watch it.

    It takes the thread or descriptor with which it watches a process only after the fork.
    """
    os.set_blocking(pid_fd, False)
    with suppress(BlockingIOError, ChildProcessError):
        pid = int.from_bytes(os.read(pid_fd, 8), "little")
        if pid and os.waitpid(pid, os.WNOHANG) == (0, 0):
            kill_session(pid)
            os.waitpid(pid, 0)


@dataclass(frozen=True, slots=True)
class _Pipe:
    """The reading end of a pipe."""

    stream: asyncio.StreamReader
    transport: asyncio.ReadTransport

    def close(self) -> None:
        self.transport.close()


async def _open_pipe(fd: int) -> _Pipe:
    stream = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(fd, "rb")
    )
    return _Pipe(stream, transport)


async def read_line(stream: asyncio.StreamReader) -> bytes:
    """The next line, or the part of an endless one that fits; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as exc:
        return exc.partial
    except asyncio.LimitOverrunError as exc:
        return await stream.readexactly(exc.consumed)


CAUSES: Final = (
    ("Address already in use", "another process listens on the port; choose one with --port"),
    ("No module named", "a dependency is missing; run `make up`, which installs what is needed"),
    ("out of memory", "not enough memory; set engine.kv_cache_bytes or engine.num_blocks lower"),
    ("MemoryError", "not enough memory; set engine.kv_cache_bytes or engine.num_blocks lower"),
    ("can't allocate memory", "not enough memory; set engine.kv_cache_bytes lower"),
    ("Permission denied", "a file or port may not be opened by this user"),
    ("No space left on device", "a disk or memory file system is full"),
)


def describe_exit(returncode: int) -> str:
    """How a process ended, in words. Negative codes are signals, as `subprocess` has it."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def likely_cause(returncode: int, last_lines: Sequence[str]) -> str:
    """A guess for the person at the terminal; never empty."""
    for line in reversed(last_lines):
        for sign, cause in CAUSES:
            if sign in line:
                return cause
    match -returncode:
        case signal.SIGKILL:
            return "something killed it, often the kernel for want of memory: see `dmesg`"
        case signal.SIGSEGV | signal.SIGBUS | signal.SIGILL | signal.SIGABRT:
            return "a crash in native code, often a broken or mismatched wheel"
        case -2:
            return "its configuration was refused: see its last lines"
        case _:
            return "see its last lines; --debug shows more"
