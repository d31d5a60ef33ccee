"""The audit log: who asked for what, when, and with what result; never a prompt or an answer."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from os.path import samestat
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE_MODE: Final = 0o600
LOOK_EVERY_S: Final = 1.0
"""By records' own times, for whether the file was rotated."""

log = logging.getLogger(__name__)


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line: JSON. `at` is Unix time, `client` the id of the API key (empty: none is needed)."""

    at: float
    request_id: str
    client: str
    tenant: str
    address: str
    path: str
    model: str
    mode: str
    status: int
    duration_s: float


class AuditLog:
    """Appends to a file that this process keeps open. Owner: the event loop's thread.

    The file is opened anew where its path names another one, or none: after a rotation.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, for its owner alone.

        Raises:
            ConfigError: it cannot be opened.
        """
        self._path = path
        try:
            self._fd = _open(path)
        except OSError as exc:
            raise ConfigError(f"cannot write the audit log {path}: {exc.strerror}") from exc
        self._failures: set[str] = set()
        self._looked_at = 0.0

    def add(self, record: AuditRecord) -> None:
        """Write one line, at once; a disk that is full is logged, once, and stops no request."""
        if abs(record.at - self._looked_at) >= LOOK_EVERY_S:
            self._looked_at = record.at
            with self._log_once("opened anew"):
                self._follow_rotation()
        line = msgspec.json.encode(record) + b"\n"
        with self._log_once("written"):
            while line:
                line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _follow_rotation(self) -> None:
        try:
            is_there = samestat(self._path.stat(), os.fstat(self._fd))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            old, self._fd = self._fd, _open(self._path)
            os.close(old)

    @contextmanager
    def _log_once(self, what: str) -> Iterator[None]:
        """A failure is logged, and again once it has worked since."""
        try:
            yield
        except OSError as exc:
            if what not in self._failures:
                log.error("the audit log cannot be %s: %s", what, exc.strerror)  # noqa: TRY400
            self._failures.add(what)
        else:
            self._failures.discard(what)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
