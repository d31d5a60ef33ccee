"""Ends this process when another one ends: no worker outlives its launcher."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from typing import Final

from baton.errors import ConfigError

logger = logging.getLogger(__name__)

GRACE_S: Final = 5.0


def exit_with_process(parent_pid: int) -> None:
    """Watch a process from a thread of its own: at its end, SIGTERM here, soon again (leave now).

    The process need not be the parent. A thread, since loading a model blocks all else.

    Raises:
        ConfigError: there is no such process.
    """
    try:
        fd = os.pidfd_open(parent_pid)
    except OSError as exc:
        raise ConfigError(
            f"this worker should end with process {parent_pid}, which cannot be watched: "
            f"{exc.strerror}"
        ) from exc
    threading.Thread(target=_watch, args=(fd, parent_pid), name="parent-watch", daemon=True).start()


def _watch(fd: int, parent_pid: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    poller.poll()
    os.close(fd)
    logger.warning("process %d has ended, and this worker ends with it", parent_pid)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_S)
    os.kill(os.getpid(), signal.SIGTERM)
