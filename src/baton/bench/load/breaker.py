"""When going on makes no sense: the server is gone, or answers nothing any more. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.bench.load.record import Record

NUM_UNREACHABLE: Final = 5
UNREACHABLE_S: Final = 1.0
NUM_FAILED: Final = 20


class Breaker:
    """Looks at every ended request. One complete answer makes it forget."""

    def __init__(self) -> None:
        self._failed: list[Record] = []

    def see(self, record: Record) -> str | None:
        """One more; why to stop, or None."""
        if record.is_cut:
            return None
        if record.failure is None:
            self._failed.clear()
            return None
        self._failed = [*self._failed[-NUM_FAILED:], record]
        last = record.failure.message
        refused = [each for each in self._failed if _is_connect(each)]
        if len(refused) >= NUM_UNREACHABLE and _is_connect(record):
            silent_s = record.ended_s - refused[0].sent_s
            if silent_s >= UNREACHABLE_S:
                return f"the server is gone: no connection for {silent_s:.1f} s ({last})"
        if len(self._failed) >= NUM_FAILED:
            return f"{len(self._failed)} requests in a row failed; the last: {last}"
        return None


def _is_connect(record: Record) -> bool:
    return record.failure is not None and record.failure.kind == "connect"
