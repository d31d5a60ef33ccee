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
    """One link. `limit`: the share of lost segments from which on it is lossy."""

    limit: float
    is_lossy: bool = False
    _latest: SegmentCounts | None = None
    _samples: deque[_Sample] = field(default_factory=deque)

    @property
    def window(self) -> SegmentCounts:
        """What was sent within the window."""
        return _add(self._samples)

    def note(self, sent: SegmentCounts, now: float) -> bool:
        """So much was sent since the sender's start: whether the link is lossy.

        What it had sent when it was seen first does not count.
        """
        grown = SegmentCounts() if self._latest is None else sent.minus(self._latest)
        self._latest = sent
        if grown.num:
            self._samples.append(_Sample(now, grown))
        while self._samples and self._is_oldest_over(now):
            self._samples.popleft()
        share = self.window.lost_share if self._is_known(self._samples) else None
        if share is None:
            self.is_lossy = False
        elif self.is_lossy:
            self.is_lossy = share >= END_SHARE * self.limit
        else:
            self.is_lossy = min(share, self._share_without_worst()) >= self.limit
        return self.is_lossy

    def check_invariants(self) -> None:
        """Raise if the samples contradict each other.

        Raises:
            AssertionError: they do.
        """
        samples = list(self._samples)
        assert all(each.sent.num for each in samples)  # noqa: S101
        assert all(one.at <= other.at for one, other in zip(samples, samples[1:], strict=False))  # noqa: S101
        assert not self._is_known(samples[1:]), "the window has more than it needs"  # noqa: S101
        assert self._is_known(samples) or not self.is_lossy  # noqa: S101

    def _is_oldest_over(self, now: float) -> bool:
        is_old = now - self._samples[0].at > MAX_AGE_S
        return is_old or self._is_known(list(self._samples)[1:])

    def _is_known(self, samples: Iterable[_Sample]) -> bool:
        listed = list(samples)
        return len(listed) >= MIN_SAMPLES and _add(listed).num >= MIN_SEGMENTS

    def _share_without_worst(self) -> float:
        worst = max(self._samples, key=lambda each: each.sent.num_lost)
        return _add(each for each in self._samples if each is not worst).lost_share or 0.0


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


def _add(samples: Iterable[_Sample]) -> SegmentCounts:
    total = SegmentCounts()
    for each in samples:
        total = total.plus(each.sent)
    return total
