"""Time as a dependency: the one module that may read the machine's clocks."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NewType, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable

Instant = NewType("Instant", float)
"""Seconds on a monotonic clock whose zero means nothing.

On Linux the clock is CLOCK_MONOTONIC, which all processes of one host share: instants of two
workers on one host can be subtracted."""

UnixTime = NewType("UnixTime", float)
"""Seconds since 1970: only for what must mean the same on two hosts (a ticket's expiry)."""


BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def read_clock_domain() -> str:
    """Names this host's monotonic clock: where it is equal, instants can be subtracted.

    The kernel's boot id; a random name where there is none, so that no two hosts compare equal.
    """
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return secrets.token_hex(16)


class Clock(Protocol):
    """The current time. Tests pass a `ManualClock`; simulators pass their own."""

    def now(self) -> Instant:
        """The current instant, for durations and deadlines."""
        ...

    def unix_now(self) -> UnixTime:
        """The current wall-clock time, for expiries that cross hosts and for people."""
        ...

    def thread_time_s(self) -> float:
        """Processor time that the calling thread has used, for what it may take of a core."""
        ...


class MachineClock:
    """The machine's clocks."""

    # The function itself: a wrapper would be a tenth of the calls of a layer's way.
    now = staticmethod(cast("Callable[[], Instant]", time.monotonic))  # noqa: TID251
    thread_time_s = staticmethod(time.thread_time)

    def unix_now(self) -> UnixTime:
        """See `Clock`."""
        return UnixTime(time.time())  # noqa: TID251
