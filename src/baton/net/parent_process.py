"""Ties a process to its parent, see prctl(2): who exits with it, and whether this process does."""

from __future__ import annotations

import ctypes
import os
import signal
from functools import cache
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_GET_PDEATHSIG: Final = 2

_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork


def exit_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """In a child: get this signal when the parent ends, however that ends.

    Takes no lock, so it may run between fork and exec.
    """
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it died before prctl could tie us to it
        os._exit(1)


def ends_with_parent() -> bool:
    """Whether a parent that lives has tied this process to itself."""
    number = ctypes.c_int()
    _libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value != 0 and os.getppid() == _first_parent_of(os.getpid())


def remember_parent() -> None:
    """The parent of this moment is the one that `ends_with_parent` means."""
    _first_parent_of(os.getpid())


@cache
def _first_parent_of(pid: int) -> int:
    """The parent when this process, with that id, asked first."""
    del pid  # a forked process asks for itself
    return os.getppid()
