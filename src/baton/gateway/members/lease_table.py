"""Which epoch of a worker holds its name at one gateway, and until when. Pure.

    free ──offer──► held by an epoch ──renewal──► held longer
      ▲               │ lapse: no renewal in time, by this gateway's clock
      │               │ farewell: that epoch has ended by itself
      └───────────────┘ found gone: its address refuses connections, or is another epoch's

A name that becomes free stays known: an epoch that has lost it to another one is superseded and
never gets it back, and no announcement that was taken once is taken again.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.clock import Instant
from baton.gateway.options import WorkerAddress
from baton.protocol.announcements import (
    MAX_LEASE_S,
    MAX_NAMES,
    MAX_RELAYED,
    RENEWALS_PER_LEASE,
    Known,
    Relayed,
    key_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from yarl import URL

    from baton.ids import Epoch, WorkerId
    from baton.protocol.announcements import Announcement

MAX_PAST_EPOCHS: Final = 8
"""Of one name, that are remembered."""
OVERDUE_SHARE: Final = 1.25
"""A renewal that has not come after so many intervals is missing."""
LOOK_S: Final = 0.5
SETTLE_S: Final = 0.5
"""A renewal so young is on its way to the other gateways still: it is not relayed."""
MAX_STALE_ENTRIES: Final = 1024
"""Of the heap of due times, besides one for each lease and as many again."""
MIN_INTERVAL_S: Final = 0.05
"""Between two announcements of one epoch that it sends itself: others are refused."""


class Outcome(StrEnum):
    """What became of an announcement. Only `ACCEPTED` changes who holds a name, and until when."""

    ACCEPTED = "accepted"
    KNOWN = "known"
    REPEATED = "repeated"
    TOO_OFTEN = "too_often"
    LAPSED = "lapsed"
    NAME_HELD = "name_held"
    ADDRESS_HELD = "address_held"
    SUPERSEDED = "superseded"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome, and the lease that stands in the way where one does."""

    outcome: Outcome
    holder: Lease | None = None
    owner: Epoch | None = None


class Lease:
    """One name, held by one epoch. `granted_at`: when a gateway first had its last announcement.

    `origin` is the address: two URLs of one origin are the same address.
    """

    __slots__ = ("_known", "announcement", "due_at", "granted_at", "origin", "sealed")

    def __init__(self, announcement: Announcement, sealed: bytes, granted_at: Instant) -> None:
        self.announcement, self.sealed, self.granted_at = announcement, sealed, granted_at
        self.origin = _origin_of(announcement)
        names = key_of(announcement.worker), key_of(announcement.epoch)
        self._known = Known(*names, announcement.sequence)
        self.due_at = self.overdue_at
        """When the table looks at it next."""

    @property
    def lapses_at(self) -> Instant:
        """From when on the name is free, unless the lease is renewed."""
        return Instant(self.granted_at + self.announcement.lease_s)

    @property
    def overdue_at(self) -> Instant:
        """From when on a renewal is missing; before `lapses_at`."""
        interval_s = self.announcement.lease_s / RENEWALS_PER_LEASE
        return Instant(self.granted_at + OVERDUE_SHARE * interval_s)

    @property
    def known(self) -> Known:
        """For other gateways."""
        return self._known

    def renew(self, announcement: Announcement, sealed: bytes, granted_at: Instant) -> None:
        """A later announcement of the same epoch: the lease never gets shorter by its way here."""
        if announcement.url != self.announcement.url:
            self.origin = _origin_of(announcement)
        self.announcement, self.sealed = announcement, sealed
        self.granted_at = max(self.granted_at, granted_at)
        self._known = Known(self._known.worker, self._known.epoch, announcement.sequence)


class _Past:
    """What is remembered of a name: the last sequence of each epoch that held it, in order."""

    __slots__ = ("ended", "sequences")

    def __init__(self) -> None:
        self.sequences: OrderedDict[Epoch, int] = OrderedDict()
        self.ended: set[Epoch] = set()

    @property
    def last(self) -> Epoch:
        return next(reversed(self.sequences))

    def note(self, announcement: Announcement, *, has_ended: bool) -> None:
        self.sequences[announcement.epoch] = announcement.sequence
        self.sequences.move_to_end(announcement.epoch)
        if has_ended:
            self.ended.add(announcement.epoch)
        while len(self.sequences) > MAX_PAST_EPOCHS:
            self.ended.discard(self.sequences.popitem(last=False)[0])


class _Due(NamedTuple):
    at: Instant
    worker: WorkerId


class LeaseTable:
    """All leases at one gateway. Owner: one thread. Every `now` is by that gateway's own clock."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._leases: dict[WorkerId, Lease] = {}
        self._by_origin: dict[URL, WorkerId] = {}
        self._by_key: dict[bytes, WorkerId] = {}
        self._past: OrderedDict[WorkerId, _Past] = OrderedDict()
        self._due: list[_Due] = []
        self._overdue: dict[WorkerId, None] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def find(self, worker: WorkerId) -> Lease | None:
        """The lease of a name."""
        return self._leases.get(worker)

    def offer(
        self, announcement: Announcement, sealed: bytes, now: Instant, age_s: float = 0.0
    ) -> Verdict:
        """Take a verified announcement, which a gateway received `age_s` seconds ago.

        Its URL is a `WorkerAddress`.
        """
        granted_at = Instant(now - age_s)
        if not announcement.is_farewell and age_s >= announcement.lease_s:
            return Verdict(Outcome.LAPSED)
        self.lapse(now)
        lease = self._leases.get(announcement.worker)
        if lease is None:
            return self._offer_free(announcement, sealed, granted_at)
        if lease.announcement.epoch == announcement.epoch:
            is_soon = not age_s and now - lease.granted_at < MIN_INTERVAL_S
            is_renewal = announcement.sequence > lease.announcement.sequence
            if is_soon and is_renewal and not announcement.is_farewell:
                return Verdict(Outcome.TOO_OFTEN)
            return self._offer_renewal(lease, announcement, sealed, granted_at)
        past = self._past.get(announcement.worker)
        if past is not None and announcement.epoch in past.sequences:
            return Verdict(Outcome.SUPERSEDED, lease, lease.announcement.epoch)
        return Verdict(Outcome.NAME_HELD, lease, lease.announcement.epoch)

    def is_news(self, announcement: Announcement) -> bool:
        """Whether `offer` may change something: what is not news need not be verified."""
        lease = self._leases.get(announcement.worker)
        if lease is not None:
            held = lease.announcement
            return held.epoch == announcement.epoch and announcement.sequence > held.sequence
        past = self._past.get(announcement.worker)
        return past is None or announcement.sequence > past.sequences.get(announcement.epoch, 0)

    def lapse(self, now: Instant) -> list[Announcement]:
        """Free every name whose lease is over; their last announcements."""
        lapsed: list[Announcement] = []
        while self._due and self._due[0].at <= now:
            due = heapq.heappop(self._due)
            lease = self._leases.get(due.worker)
            if lease is None or lease.due_at != due.at:
                continue  # of a lease that was freed, or has another entry by now
            if lease.lapses_at <= now:
                lapsed.append(lease.announcement)
                self._free(lease)
            elif lease.overdue_at <= now:
                self._overdue[due.worker] = None
                self._schedule(lease, min(Instant(now + LOOK_S), lease.lapses_at))
            else:
                self._schedule(lease, lease.overdue_at)
        return lapsed

    def end(self, worker: WorkerId, epoch: Epoch) -> bool:
        """An epoch is gone, as it seems: free its name. Whether it held it.

        If it is not gone after all, and no other one has the name, its next announcement is taken.
        """
        lease = self._leases.get(worker)
        if lease is None or lease.announcement.epoch != epoch:
            return False
        self._free(lease)
        return True

    def take_overdue(self, now: Instant) -> list[Lease]:
        """Those whose renewal is missing, of what `lapse` found: each once in `LOOK_S`."""
        found = [self._leases[worker] for worker in self._overdue if worker in self._leases]
        self._overdue.clear()
        return [lease for lease in found if lease.overdue_at <= now]

    # Between gateways

    def known(self) -> tuple[Known, ...]:
        """What is known here."""
        return tuple(lease.known for lease in self._leases.values())

    def compare(self, theirs: Iterable[Known], now: Instant) -> tuple[list[Relayed], list[bytes]]:
        """What another gateway lacks of what is known here; and of which workers it knows more.

        A name that another epoch holds there is left alone: it has to lapse at one of the two.
        """
        by_worker = {known.worker: known for known in theirs}
        lacking: list[bytes] = []
        wanted: list[bytes] = []
        for lease in self._leases.values():
            own, other = lease.known, by_worker.pop(lease.known.worker, None)
            if own == other:
                continue
            if _is_newer(own, other):
                if other is None or now - lease.granted_at >= SETTLE_S:
                    lacking.append(own.worker)
            elif other is not None and _is_newer(other, own):
                wanted.append(own.worker)
        wanted += by_worker  # of which nothing is known here
        return self.relay(lacking, now), wanted[:MAX_RELAYED]

    def relay(self, keys: Iterable[bytes], now: Instant) -> list[Relayed]:
        """Announcements for another gateway, by their workers' keys."""
        relayed: list[Relayed] = []
        for key in keys:
            worker = self._by_key.get(key)
            if worker is not None and len(relayed) < MAX_RELAYED:
                lease = self._leases[worker]
                age_s = min(max(0.0, now - lease.granted_at), MAX_LEASE_S)
                relayed.append(Relayed(lease.sealed, age_s))
        return relayed

    # Within

    def _offer_free(
        self, announcement: Announcement, sealed: bytes, granted_at: Instant
    ) -> Verdict:
        worker, past = announcement.worker, self._past.get(announcement.worker)
        if past is not None and announcement.epoch in past.sequences:
            is_latest = past.last == announcement.epoch and announcement.epoch not in past.ended
            if not is_latest:
                return Verdict(Outcome.SUPERSEDED, None, past.last)
            if announcement.sequence <= past.sequences[announcement.epoch]:
                return Verdict(Outcome.REPEATED)
        if announcement.is_farewell:
            if past is not None and past.last == announcement.epoch:
                past.note(announcement, has_ended=True)
            return Verdict(Outcome.ACCEPTED)
        holder = self._by_origin.get(_origin_of(announcement))
        if holder is not None:
            return Verdict(Outcome.ADDRESS_HELD, self._leases[holder])
        if len(self._leases) >= self._max_names:
            return Verdict(Outcome.FULL)
        lease = self._leases[worker] = Lease(announcement, sealed, granted_at)
        self._by_origin[lease.origin] = worker
        self._by_key[lease.known.worker] = worker
        self._schedule(lease, lease.overdue_at)
        return Verdict(Outcome.ACCEPTED)

    def _offer_renewal(
        self, lease: Lease, announcement: Announcement, sealed: bytes, granted_at: Instant
    ) -> Verdict:
        before = lease.announcement
        if announcement == before:  # it came by another gateway
            return Verdict(Outcome.KNOWN)
        if announcement.sequence <= before.sequence:
            return Verdict(Outcome.REPEATED)
        if announcement.is_farewell:
            self._free(lease)
            self._remember(announcement, has_ended=True)
            return Verdict(Outcome.ACCEPTED)
        if announcement.url != before.url:
            holder = self._by_origin.get(origin := _origin_of(announcement), announcement.worker)
            if holder != announcement.worker:
                return Verdict(Outcome.ADDRESS_HELD, self._leases[holder])
            del self._by_origin[lease.origin]
            self._by_origin[origin] = announcement.worker
        lease.renew(announcement, sealed, granted_at)
        if lease.overdue_at < lease.due_at:  # its lease is shorter now
            self._schedule(lease, lease.overdue_at)
        return Verdict(Outcome.ACCEPTED)

    def _schedule(self, lease: Lease, due_at: Instant) -> None:
        lease.due_at = due_at
        heapq.heappush(self._due, _Due(lease.due_at, lease.announcement.worker))
        if len(self._due) > 2 * len(self._leases) + MAX_STALE_ENTRIES:
            # Of leases that were freed, as of a worker that announces and ends all the time.
            self._due = [_Due(each.due_at, name) for name, each in self._leases.items()]
            heapq.heapify(self._due)

    def _free(self, lease: Lease) -> None:
        announcement = lease.announcement
        del self._leases[announcement.worker]
        self._by_origin.pop(lease.origin, None)
        self._by_key.pop(lease.known.worker, None)
        self._remember(announcement, has_ended=False)

    def _remember(self, announcement: Announcement, *, has_ended: bool) -> None:
        past = self._past.setdefault(announcement.worker, _Past())
        past.note(announcement, has_ended=has_ended)
        self._past.move_to_end(announcement.worker)
        while len(self._past) > 2 * self._max_names:
            self._past.popitem(last=False)


def _origin_of(announcement: Announcement) -> URL:
    return WorkerAddress(announcement.url, announcement.role).origin


def _is_newer(one: Known, other: Known | None) -> bool:
    """Whether `one` should replace `other`; False where another epoch holds the name."""
    return other is None or (one.epoch == other.epoch and one.sequence > other.sequence)
