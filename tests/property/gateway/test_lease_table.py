"""Whatever announcements come, in whatever order, a name has one owner, and none loses it early."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.clock import Instant
from baton.gateway.members.lease_table import LOOK_S, OVERDUE_SHARE, LeaseTable, Outcome
from baton.ids import Epoch, WorkerId
from baton.protocol.announcements import Announcement
from baton.protocol.worker_http import Role
from tests.examples import examples

NAMES = ("a", "b", "c", "d")
MAX_NAMES = 3
EPOCHS = tuple(letter * 32 for letter in "0123")
PORTS = (1, 2, 3)
LEASE_S = 3.0


@dataclass
class Owner:
    """What the model knows of a name: who holds it, and until when at the latest and earliest."""

    epoch: str
    url: str
    sequence: int
    until: float


@dataclass
class Model:
    owners: dict[str, Owner] = field(default_factory=dict)
    lost: dict[str, set[str]] = field(default_factory=dict)
    taken: dict[tuple[str, str], int] = field(default_factory=dict)


class Leases(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.model, self.now = LeaseTable(MAX_NAMES), Model(), Instant(100.0)

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now = Instant(self.now + seconds)

    @rule()
    def lapse(self) -> None:
        gone = {each.worker for each in self.table.lapse(self.now)}
        due = {name for name, owner in self.model.owners.items() if owner.until <= self.now}
        assert gone == due
        self._forget_lapsed()

    @rule(
        name=st.sampled_from(NAMES),
        epoch=st.sampled_from(EPOCHS),
        port=st.sampled_from(PORTS),
        sequence=st.integers(1, 20),
        age_s=st.sampled_from([0.0, 0.5, 2.9, 3.0, 9.0]),
        is_farewell=st.booleans(),
    )
    def offer(
        self, name: str, epoch: str, port: int, sequence: int, age_s: float, is_farewell: bool
    ) -> None:
        announcement = Announcement(
            worker=WorkerId(name),
            epoch=Epoch(epoch),
            url=f"https://h:{port}",
            role=Role.BOTH,
            lease_s=LEASE_S,
            sequence=sequence,
            is_farewell=is_farewell,
        )
        model, key = self.model, (name, epoch)
        self.table.lapse(self.now)
        is_news = self.table.is_news(announcement)
        verdict = self.table.offer(announcement, b"sealed", self.now, age_s)
        self._forget_lapsed()
        owner = model.owners.get(name)
        if verdict.outcome is not Outcome.ACCEPTED:
            assert verdict.outcome is not Outcome.KNOWN or (owner is not None and not is_news)
            return
        assert is_news, "what changes something was not news"
        assert sequence > model.taken.get(key, 0), "an announcement was taken twice"
        assert epoch not in model.lost.get(name, set()), "an epoch that lost its name has it again"
        assert owner is None or owner.epoch == epoch, "a name changed hands under a lease"
        if is_farewell:
            if key in model.taken:  # else it never held the name
                model.taken[key] = sequence
                model.owners.pop(name, None)
                model.lost.setdefault(name, set()).add(epoch)
            return
        model.taken[key] = sequence
        assert age_s < LEASE_S
        model.lost.setdefault(name, set()).update(
            other for n, other in model.taken if n == name and other != epoch
        )
        until = self.now - age_s + LEASE_S
        if owner is not None:
            until = max(until, owner.until)
        model.owners[name] = Owner(epoch, announcement.url, sequence, until)

    @precondition(lambda self: self.model.owners)
    @rule(data=st.data())
    def find_gone(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.owners)))
        owner = self.model.owners.pop(name)
        assert self.table.end(WorkerId(name), Epoch(owner.epoch))
        assert not self.table.end(WorkerId(name), Epoch(owner.epoch))

    @invariant()
    def each_name_and_each_address_has_one_owner(self) -> None:
        leases = [lease.announcement for lease in self.table]
        held = {each.worker: (each.epoch, each.url, each.sequence) for each in leases}
        assert held == {
            name: (owner.epoch, owner.url, owner.sequence)
            for name, owner in self.model.owners.items()
        }
        assert len({each.url for each in leases}) == len(leases) <= MAX_NAMES
        assert len(self.table.known()) == len(leases)

    def _forget_lapsed(self) -> None:
        for name, owner in tuple(self.model.owners.items()):
            if owner.until <= self.now:
                del self.model.owners[name]


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


@given(renewals=st.lists(st.floats(0, 6), max_size=8), lease_s=st.floats(1, 12))
@settings(max_examples=examples(30), deadline=None)
def test_one_whose_renewal_is_missing_is_found_at_once_and_each_half_second(
    renewals: list[float], lease_s: float
) -> None:
    table, renew_at, sequence = LeaseTable(), sorted(renewals), 1
    table.offer(announce("a", sequence, lease_s), b"", Instant(0.0))
    granted_at, looked_at = 0.0, -1.0
    for tick in range(100):
        now = tick / 10
        while renew_at and renew_at[0] <= now:
            renew_at.pop(0)
            sequence += 1
            renewed = table.offer(announce("a", sequence, lease_s), b"", Instant(now))
            if renewed.outcome is Outcome.ACCEPTED:
                granted_at, looked_at = now, -1.0
        table.lapse(Instant(now))
        found = [lease.announcement.worker for lease in table.take_overdue(Instant(now))]
        is_held = now < granted_at + lease_s
        assert (table.find(WorkerId("a")) is not None) == is_held
        since_s = now - max(looked_at, granted_at + OVERDUE_SHARE * lease_s / 3 - LOOK_S)
        if is_held and since_s > LOOK_S + 1e-6:
            assert found == ["a"]
        elif not is_held or since_s < LOOK_S - 1e-6:
            assert found == []
        if found:
            looked_at = now


def announce(name: str, sequence: int, lease_s: float) -> Announcement:
    return Announcement(
        worker=WorkerId(name),
        epoch=Epoch("e" * 32),
        url="https://h:1",
        role=Role.BOTH,
        lease_s=lease_s,
        sequence=sequence,
    )
