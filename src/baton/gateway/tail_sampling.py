"""Which requests are sampled, and which remembered longer: those that failed or were slow. Pure.

What is slow depends on the traffic: a streamed request whose first token, or whose mean gap between
tokens, took longer than a share `quantile` of the latest ones; without a stream, its whole time.
"""

from __future__ import annotations

from array import array
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    from baton.gateway.request_history import RequestRecord

WINDOW: Final = 1024
"""Values of which the quantile is taken."""
MIN_SEEN: Final = 100
"""Before so many, nothing counts as slow by its quantile."""
UPDATE_EVERY: Final = 64
"""A quantile takes 0.1 ms to compute."""
MIN_GAPS: Final = 8
"""Of an answer whose mean gap is compared."""
OK: Final = int(HTTPStatus.OK)
SERVER_ERROR: Final = int(HTTPStatus.INTERNAL_SERVER_ERROR)


class KeptKind(StrEnum):
    """Each has a ring of its own: a storm of failures does not displace what was slow."""

    FAILED = "failed"
    SLOW = "slow"


class HeadSampler:
    """Which requests without a client's decision are sampled: evenly, a `share` of them."""

    def __init__(self, share: float) -> None:
        self._share, self._sum = share, 0.0

    def next(self) -> bool:
        """Whether the next one is."""
        self._sum += self._share
        if self._sum < 1.0:
            return False
        self._sum -= 1.0
        return True


def make_head_sampler(share: float) -> HeadSampler | None:
    """None where no request is to be sampled."""
    return HeadSampler(share) if share else None


class QuantileLimit:
    """The value that a share `quantile` of the last `WINDOW` values does not exceed."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._values = array("d")
        self._num_seen = 0
        self.limit_s = float("inf")

    def exceeds(self, value_s: float) -> bool:
        """Whether a value is above the limit, which follows from the values before it."""
        is_above = value_s > self.limit_s
        if len(self._values) < WINDOW:
            self._values.append(value_s)
        else:
            self._values[self._num_seen % WINDOW] = value_s
        self._num_seen += 1
        if self._num_seen >= MIN_SEEN and self._num_seen % UPDATE_EVERY == 0:
            ordered = sorted(self._values)
            self.limit_s = ordered[min(len(ordered) - 1, int(self._quantile * len(ordered)))]
        return is_above


class TailSampler:
    """Decides when a request has ended. Owner: the event loop's thread.

    `slow_ttft_s`: a first token that takes longer is slow in any case.
    """

    def __init__(self, quantile: float, slow_ttft_s: float | None) -> None:
        self._slow_ttft_s = slow_ttft_s
        self._share = f"{100 * quantile:g} %"
        self._first_tokens, self._gaps, self._wholes = (QuantileLimit(quantile) for _ in range(3))

    def look(self, record: RequestRecord) -> tuple[KeptKind, str] | None:
        """Why a request is kept; None: it is not."""
        if record.status >= SERVER_ERROR:
            return KeptKind.FAILED, record.trace.outcome or f"answered {record.status}"
        stamps = record.trace.stamps
        received, first = stamps.get(Stamp.RECEIVED), stamps.get(Stamp.FIRST_TOKEN)
        last = stamps.get(Stamp.FINISHED)
        if received is None or last is None or (first is None and record.status != OK):
            return None  # refused, or its client left: neither is slow
        if first is None or not record.trace.token_gaps:  # it came in one part
            whole_s, limit_s = last - received, self._wholes.limit_s
            is_slow = self._wholes.exceeds(whole_s)
            return self._explain("its answer", whole_s, limit_s) if is_slow else None
        found = None
        ttft_s, limit_s = first - received, self._first_tokens.limit_s
        if self._first_tokens.exceeds(ttft_s):
            found = self._explain("its first token", ttft_s, limit_s)
        elif self._slow_ttft_s is not None and ttft_s > self._slow_ttft_s:
            limit = f"above {self._slow_ttft_s:g} s"
            found = KeptKind.SLOW, f"its first token took {ttft_s:.3f} s, {limit}"
        if record.num_streamed > MIN_GAPS:
            gap_s = (last - first) / (record.num_streamed - 1)
            limit_s = self._gaps.limit_s
            if self._gaps.exceeds(gap_s):
                found = found or self._explain("a token", gap_s, limit_s)
        return found

    def _explain(self, what: str, took_s: float, limit_s: float) -> tuple[KeptKind, str]:
        return (
            KeptKind.SLOW,
            f"{what} took {took_s:.4f} s, above the {limit_s:.4f} s of {self._share} of requests",
        )
