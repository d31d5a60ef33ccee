"""Ending what a task is doing, for a reason that surfaces as an exception."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class Interruptible:
    """A stretch of one task that others may end: the client left, time ran out, a leg failed.

    The first `interrupt` cancels what the task awaits, and the block then raises that cause. A
    cancellation from anywhere else passes through unchanged, as with `asyncio.timeout`.
    Owner: the event loop's thread.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._cause: BaseException | None = None
        self._outer_cancels = 0

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an Interruptible block belongs in a task")
        self._task, self._outer_cancels = task, task.cancelling()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if task is None or self._cause is None:
            return
        if task.uncancel() <= self._outer_cancels and exc_type is asyncio.CancelledError:
            raise self._cause from exc

    def interrupt(self, cause: BaseException) -> None:
        """End the block with `cause`; does nothing after the first time or after its end."""
        if self._task is not None and self._cause is None:
            self._cause = cause
            self._task.cancel()
