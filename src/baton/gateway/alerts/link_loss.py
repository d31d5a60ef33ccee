"""Whether a link loses packets, by what its sender's kernel had to send again. Pure.

    CLEAN ── share lost >= limit, and still without the worst report ──► LOSSY
      ▲                                                                   │
      └──── share lost < limit / 2, or too little was sent to know ───────┘

Each report of a worker is a sample. The window has the latest samples that have `MIN_SEGMENTS`
together, `MIN_SAMPLES` at least: some 15 s of a busy link, up to `MAX_AGE_S` of a quiet one. The
worst sample is left out, since a connection that lost one whole burst (a route that changed, a full
queue for a moment) is no lossy link.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.gateway.alerts.lifecycle import Condition
from baton.protocol.alerts import AlertName
from baton.telemetry.transfer_report import SegmentCounts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from baton.gateway.alerts.observations import LinkSegments

MIN_SEGMENTS: Final = 4000
"""At the usual limit, 20 of them may be lost: few enough by chance where a third of that is."""
MIN_SAMPLES: Final = 3
MAX_AGE_S: Final = 120.0
END_SHARE: Final = 0.5
"""Of the limit, below which a lossy link is clean again."""


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    sent: SegmentCounts


@dataclass(slots=True)
class LossTest:
    """One link. `limit`: the share of lost segments from which on it is lossy.

    `window` is what was sent within the window.
    """

    limit: float
    is_lossy: bool = False
    window: SegmentCounts = field(default_factory=SegmentCounts)
    _latest: SegmentCounts | None = None
    _samples: deque[_Sample] = field(default_factory=deque)

    def note(self, sent: SegmentCounts, now: float) -> bool:
        """So much was sent since the sender's start: whether the link is lossy.

        What it had sent when it was seen first does not count.
        """
        grown = SegmentCounts() if self._latest is None else sent.minus(self._latest)
        self._latest = sent
        if grown.num:
            self._samples.append(_Sample(now, grown))
            self.window = self.window.plus(grown)
        while self._samples and self._is_oldest_over(now):
            self.window = self.window.minus(self._samples.popleft().sent)
        self.is_lossy = self._is_known(len(self._samples), self.window.num) and self._exceeds()
        return self.is_lossy

    def check_invariants(self) -> None:
        """Raise if the samples contradict each other.

        Raises:
            AssertionError: they do.
        """
        total = SegmentCounts()
        for each in self._samples:
            assert each.sent.num  # noqa: S101
            total = total.plus(each.sent)
        assert total == self.window  # noqa: S101
        if self._samples:
            num_without = total.num - self._samples[0].sent.num
            assert not self._is_known(len(self._samples) - 1, num_without)  # noqa: S101

    def _exceeds(self) -> bool:
        share = self.window.lost_share or 0.0
        if self.is_lossy:
            return share >= END_SHARE * self.limit
        return share >= self.limit and self._share_without_worst() >= self.limit

    def _is_oldest_over(self, now: float) -> bool:
        oldest = self._samples[0]
        is_enough_without = self._is_known(
            len(self._samples) - 1, self.window.num - oldest.sent.num
        )
        return is_enough_without or now - oldest.at > MAX_AGE_S

    @staticmethod
    def _is_known(num_samples: int, num_segments: int) -> bool:
        return num_samples >= MIN_SAMPLES and num_segments >= MIN_SEGMENTS

    def _share_without_worst(self) -> float:
        worst = max(self._samples, key=lambda each: each.sent.num_lost)
        return self.window.minus(worst.sent).lost_share or 0.0


class LinkLossRule:
    """`BatonLinkLoss` of each link. Owner: one thread."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._tests: dict[tuple[str, str, str], LossTest] = {}

    def evaluate(self, links: Iterable[LinkSegments], now: float) -> Iterator[Condition]:
        """These are all links now: a condition for each lossy one."""
        before, self._tests = self._tests, {}
        for link in links:
            key = link.source, link.target, link.transport
            if key in self._tests:
                continue
            test = self._tests[key] = before.get(key) or LossTest(self._limit)
            if test.note(link.sent, now):
                yield _describe(link, test.window)


def _describe(link: LinkSegments, sent: SegmentCounts) -> Condition:
    share = sent.lost_share or 0.0
    return Condition(
        AlertName.LINK_LOSS,
        (
            ("distance", link.distance),
            ("from", link.source),
            ("to", link.target),
            ("transport", link.transport),
        ),
        f"{share:.1%} of the TCP segments from {link.source} to {link.target} are lost "
        f"({sent.num_lost} of the latest {sent.num} over {link.transport})",
        share,
    )
