"""The one reader, and the one writer, of the process's environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_RUNTIME_ROOT: Final = 64


def read_environment() -> Mapping[str, str]:
    """A snapshot of the environment: later changes do not show."""
    return dict(os.environ)  # noqa: TID251 - configuration enters here


def state_directory(environment: Mapping[str, str]) -> Path:
    """Where Baton keeps this user's state between runs (XDG base directories)."""
    root = environment.get("XDG_STATE_HOME", "")
    base = Path(root) if Path(root).is_absolute() else Path.home() / ".local" / "state"
    return base / "baton"


def run_directory(environment: Mapping[str, str]) -> Path:
    """Where this user's processes keep sockets while they run; it need not exist.

    Short, since a socket's path has at most 107 bytes.
    """
    root = environment.get("XDG_RUNTIME_DIR", "")
    if Path(root).is_absolute() and len(root) <= MAX_RUNTIME_ROOT:
        return Path(root) / "baton"
    return Path("/tmp") / f"baton-{os.getuid()}"  # noqa: S108 - made for this user alone


def change_environment(values: Mapping[str, str], removed: Sequence[str] = ()) -> None:
    """Set variables that libraries read when they are imported, here and in child processes."""
    os.environ.update(values)  # noqa: TID251 - the one writer
    for name in removed:
        os.environ.pop(name, None)  # noqa: TID251
