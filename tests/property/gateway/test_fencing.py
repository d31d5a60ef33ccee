"""A worker and several gateways, whose messages take any time or are lost, on clocks of their own.

Whatever happens: a worker that serves is held by a gateway that accepted it, and fences itself
before that one gives its name away. And gateways that can reach each other come to know the same.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.clock import Instant
from baton.gateway.members.lease_table import SETTLE_S, LeaseTable, Outcome
from baton.ids import Epoch, WorkerId
from baton.protocol.announcements import Announcement
from baton.protocol.worker_http import Role
from baton.worker.fence import MembershipFence, Standing
from tests.examples import examples

LEASE_S = 3.0
INTERVAL_S = LEASE_S / 3
STEP_S = 0.05
NUM_GATEWAYS = 3
DRIFT = st.floats(0.999, 1.001)
DELAY = st.one_of(st.none(), st.floats(0, 4.0))
"""Of one message, in either direction; None: it is lost."""


@dataclass
class Gateway:
    """A lease table whose clock starts anywhere and runs a little too fast or too slow."""

    offset_s: float
    rate: float
    table: LeaseTable = field(default_factory=LeaseTable)

    def clock(self, true_s: float) -> Instant:
        return Instant(self.offset_s + self.rate * true_s)


@dataclass
class Life:
    """One epoch of the worker `w`, which starts at `start_s` of true time."""

    epoch: str
    start_s: float
    offset_s: float
    rate: float
    fence: MembershipFence = field(default_factory=lambda: MembershipFence(LEASE_S))
    sequence: int = 0
    next_at: float = 0.0

    def clock(self, true_s: float) -> Instant:
        return Instant(self.offset_s + self.rate * true_s)

    def announce(self, true_s: float) -> Announcement:
        self.sequence += 1
        self.next_at = true_s + INTERVAL_S / self.rate
        self.fence.sent(self.sequence, self.clock(true_s))
        return Announcement(
            worker=WorkerId("w"),
            epoch=Epoch(self.epoch),
            url=f"https://{self.epoch[0]}:1",
            role=Role.BOTH,
            lease_s=LEASE_S,
            sequence=self.sequence,
        )


@given(data=st.data())
@settings(max_examples=examples(15), deadline=None)
def test_a_worker_is_fenced_before_a_gateway_that_accepted_it_gives_its_name_away(
    data: st.DataObject,
) -> None:
    offset = st.floats(-5000, 5000)
    gateways = [Gateway(10_000 + data.draw(offset), data.draw(DRIFT)) for _ in range(NUM_GATEWAYS)]
    lives = [
        Life(letter * 32, start_s, data.draw(offset), data.draw(DRIFT))
        for letter, start_s in (("a", 0.0), ("b", 4.0))
    ]
    order = itertools.count()
    mail: list[tuple[float, int, object]] = []
    last_accepted: dict[tuple[int, str], int] = {}
    true_s = 0.0
    while true_s < 16.0:
        true_s += STEP_S
        while mail and mail[0][0] <= true_s:
            _, _, deliver = heapq.heappop(mail)
            deliver(true_s)  # type: ignore[operator]
        for life in lives:
            if true_s >= max(life.start_s, life.next_at) and life.fence.superseded_by is None:
                announcement = life.announce(true_s)
                for number, gateway in enumerate(gateways):
                    there, back = data.draw(DELAY), data.draw(DELAY)

                    def receive(
                        at_s: float,
                        life=life,
                        gateway=gateway,
                        number=number,
                        announcement=announcement,
                        back=back,
                    ) -> None:
                        verdict = gateway.table.offer(announcement, b"", gateway.clock(at_s))

                        def reply(at_s: float) -> None:
                            match verdict.outcome:
                                case Outcome.ACCEPTED:
                                    life.fence.accepted(announcement.sequence, life.clock(at_s))
                                    key = number, life.epoch
                                    known = last_accepted.get(key, 0)
                                    last_accepted[key] = max(known, announcement.sequence)
                                case Outcome.SUPERSEDED:
                                    life.fence.superseded(verdict.owner or Epoch(""))

                        if back is not None:
                            heapq.heappush(mail, (at_s + back, next(order), reply))

                    if there is not None:
                        heapq.heappush(mail, (true_s + there, next(order), receive))
        for gateway in gateways:
            gateway.table.lapse(gateway.clock(true_s))
            assert sum(1 for _ in gateway.table) <= 1, "two owners of one name"
        for life in lives:
            if life.fence.look(life.clock(true_s)) is Standing.SERVING:
                check_held(life, gateways, last_accepted)


def check_held(
    life: Life, gateways: list[Gateway], last_accepted: dict[tuple[int, str], int]
) -> None:
    """One of the gateways that accepted the life's latest accepted announcement still holds it."""
    latest = max(sequence for (_, epoch), sequence in last_accepted.items() if epoch == life.epoch)
    accepting = [
        gateways[number]
        for (number, epoch), sequence in last_accepted.items()
        if epoch == life.epoch and sequence == latest
    ]
    held = [gateway.table.find(WorkerId("w")) for gateway in accepting]
    assert all(lease is not None and lease.announcement.epoch == life.epoch for lease in held)


@given(
    known=st.lists(st.lists(st.integers(1, 5), min_size=4, max_size=4), min_size=2, max_size=5),
    pairs=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(15), deadline=None)
def test_gateways_that_exchange_come_to_know_the_same(known: list[list[int]], pairs) -> None:
    """Each gateway begins with other announcements of four workers; then pairs exchange."""
    tables = [LeaseTable() for _ in known]
    sealed: dict[bytes, Announcement] = {}
    for table, sequences in zip(tables, known, strict=True):
        for number, sequence in enumerate(sequences):
            announcement = Announcement(
                worker=WorkerId(f"w{number}"),
                epoch=Epoch("e" * 32),
                url=f"https://h:{number + 1}",
                role=Role.BOTH,
                lease_s=60.0,
                sequence=sequence,
            )
            text = f"{number}/{sequence}".encode()
            sealed[text] = announcement
            table.offer(announcement, text, Instant(0.0))
    now = Instant(SETTLE_S)
    rounds = [(i, j) for i in range(len(tables)) for j in range(len(tables)) if i != j]
    for _ in tables:  # knowledge goes at least one gateway further in each
        pairs.shuffle(rounds)
        for asking, asked in rounds:
            relayed, wanted = tables[asked].compare(tables[asking].known(), now)
            answers = tables[asking].relay(wanted, now)
            for table, received in ((tables[asking], relayed), (tables[asked], answers)):
                for each in received:
                    table.offer(sealed[each.sealed], each.sealed, now, each.age_s)
    newest = tuple(max(each[number] for each in known) for number in range(4))
    for table in tables:
        found = {lease.announcement.worker: lease.announcement.sequence for lease in table}
        assert tuple(found[WorkerId(f"w{number}")] for number in range(4)) == newest
