"""The one reader, and the one writer, of the process's environment; the cores it runs on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_RUNTIME_ROOT: Final = 50
"""Behind it come the name of a worker's folder and a socket's, which vLLM makes of a UUID."""

TOKENIZER_VARIABLES: Final = {"TOKENIZERS_PARALLELISM": "false"}
"""Texts are tokenized one by one. By default the library starts a thread for each core with the
first one, and where it does not get them, it fails for the rest of the process's life."""


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


def pin_to(cores: tuple[int, ...]) -> None:
    """Before an engine loads: it counts the cores it has. None given: nothing changes.

    Raises:
        ConfigError: this machine, or this process, does not have one of them.
    """
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as exc:
        raise ConfigError(
            f"cannot run on the cores {list(cores)}: {exc.strerror}; this process may use "
            f"{sorted(os.sched_getaffinity(0))}"
        ) from exc
