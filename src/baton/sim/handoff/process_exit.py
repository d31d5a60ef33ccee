"""The end of a process, as its kernel reports it to others."""

from __future__ import annotations

import os


class ProcessExit:
    """Whether one life has ended. `open` gives what a pidfd is in production."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def open(self) -> int:
        """A descriptor that becomes readable at its end; the caller closes it."""
        if self._fd is None:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC)
        return os.dup(self._fd)

    def end(self) -> None:
        """It is over."""
        if self._fd is not None:
            os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """No process asks any more."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
