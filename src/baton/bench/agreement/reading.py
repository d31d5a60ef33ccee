"""Files → the findings of an architecture benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from baton.bench.architectures.keeping import RESULTS
from baton.bench.architectures.results import SCHEMA, Findings
from baton.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MAX_FILE_BYTES: Final = 256 << 20
SCHEMA_BYTES: Final = 256
"""A result begins with its schema."""


def is_architectures(path: Path) -> bool:
    """Whether it is such a result, or a folder with one. Unreadable ones are not."""
    try:
        with find_results(path).open("rb") as file:
            return SCHEMA.encode() in file.read(SCHEMA_BYTES)
    except OSError:
        return False


def read_findings(path: Path) -> Findings:
    """One result, by its folder or file.

    Raises:
        ConfigError: unreadable, or something else.
    """
    file = find_results(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{file}: more than {MAX_FILE_BYTES >> 20} MiB")
        return msgspec.json.decode(file.read_bytes(), type=Findings)
    except OSError as exc:
        raise ConfigError(f"cannot read {file}: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{file} is no result of `baton bench architectures`, which the other one is: {exc}"
        ) from exc


def find_results(path: Path) -> Path:
    """The file that is meant."""
    return path / RESULTS if path.is_dir() else path
