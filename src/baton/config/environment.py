"""The one reader of the process's environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def read_environment() -> Mapping[str, str]:
    """A snapshot of the environment: later changes do not show."""
    return dict(os.environ)  # noqa: TID251 - configuration enters here


def state_directory(environment: Mapping[str, str]) -> Path:
    """Where Baton keeps this user's state between runs (XDG base directories)."""
    root = environment.get("XDG_STATE_HOME", "")
    base = Path(root) if Path(root).is_absolute() else Path.home() / ".local" / "state"
    return base / "baton"
