"""Whether this machine will be taken: a thread that looks for the notice.

    look each `preemption.interval_s` ──notice──► status `draining` to the launcher ─► SIGTERM here

From the signal on the worker drains as it always does; whoever handles it asks `note_signal`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, assert_never

from baton.clock import Clock, Instant
from baton.errors import BatonError
from baton.net.metadata_services import AwsNotices, AzureNotices, GcpNotices, Preemption
from baton.protocol.worker_http import Health
from baton.telemetry.process_status import Draining, StatusReporter

if TYPE_CHECKING:
    from baton.config.sections import PreemptionSection

LEAVE_BEFORE_S: Final = 5.0
"""Of what is left then the engine's end, and the last bytes of answers, take a part."""
MAX_INTERVAL_S: Final = 30.0
"""Between two looks while the source does not answer."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """This machine is taken at `at`; `reason` has the source of the notice."""

    reason: str
    at: Instant

    def drain_s(self, now: Instant) -> float:
        """How long requests may still take."""
        return max(0.0, self.at - now - LEAVE_BEFORE_S)


def describe_plain_drain() -> Health:
    """What `/health` answers while a worker drains whose machine stays."""
    return Health("draining")


class NoticeSource(Protocol):
    """Where a notice appears."""

    def look(self) -> Preemption | None:
        """Whether there is one; may block for half a minute, if it waits for it.

        Raises:
            BatonError: it does not answer, or not as is documented.
        """
        ...


class FileNotices:
    """A file that exists from the notice on."""

    def __init__(self, path: Path, notice_s: float) -> None:
        self._path, self._notice_s = path, notice_s

    def look(self) -> Preemption | None:
        """See `NoticeSource`."""
        return Preemption(self._notice_s, str(self._path)) if self._path.exists() else None


def open_source(section: PreemptionSection, worker: str, clock: Clock) -> NoticeSource | None:
    """The configured source; None: there is none."""
    match section.source:
        case "none":
            return None
        case "file":
            path = Path(section.file.replace("{worker}", worker))
            return FileNotices(path, section.notice_s)
        case "aws":
            return AwsNotices(section.url, clock, section.notice_s)
        case "gcp":
            return GcpNotices(section.url, section.notice_s)
        case "azure":
            return AzureNotices(section.url, clock, section.notice_s)
        case _ as never:
            assert_never(never)


class PreemptionWatch:
    """Looks for a notice, from a thread of its own: loading a model blocks all else.

    Owner: the process's main thread.
    """

    def __init__(
        self, section: PreemptionSection, worker: str, clock: Clock, reporter: StatusReporter
    ) -> None:
        self._source = open_source(section, worker, clock)
        self._name, self._interval_s = section.source, section.interval_s
        self._worker, self._clock, self._reporter = worker, clock, reporter
        self._is_noted = self._is_asked_to_end = False
        self._drain_until = Instant(inf)
        self.notice: PreemptionNotice | None = None

    def start(self) -> None:
        """Begin to look, if a source is configured. Once."""
        if self._source is not None:
            run = threading.Thread(
                target=self._run, args=(self._source,), name="preemption-watch", daemon=True
            )
            run.start()

    def note_signal(self, timeout_s: float) -> float | None:
        """SIGTERM or SIGINT has come: for how many seconds requests may still take from now on.

        At most `timeout_s`; after a notice, whose signal does not count, until that time. None:
        the second signal that somebody has sent: the process ends at once, unless its parent only
        passed it on (`ignore_relayed`).
        """
        now, notice = self._clock.now(), None if self._is_noted else self.notice
        if notice is not None:
            self._is_noted, timeout_s = True, notice.drain_s(now)
        elif self._is_asked_to_end:
            return None
        else:
            self._is_asked_to_end = True
        self._drain_until = min(self._drain_until, Instant(now + timeout_s))
        left_s = max(0.0, self._drain_until - now)
        if notice is None:  # of which the launcher knows already
            self._reporter.report(Draining(left_s))
        return left_s

    def describe_health(self) -> Health:
        """What `/health` answers while the worker drains."""
        notice = self.notice
        if notice is None:
            return describe_plain_drain()
        left_s = round(max(0.0, notice.at - self._clock.now()), 1)
        return Health("draining", notice.reason, preempted_in_s=left_s)

    def _run(self, source: NoticeSource) -> None:
        found = self._wait_for_notice(source)
        reason = f"its machine will be taken ({self._name}: {found.what})"
        notice = PreemptionNotice(reason, Instant(self._clock.now() + found.in_s))
        logger.warning("%s: %s in %.0f s: it drains", self._worker, reason, found.in_s)
        self._reporter.report(Draining(notice.drain_s(self._clock.now()), reason))
        self.notice = notice
        os.kill(os.getpid(), signal.SIGTERM)

    def _wait_for_notice(self, source: NoticeSource) -> Preemption:
        wait, problem, interval_s = threading.Event(), "", self._interval_s
        while True:
            try:
                found = source.look()
            except Exception as exc:  # without this thread a notice would never be seen
                if str(exc) != problem:
                    is_expected = isinstance(exc, BatonError | OSError)
                    trace = None if is_expected else exc
                    logger.warning("no preemption notice can be read: %s", exc, exc_info=trace)
                problem, interval_s = str(exc), min(MAX_INTERVAL_S, 2 * interval_s)
            else:
                if found is not None:
                    return found
                if problem:
                    logger.info("preemption notices are read again")
                problem, interval_s = "", self._interval_s
            wait.wait(interval_s)
