"""Results → files, also when a disk is full; and the circumstances of a run."""

from __future__ import annotations

import errno
import os
import tempfile
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from baton import __version__
from baton.errors import BatonError, ConfigError
from baton.rig.machine import Machine, describe_machine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from io import FileIO
    from pathlib import Path

    from baton.clock import Clock


class NotSavedError(BatonError):
    """A result could not be saved; the message names the temporary file that has it, if any."""


def check_writable(path: Path) -> None:
    """Fail before an hour of measuring rather than after it.

    Raises:
        ConfigError: nothing can be written there.
    """
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it")
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied")


def save_result(path: Path, result: msgspec.Struct) -> None:
    """Write a result as JSON, completely or not at all.

    Raises:
        NotSavedError: it failed; the result may be in the folder for temporary files.
    """
    data = msgspec.json.encode(result)
    try:
        _write_whole(path, data)
    except OSError as exc:
        raise NotSavedError(
            f"could not write {path}: {exc.strerror}; {_save_elsewhere(path, data)}"
        ) from exc


class LineFile:
    """Writes JSON lines; stops at the first error, which is in `problem`.

    The file is opened at once, so that it fails before a run; the first line replaces older ones.
    """

    def __init__(self, path: Path) -> None:
        check_writable(path)
        try:
            self._file: FileIO | None = path.open("ab", buffering=0)
        except OSError as exc:
            raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc
        self._path, self._encode = path, msgspec.json.Encoder().encode
        self._is_older = path.is_file()  # a pipe or a device cannot be emptied
        self.problem: str | None = None

    def append(self, line: msgspec.Struct) -> None:
        """Write one line."""
        if self._file is None:
            return
        data = self._encode(line) + b"\n"
        try:
            if self._is_older:
                self._file.truncate(0)
                self._is_older = False
            num_written = self._file.write(data)
        except OSError as exc:
            self._fail(exc.strerror)
            return
        if num_written != len(data):
            self._fail(os.strerror(errno.ENOSPC))

    def _fail(self, reason: str | None) -> None:
        self.problem = f"could not write {self._path}: {reason}; later lines are missing"
        self.close()

    def close(self) -> None:
        """Close the file; may be called again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _write_whole(path: Path, data: bytes) -> None:
    if path.exists() and not path.is_file():  # a pipe or device is written to, never replaced
        path.write_bytes(data)
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _save_elsewhere(path: Path, data: bytes) -> str:
    try:
        number, name = tempfile.mkstemp(prefix="baton-", suffix=f"-{path.name}")
        with os.fdopen(number, "wb") as file:
            file.write(data)
    except OSError as exc:
        return f"nor to the folder for temporary files ({exc.strerror}): free some space"
    return f"it is in {name} instead: free some space, and move it"


class RunManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Circumstances of one run. `machine` is the client's, with its load before the run.

    `command` holds the command line's arguments, which must never be secret.
    """

    baton: str
    started_at: str
    command: tuple[str, ...]
    machine: Machine
    load_after: tuple[float, float, float]


def open_manifest(command: Sequence[str], clock: Clock) -> RunManifest:
    """The circumstances before a run."""
    machine = describe_machine()
    started_at = datetime.fromtimestamp(clock.unix_now(), UTC).isoformat(timespec="seconds")
    return RunManifest(
        baton=__version__,
        started_at=started_at,
        command=tuple(command),
        machine=machine,
        load_after=machine.load,
    )


def close_manifest(manifest: RunManifest) -> RunManifest:
    """The circumstances after the run."""
    return msgspec.structs.replace(manifest, load_after=os.getloadavg())
