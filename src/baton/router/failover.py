"""What to do when a worker that was asked for a request fails: a pure state machine.

    decode failed       avoid that worker                            costs an attempt
    stale ticket        the same workers, with a new ticket          costs an attempt
    KV lost             no handoff: the decode worker computes all   costs an attempt
    ticket refused      the same                                     costs an attempt
    prefill failed      avoid it, its mode, or every handoff         bounded by its own count

A stream of which a part was sent goes on at another worker, where it can: each attempt that added
to it is followed by as many others as a new request has, up to `MAX_RESUMES` times. One that ends
the workers that compute its next token gets no third.

Used by the gateway and by the simulator. Whether a stream can go on, the caller decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, get_args

from baton.auth.ticket import HandoffMode

if TYPE_CHECKING:
    from baton.ids import WorkerId

MAX_ATTEMPTS: Final = 2
MAX_RESUMES: Final = 4
"""Of one stream: so many of its decode workers may die one after the other."""
MAX_PREFILL_FAILURES: Final = 2
"""Of prefill workers that are asked first: then the decode worker computes the prompt."""

PREFILL_FIRST: Final[frozenset[HandoffMode]] = frozenset({"pull", "pool"})
"""Decode is asked once KV is held for it, or kept in the store: until then it needs no blocks."""

EVERY_MODE: Final[frozenset[HandoffMode]] = frozenset(get_args(HandoffMode))

LEAST_RETRIES: Final = 3
"""At once, however few requests are under way."""
PER_SECOND: Final = 1.0
"""Of retries that failed, so many may be repeated: rare failures are always retried."""

ABORT_RETRY_DELAYS_S: Final = (0.05, 0.2, 1.0)
"""Pauses after each abort sent to decode but the last: the first abort can overtake the request
that it is about, which then would not know of it."""


class Failure(StrEnum):
    """Why an attempt failed, as far as the next one depends on it."""

    DECODE_FAILED = "decode_failed"
    STALE_TICKET = "stale_ticket"
    KV_LOST = "kv_lost"
    TICKET_REFUSED = "ticket_refused"
    PREFILL_FAILED = "prefill_failed"
    PREFILL_REJECTED = "prefill_rejected"
    MODE_FAILED = "mode_failed"


@dataclass(frozen=True, slots=True)
class Attempt:
    """Where a request was placed. `prefill` None: without a handoff."""

    decode: WorkerId
    prefill: WorkerId | None = None
    mode: HandoffMode | None = None


@dataclass(slots=True)
class Failover:
    """What was tried for one request, and what the next placement must avoid."""

    num_left: int = MAX_ATTEMPTS
    num_resumes_left: int = MAX_RESUMES
    num_prefill_failures: int = 0
    avoid: frozenset[WorkerId] = frozenset()
    failed_modes: frozenset[HandoffMode] = frozenset()

    @property
    def may_retry(self) -> bool:
        """Whether another attempt is allowed."""
        return self.num_left > 0 and self.num_resumes_left >= 0

    def record(self, attempt: Attempt, failure: Failure, *, has_progressed: bool = False) -> None:
        """An attempt failed: do not repeat what made it fail.

        `has_progressed`: it added to a stream. What failed before that may serve again.
        """
        if has_progressed:
            self.restart()
            self.num_resumes_left -= 1
        match failure:
            case Failure.PREFILL_FAILED | Failure.PREFILL_REJECTED | Failure.MODE_FAILED:
                self._record_prefill(attempt, failure)
                return
            case Failure.KV_LOST | Failure.TICKET_REFUSED if attempt.prefill is not None:
                self.failed_modes = EVERY_MODE  # the same worker may compute it all
            case Failure.DECODE_FAILED | Failure.KV_LOST | Failure.TICKET_REFUSED:
                self.avoid |= {attempt.decode}
            case Failure.STALE_TICKET:
                pass  # its worker's new epoch is all that the next attempt needs
        self.num_left -= 1

    def restart(self) -> None:
        """A part was sent, or the stream was moved: it may be tried as often as a new request."""
        self.num_left, self.num_prefill_failures = MAX_ATTEMPTS, 0
        self.avoid, self.failed_modes = frozenset(), frozenset()

    def forgive(self, gone: frozenset[WorkerId]) -> None:
        """What is not there now may be asked once it is back: it is another process then."""
        self.avoid -= gone

    def _record_prefill(self, attempt: Attempt, failure: Failure) -> None:
        self.num_prefill_failures += 1
        is_last = self.num_prefill_failures >= MAX_PREFILL_FAILURES
        if is_last or failure is Failure.PREFILL_REJECTED:
            self.failed_modes = EVERY_MODE
        elif failure is Failure.MODE_FAILED and attempt.mode is not None:
            self.failed_modes |= {attempt.mode}
        elif attempt.prefill is not None:
            self.avoid |= {attempt.prefill}


class RetryVerdict(StrEnum):
    """`WAIT`: until a retry that is under way ends, which may make room."""

    GRANTED = "granted"
    WAIT = "wait"
    REFUSED = "refused"


@dataclass(slots=True)
class RetryBudget:
    """Bounds what retries add to the load of a fleet that fails.

    As Envoy's budget: at most `share` of the requests under way, or `LEAST_RETRIES`, are retries
    that wait for their first token at once. One that gets it makes room for the next, so all the
    requests of a worker that died are retried by and by. One that fails takes its room with it:
    each new request gives back `share` of a retry, and each second `PER_SECOND`.

    `num_requests` are under way, `num_retrying` of them retries without a first token; `num_failed`
    retries failed and are not given back yet. The caller counts requests.
    """

    share: float
    at: float
    num_requests: int = 0
    num_retrying: int = 0
    num_failed: float = 0.0

    def add_request(self) -> None:
        """A request arrived."""
        self.num_requests += 1
        self.num_failed = max(0.0, self.num_failed - self.share)

    def begin(self, now: float) -> RetryVerdict:
        """Whether a retry may be made, which then counts until `end`."""
        self.num_failed = max(0.0, self.num_failed - (now - self.at) * PER_SECOND)
        self.at = now
        most = max(LEAST_RETRIES, self.share * self.num_requests)
        if self.num_retrying + 1 <= most - self.num_failed:
            self.num_retrying += 1
            return RetryVerdict.GRANTED
        return RetryVerdict.WAIT if self.num_retrying else RetryVerdict.REFUSED

    def end(self, *, has_failed: bool) -> None:
        """A retry has its first token, was given up, or failed."""
        self.num_retrying -= 1
        self.num_failed += has_failed
