"""A stretch of a task that others may end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class Interruptible:
    """A stretch of one task that others may end: client left, timeout, failed peer.

    The first `interrupt` cancels what the task awaits, and the block then raises that cause. A
    cancellation from anywhere else passes through unchanged, as with `asyncio.timeout`.
    While the block runs, it is in `members`. Owner: the event loop's thread.
    """

    def __init__(self, members: set[Interruptible] | None = None) -> None:
        self._members = members
        self._task: asyncio.Task[object] | None = None
        self._cause: BaseException | None = None
        self._outer_cancels = 0

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an Interruptible block belongs in a task")
        self._task, self._outer_cancels = task, task.cancelling()
        if self._members is not None:
            self._members.add(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        cause, self._cause = self._cause, None
        if self._members is not None:
            self._members.discard(self)
        if task is None or cause is None:
            return
        try:
            if task.uncancel() <= self._outer_cancels and exc_type is asyncio.CancelledError:
                raise cause from exc
        finally:
            # Its traceback has this frame, and those that hold the request's body: what refers to
            # itself would be kept until the garbage collector happens to find it.
            del cause

    def interrupt(self, cause: BaseException) -> None:
        """End the block with `cause`; does nothing after the first time or after its end."""
        if self._task is not None and self._cause is None:
            self._cause = cause
            self._task.cancel()
