"""Lost segments: how many, of how many, for how long, and whether they are an alert."""

from __future__ import annotations

import pytest

from baton.config.sections import AlertsSection
from baton.gateway.alerts.lifecycle import AlertLifecycle
from baton.gateway.alerts.link_loss import MAX_AGE_S, MIN_SEGMENTS, LinkLossRule, LossTest
from baton.gateway.alerts.observations import LinkSegments
from baton.gateway.alerts.rules import TIMINGS
from baton.protocol.alerts import AlertName, AlertState
from baton.telemetry.transfer_report import SegmentCounts

LIMIT = AlertsSection().link_loss_share
REPORT_S = 5.0
NUM = 5000


class Link:
    """One whose sender reports every 5 s."""

    def __init__(self) -> None:
        self.test, self.now, self.sent = LossTest(LIMIT), 0.0, SegmentCounts()
        self.test.note(self.sent, self.now)

    def report(self, share: float, num: int = NUM, num_duplicates: int = 0) -> bool:
        num_lost = round(share * num)
        more = SegmentCounts(num, num_lost + num_duplicates, num_duplicates, 1448 * num)
        self.sent = self.sent.plus(more)
        self.now += REPORT_S
        is_lossy = self.test.note(self.sent, self.now)
        assert self.test.note(self.sent, self.now + 1.0) is is_lossy, "no news is no news"
        self.test.check_invariants()
        return is_lossy


@pytest.mark.parametrize(("share", "is_lossy"), [(0.01, True), (0.006, True), (0.003, False)])
def test_a_share_that_stays_over_the_limit(share: float, is_lossy: bool) -> None:
    link = Link()
    for _ in range(10):
        assert not link.report(0.0)
    found = [link.report(share) for _ in range(10)]
    assert found[-1] is is_lossy
    assert not found[0], "one report may be a burst"
    assert not is_lossy or all(found[2:]), "three reports, of 5 s each, are enough"


def test_a_burst_is_no_lossy_link() -> None:
    link = Link()
    shares = [0.0] * 5 + [0.5] + [0.0] * 5
    assert not any(link.report(share) for share in shares)


def test_segments_that_came_late_are_not_lost() -> None:
    link = Link()
    assert not any(link.report(0.0, num_duplicates=NUM // 10) for _ in range(10))


def test_what_was_sent_before_the_gateway_looked_does_not_count() -> None:
    test = LossTest(LIMIT)
    assert not test.note(SegmentCounts(10 * NUM, NUM), 0.0)
    assert test.window == SegmentCounts()


def test_a_sender_that_was_restarted_counts_from_0() -> None:
    link = Link()
    link.report(0.0)
    link.sent = SegmentCounts()
    link.report(0.01, num=NUM - 1)
    assert link.test.window.num == 2 * NUM - 1


def test_a_quiet_link_is_known_by_the_last_two_minutes() -> None:
    link, num = Link(), MIN_SEGMENTS // 8
    found = [link.report(0.01, num) for _ in range(10)]
    assert found.index(True) == 7
    few = Link()
    num = int(MIN_SEGMENTS / (MAX_AGE_S / REPORT_S)) - 20
    assert not any(few.report(0.01, num) for _ in range(100)), "too little is sent to know"


def test_it_ends_below_half_of_the_limit_or_when_nothing_is_sent() -> None:
    link = Link()
    for _ in range(4):
        link.report(0.01)
    assert all(link.report(0.004) for _ in range(6)), "over half of the limit"
    assert not [link.report(0.002) for _ in range(4)][-1]
    for _ in range(4):
        link.report(0.01)
    assert link.test.is_lossy
    assert not link.test.note(link.sent, link.now + MAX_AGE_S + 1.0)


def test_the_alert_of_one_link_of_two_within_half_a_minute() -> None:
    rule, lifecycle = LinkLossRule(LIMIT), AlertLifecycle(TIMINGS)
    sent = {"d0": SegmentCounts(), "d1": SegmentCounts()}
    firing: dict[float, str] = {}
    for second in range(150):
        if second % 5 == 0:
            for name, share in (("d0", 0.0005), ("d1", 0.01 if 60 <= second < 110 else 0.0)):
                sent[name] = sent[name].plus(SegmentCounts(NUM, round(share * NUM), 0, 1))
        links = [LinkSegments("p", name, "tcp", "same_rack", sent[name]) for name in sent]
        for changed in lifecycle.apply(rule.evaluate(links, float(second)), float(second)):
            firing[float(second)] = changed.state
            assert changed.condition.alert is AlertName.LINK_LOSS
            assert dict(changed.condition.labels)["to"] == "d1"
            if changed.state is AlertState.FIRING:
                assert changed.condition.value == pytest.approx(0.01, rel=0.4)
            text = changed.condition.summary
            assert "of the TCP segments from p to d1 are lost" in text
    (began, state), (_, end) = firing.items()
    assert (state, end) == (AlertState.FIRING, AlertState.RESOLVED)
    assert 60 + 10 <= began <= 60 + 30
