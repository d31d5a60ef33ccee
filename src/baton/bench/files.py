"""Results → files. A result is not lost because a disk is full."""

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
    """A result is not where it should be; the message says where it is instead."""


def check_writable(path: Path) -> None:
    """Pass, or refuse before an hour of measuring rather than after it.

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
    """Write a result as JSON, whole or not at all.

    Raises:
        NotSavedError: it could not be; it may lie in the folder for temporary files.
    """
    data = msgspec.json.encode(result)
    try:
        _write_whole(path, data)
    except OSError as exc:
        raise NotSavedError(
            f"could not write {path}: {exc.strerror}; {_save_elsewhere(path, data)}"
        ) from exc


class LineFile:
    """Writes a JSON line for each thing, as it comes; stops at the first error, which is kept.

    Open at once: what cannot be written is refused before a run.
    """

    def __init__(self, path: Path) -> None:
        check_writable(path)
        try:
            self._file: FileIO | None = path.open("wb", buffering=0)
        except OSError as exc:
            raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc
        self._path, self._encode = path, msgspec.json.Encoder().encode
        self.problem: str | None = None

    def append(self, line: msgspec.Struct) -> None:
        """One more."""
        if self._file is None:
            return
        data = self._encode(line) + b"\n"
        try:
            num_written = self._file.write(data)
        except OSError as exc:
            self._give_up(exc.strerror)
            return
        if num_written != len(data):
            self._give_up(os.strerror(errno.ENOSPC))

    def _give_up(self, reason: str | None) -> None:
        self.problem = f"could not write {self._path}: {reason}; later lines are missing"
        self.close()

    def close(self) -> None:
        """No more. May be called again."""
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
    """One run's circumstances. `machine` is the client's; its load is that before the run.

    `command` has the command line's arguments: no secret may ever be one.
    """

    baton: str
    started_at: str
    command: tuple[str, ...]
    machine: Machine
    load_after: tuple[float, float, float]


def open_manifest(command: Sequence[str], clock: Clock) -> RunManifest:
    """As it is now, before anything runs."""
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
    """The same, after the run."""
    return msgspec.structs.replace(manifest, load_after=os.getloadavg())
