"""Where a value came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class FromDefault:
    """No source sets the value."""


@dataclass(frozen=True, slots=True)
class FromFile:
    """A key of the configuration file; `line` is None where it could not be found cheaply."""

    path: Path
    line: int | None


@dataclass(frozen=True, slots=True)
class FromEnvironment:
    """An environment variable."""

    variable: str


@dataclass(frozen=True, slots=True)
class FromFlag:
    """A command-line flag."""

    flag: str


Origin: TypeAlias = FromDefault | FromFile | FromEnvironment | FromFlag


def describe(origin: Origin) -> str:
    """One short phrase for messages and tables, e.g. `file baton.toml:12`."""
    match origin:
        case FromDefault():
            return "default"
        case FromFile(path, None):
            return f"file {path}"
        case FromFile(path, line):
            return f"file {path}:{line}"
        case FromEnvironment(variable):
            return f"environment {variable}"
        case FromFlag(flag):
            return f"flag {flag}"
        case _:
            assert_never(origin)
