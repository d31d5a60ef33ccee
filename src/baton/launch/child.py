"""One process: spawn, announcements, log lines, exit."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from baton.launch.announcement import Announcement, Loading, Ready, read_announcement

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable, Mapping, Sequence

PR_SET_PDEATHSIG: Final = 1
NUM_LAST_LINES: Final = 20
MAX_LINE_BYTES: Final = 64 * 1024

_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """A running process of ours, in a session of its own. Owned by the launcher's event loop.

    A session of its own keeps the terminal's Ctrl-C from it: the launcher alone decides how it
    ends. `url` and `ready` are set by its announcements, and fail when it ends before them.
    """

    def __init__(self, name: str, process: Process) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.pid = process.pid
        self.url: asyncio.Future[str] = loop.create_future()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._process = process
        self._readers: list[asyncio.Task[None]] = []

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet, as far as was noticed."""
        return self._process.returncode is None

    def follow(self, announcements: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
        """Start to read what it says, until it ends."""
        output = self._process.stdout
        if output is None:
            raise RuntimeError("the child was spawned without a pipe for its output")
        self._readers = [
            asyncio.create_task(self._read_announcements(announcements)),
            asyncio.create_task(self._read_lines(output, on_line)),
        ]

    async def wait(self) -> int:
        """Until it has ended and everything it said was read: its return code."""
        returncode = await self._process.wait()
        # A grandchild could hold the pipes open for ever: what is in them is read, no more.
        await asyncio.wait(self._readers, timeout=1.0)
        for reader in self._readers:
            reader.cancel()
        for future in (self.url, self.ready):
            future.cancel()
        return returncode

    def terminate(self) -> None:
        """Ask it to drain and end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, and all processes of its session's group, at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def _read_announcements(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self._apply(read_announcement(line))

    def _apply(self, announcement: Announcement) -> None:
        match announcement:
            case Loading(url):
                self._set_url(url)
            case Ready():
                self._set_url(announcement.url)
                if not self.ready.done():
                    self.ready.set_result(announcement)

    def _set_url(self, url: str | None) -> None:
        if url is not None and not self.url.done():
            self.url.set_result(url)

    async def _read_lines(
        self, stream: asyncio.StreamReader, on_line: Callable[[str], None]
    ) -> None:
        while raw := await _read_line(stream):
            line = raw.decode(errors="replace").rstrip("\n")
            self.last_lines.append(line)
            on_line(line)


async def spawn(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
) -> Child:
    """Start a process that ends when this one does; `--announce-fd` is added to its command.

    Raises:
        OSError: the process could not be started.
    """
    read_fd, write_fd = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            "--announce-fd",
            str(write_fd),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=environment,
            pass_fds=(write_fd,),
            start_new_session=True,
            limit=MAX_LINE_BYTES,
            # Runs between fork and exec, where only async-signal-safe calls are allowed: prctl
            # is one, and its symbol was looked up when this module was imported.
            preexec_fn=_die_with_parent,
        )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    child = Child(name, process)
    child.follow(await _open_pipe(read_fd), on_line)
    return child


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def _open_pipe(fd: int) -> asyncio.StreamReader:
    stream = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(fd, "rb")
    )
    return stream


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """The next line, or the part of an endless one that fits; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as exc:
        return exc.partial
    except asyncio.LimitOverrunError as exc:
        return await stream.readexactly(exc.consumed)
