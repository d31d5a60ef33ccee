"""Keeps this process on some cores."""

from __future__ import annotations

import os

from baton.errors import ConfigError


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
