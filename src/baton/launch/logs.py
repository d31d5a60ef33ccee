"""Log files of bounded size: written by the launcher, read by `baton logs`."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MAX_LOG_BYTES: Final = 8 << 20
"""Of a file; the one before it is kept as well, as NAME.log.1."""
MAX_OPEN_LOGS: Final = 64
"""As many are kept besides: of workers that the launch does not have any more."""
FOLLOW_S: Final = 0.2
MAX_TAIL_BYTES: Final = 1 << 20
LAUNCHER: Final = "launcher"


def log_path(logs: Path, name: str) -> Path:
    """Where a process's lines are."""
    return logs / f"{name}.log"


def log_names(logs: Path) -> list[str]:
    """The processes of which there are lines, sorted."""
    return sorted(path.stem for path in logs.glob("*.log"))


class LogFile:
    """Lines of one process. Owned by the launcher's event loop.

    A disk that is full costs lines, not the launch: whoever did not read a process's output would
    block it.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._is_standard_error = False
        self._fd = _open_log(path)
        self._num_bytes = os.fstat(self._fd).st_size

    def write_line(self, line: str) -> None:
        """Add a line; begin a new file, if this one is full."""
        data = f"{line}\n".encode(errors="replace")
        with suppress(OSError):
            if self._num_bytes + len(data) > self._max_bytes and self._num_bytes:
                self._rotate()
            self._num_bytes += os.write(self._fd, data)

    def take_standard_error(self) -> None:
        """From now on this process's standard error is added too."""
        self._is_standard_error = True
        os.dup2(self._fd, 2)

    def close(self) -> None:
        """No more lines."""
        os.close(self._fd)

    def _rotate(self) -> None:
        with suppress(FileNotFoundError):  # the new file could not be opened the last time
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        fd = _open_log(self._path)
        os.close(self._fd)
        self._fd, self._num_bytes = fd, 0
        if self._is_standard_error:
            os.dup2(fd, 2)


class LogFolder:
    """The log files of one launch. Owned by the launcher's event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, LogFile] = {}

    def write_line(self, name: str, line: str) -> None:
        """Add a line to a process's log, if that can be written."""
        with suppress(OSError):  # see `LogFile`
            self.file(name).write_line(line)

    def file(self, name: str) -> LogFile:
        """A process's log, made at its first line."""
        found = self._files.get(name)
        if found is None:
            found = self._files[name] = LogFile(log_path(self._path, name))
            self._remove_old()
        return found

    def _remove_old(self) -> None:
        """Close and remove the logs of workers that were replaced long ago."""
        for name in list(self._files)[:-MAX_OPEN_LOGS]:
            if name != LAUNCHER:
                self._files.pop(name).close()
        closed = [path for path in self._path.glob("*.log") if path.stem not in self._files]
        for path in sorted(closed, key=lambda each: each.stat().st_mtime)[:-MAX_OPEN_LOGS]:
            for each in (path, path.with_name(f"{path.name}.1")):
                each.unlink(missing_ok=True)


async def read_lines(path: Path, num_lines: int, *, follow: bool) -> AsyncIterator[str]:
    """The last lines of a log and, with `follow`, those that come, without end.

    Raises:
        OSError: it cannot be read.
    """
    file = path.open("rb")
    try:
        before = path.with_name(f"{path.name}.1")
        lines = _read_tail(file)
        if len(lines) < num_lines:
            with suppress(FileNotFoundError), before.open("rb") as older:
                lines = [*_read_tail(older), *lines]
        for line in lines[-num_lines:] if num_lines else []:
            yield line
        rest = b""
        while follow:
            if (chunk := file.read(MAX_TAIL_BYTES)) or not _is_rotated(file, path):
                *whole, rest = (rest + chunk).split(b"\n")
                for raw in whole:
                    yield raw.decode(errors="replace")
                if not chunk:
                    await asyncio.sleep(FOLLOW_S)
            else:
                file.close()
                file = path.open("rb")
    finally:
        file.close()


def _read_tail(file: BinaryIO) -> list[str]:
    """The lines at a file's end, which is where it is read on from."""
    num_bytes = file.seek(0, os.SEEK_END)
    start = max(0, num_bytes - MAX_TAIL_BYTES)
    file.seek(start)
    lines = file.read(num_bytes - start).decode(errors="replace").split("\n")
    return lines[1 if start else 0 : -1]  # behind the last line's end there is nothing


def _is_rotated(file: BinaryIO, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    return False  # it is gone: the fleet's next launch makes another one


def _open_log(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    return os.open(path, flags, 0o600)
