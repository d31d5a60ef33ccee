"""A log line that any client can cause: one in so many seconds, and how many were left out.

All are counted, in `WARNINGS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import Counter

if TYPE_CHECKING:
    import logging

    from baton.clock import Clock

INTERVAL_S: Final = 10.0
WARNINGS: Final = Counter(
    "baton_warnings",
    "Warnings that clients and unauthenticated peers can cause, logged or not.",
    ("source", "subject"),
    registry=None,
)
"""Of this process, in the metrics of every server of it that registers it."""


class LimitedLog:
    """Logs one line for each subject in `interval_s`. Owner: one thread."""

    def __init__(
        self, logger: logging.Logger, clock: Clock, interval_s: float = INTERVAL_S
    ) -> None:
        self._logger, self._clock, self._interval_s = logger, clock, interval_s
        self._source = logger.name.removeprefix("baton.")
        self._last: dict[str, float] = {}
        self._num_unsaid: dict[str, int] = {}

    def warning(self, subject: str, text: str) -> None:
        """Log `text`, or count it; `subject` is one of a few, never text of a client's."""
        WARNINGS.labels(self._source, subject).inc()
        now = self._clock.now()
        last = self._last.get(subject)
        if last is not None and now - last < self._interval_s:
            self._num_unsaid[subject] = self._num_unsaid.get(subject, 0) + 1
            return
        self._last[subject] = now
        num_unsaid = self._num_unsaid.pop(subject, 0)
        more = f" (and {num_unsaid} more like it since the last line)" if num_unsaid else ""
        self._logger.warning("%s%s", text, more)
