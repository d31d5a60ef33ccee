"""When going on makes no sense: the server is gone, or answers nothing any more. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.bench.load.record import Record
    from baton.bench.load.stream import Failure

NUM_UNREACHABLE: Final = 5
NUM_FAILED: Final = 20
PATIENCE_S: Final = 1.0
"""A burst of failures is no reason to stop, however many they are."""


class Breaker:
    """Looks at every ended request. One complete answer makes it forget."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._num_failed = self._num_unreachable = 0

    def see(self, record: Record) -> str | None:
        """One more; why to stop, or None."""
        if record.failure is not None:
            return self._see_failure(record, record.failure)
        if record.is_complete:
            self._first_s, self._num_failed, self._num_unreachable = None, 0, 0
        return None

    def _see_failure(self, record: Record, failure: Failure) -> str | None:
        if self._first_s is None:
            self._first_s = record.sent_s
        is_unreachable = failure.kind == "connect"
        self._num_failed += 1
        self._num_unreachable += is_unreachable
        lasts_s = record.ended_s - self._first_s
        if lasts_s < PATIENCE_S:
            return None
        if is_unreachable and self._num_unreachable >= NUM_UNREACHABLE:
            return f"the server is gone: no connection for {lasts_s:.1f} s ({failure.message})"
        if self._num_failed >= NUM_FAILED:
            return f"{self._num_failed} requests in a row failed; the last: {failure.message}"
        return None
