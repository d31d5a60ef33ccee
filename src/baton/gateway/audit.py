"""The audit log: who asked for what, when, and with what result; never a prompt or an answer."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

FILE_MODE: Final = 0o600

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
    """Appends to a file that this process keeps open. Owner: the event loop's thread."""

    def __init__(self, path: Path) -> None:
        """Open the file, for its owner alone.

        Raises:
            ConfigError: it cannot be opened.
        """
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(path, flags, FILE_MODE)
        except OSError as exc:
            raise ConfigError(f"cannot write the audit log {path}: {exc.strerror}") from exc
        self._has_failed = False

    def add(self, record: AuditRecord) -> None:
        """Write one line, at once; a disk that is full is logged, once, and stops no request."""
        try:
            os.write(self._fd, msgspec.json.encode(record) + b"\n")
        except OSError as exc:
            if not self._has_failed:
                log.error("the audit log cannot be written: %s", exc.strerror)  # noqa: TRY400
            self._has_failed = True
        else:
            self._has_failed = False

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
