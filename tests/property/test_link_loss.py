"""A link is lossy only with evidence, and its state follows what is known (`LossTest`)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.gateway.alerts.link_loss import (
    END_SHARE,
    MAX_AGE_S,
    MIN_SAMPLES,
    MIN_SEGMENTS,
    LossTest,
)
from baton.telemetry.transfer_report import SegmentCounts
from tests.examples import examples

LIMIT = 0.005


class Loss(RuleBasedStateMachine):
    """A model that keeps every report, and looks for the shortest suffix that is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.test, self.now, self.sent = LossTest(LIMIT), 0.0, SegmentCounts()
        self.test.note(self.sent, self.now)
        self.reports: list[tuple[float, int, int]] = []
        self.is_lossy = False

    @rule(
        num=st.sampled_from([0, 1, 700, 1400, 5000, 20_000]),
        lost_permille=st.sampled_from([0, 1, 2, 3, 5, 6, 10, 500]),
        duplicates=st.integers(0, 3),
        seconds=st.sampled_from([1.0, 5.0, 31.0]),
    )
    def report(self, num: int, lost_permille: int, duplicates: int, seconds: float) -> None:
        self.now += seconds
        num_lost = num * lost_permille // 1000
        if num:
            duplicates = min(duplicates, num - num_lost)
            more = SegmentCounts(num, num_lost + duplicates, duplicates, num * 1448)
            self.sent = self.sent.plus(more)
            self.reports.append((self.now, num, num_lost))
        self.look()

    @rule()
    def restart(self) -> None:
        """The sender's counters begin at 0 again; what it sends next counts as a whole."""
        if self.sent.num > 1:
            self.sent = SegmentCounts(1, 0, 0, 1)
            self.reports.append((self.now, 1, 0))
            self.look()

    @precondition(lambda self: self.reports)
    @rule()
    def be_silent(self) -> None:
        self.now += MAX_AGE_S + 1.0
        self.look()
        assert not self.is_lossy

    def look(self) -> None:
        known = self.enough()
        if known is None:
            self.is_lossy = False
        else:
            share = sum(lost for _, lost in known) / sum(num for num, _ in known)
            worst = max(known, key=lambda each: each[1])
            rest = list(known)
            rest.remove(worst)
            rest_share = sum(lost for _, lost in rest) / sum(num for num, _ in rest)
            limit = END_SHARE * LIMIT if self.is_lossy else LIMIT
            self.is_lossy = (share if self.is_lossy else min(share, rest_share)) >= limit
        assert self.test.note(self.sent, self.now) is self.is_lossy

    def enough(self) -> list[tuple[int, int]] | None:
        young = [(num, lost) for at, num, lost in self.reports if self.now - at <= MAX_AGE_S]
        for length in range(MIN_SAMPLES, len(young) + 1):
            suffix = young[-length:]
            if sum(num for num, _ in suffix) >= MIN_SEGMENTS:
                return suffix
        return None

    @invariant()
    def consistent(self) -> None:
        self.test.check_invariants()


TestLoss = Loss.TestCase
TestLoss.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
