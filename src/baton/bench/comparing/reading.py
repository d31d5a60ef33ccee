"""Files → one side of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from baton.bench.load.report import SCHEMA, Report
from baton.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MAX_FILE_BYTES: Final = 2 << 30


class Head(msgspec.Struct, frozen=True):
    """What every result of this project begins with."""

    schema: str = ""


def read_side(path: Path) -> list[Report]:
    """A report, or all of a folder, which are several runs of the same.

    Raises:
        ConfigError: unreadable, or something else.
    """
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not paths:
        raise ConfigError(f"{path}: no report (*.json) in this folder")
    return [_read(each) for each in paths]


def _read(path: Path) -> Report:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: more than {MAX_FILE_BYTES >> 30} GiB")
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    try:
        schema = msgspec.json.decode(data, type=Head).schema
        if schema != SCHEMA:
            shown = schema[:60] or "something else"
            raise ConfigError(f"{path} is {shown}, not {SCHEMA}: `baton bench serve --output`")
        return msgspec.json.decode(data, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is no report of `baton bench serve`: {exc}") from exc
