"""Polling without spinning: a timer in the reactor, where a library has no ready signal."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from baton.errors import TransferError

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.transfer.reactor import Reactor

MIN_INTERVAL_S: Final = 50e-6
MAX_INTERVAL_S: Final = 1e-3
POLLS_PER_AGE: Final = 32
"""What has been under way for t is looked at again after t / 32: late by 3 % at most."""

_CLOCK_MONOTONIC: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Spec(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Pacer:
    """Makes its reactor ready from time to time while something is under way.

    Owner thread: the transport's. Python 3.11 has no `timerfd_create` of its own.
    """

    def __init__(self, reactor: Reactor, clock: Clock) -> None:
        self._reactor, self._clock = reactor, clock
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise TransferError(f"cannot make a timer: {os.strerror(ctypes.get_errno())}")
        self._since = clock.now()
        self._is_set = False
        reactor.watch(self._fd, self._expired)

    def activate(self) -> None:
        """Something began, or came to an end: look again soon."""
        self._since = self._clock.now()
        if self._is_set:
            self._set(MIN_INTERVAL_S)

    def pace(self, *, is_under_way: bool) -> None:
        """Set the timer if there is something to wait for, and it is not set yet."""
        if not is_under_way:
            if self._is_set:
                self._set(0.0)
            return
        if not self._is_set:
            age_s = self._clock.now() - self._since
            self._set(min(max(age_s / POLLS_PER_AGE, MIN_INTERVAL_S), MAX_INTERVAL_S))

    def close(self) -> None:
        """Release the timer; idempotent."""
        if self._fd >= 0:
            self._reactor.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _expired(self) -> None:
        with suppress(BlockingIOError):  # set anew since it expired
            os.read(self._fd, 8)
            self._is_set = False

    def _set(self, delay_s: float) -> None:
        """Expire once after so long, or never (0)."""
        spec = _Spec(0, 0, 0, int(delay_s * 1e9))
        _libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None)
        self._is_set = delay_s > 0
