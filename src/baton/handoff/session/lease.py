"""For how long prefill holds what decode has not taken yet: each side's half of one lease.

    prefill: Lease                                       decode: LeaseHolder

    COMPUTING ── hold ──► HELD ◄── renew ── Renew ◄─────  queued, or reading
                           │       └─────── Renewed ───►  confirmed
                           │ lease_s without one
                           ▼
                         LAPSED   its blocks may hold another prompt: a renewal comes too late

No clocks are compared. Prefill's time begins when it receives a message, decode's when it sent it:

    decode   ├─ sent ───────── lease_s ─────────┤ no read that ends later counts
    prefill       ├─ received ───── lease_s ──────────┤ blocks may change from here on

so decode stops first, as long as both clocks run at the same rate. A renewal counts for decode only
once prefill has confirmed it; any message of prefill about the ticket confirms the grant.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

from baton.clock import Instant

LEASE_STAGE: Final = "lease"
"""Stage of the `HandoffError` that ends a handoff whose lease ran out."""

LAPSED_REASON: Final = "the lease ran out: its decode worker did not renew it"


class LeasePhase(StrEnum):
    """Where prefill's half stands."""

    COMPUTING = "computing"
    HELD = "held"
    LAPSED = "lapsed"


class Lease:
    """Prefill's half. `lease_s` infinite: it never runs out."""

    def __init__(self, lease_s: float) -> None:
        self.phase = LeasePhase.COMPUTING
        self._lease_s = lease_s
        self._until = Instant(math.inf)

    def hold(self, now: Instant) -> None:
        """All is computed: from now on blocks are held for decode alone."""
        if self.phase is LeasePhase.COMPUTING:
            self.phase = LeasePhase.HELD
            self._until = Instant(now + self._lease_s)

    def renew(self, now: Instant) -> bool:
        """Decode wants it still; whether it can have it."""
        if self.is_over(now):
            return False
        if self.phase is LeasePhase.HELD:
            self._until = Instant(max(self._until, now + self._lease_s))
        return True

    def is_over(self, now: Instant) -> bool:
        """Whether it was not renewed in time; once it is over it stays so."""
        if self.phase is LeasePhase.HELD and now >= self._until:
            self.phase = LeasePhase.LAPSED
        return self.phase is LeasePhase.LAPSED


class LeaseHolder:
    """Decode's half: until when what it reads is certainly held. Without a lease, no limit."""

    def __init__(self) -> None:
        self._lease_s = math.inf
        self._until = Instant(math.inf)

    def begin(self, sent_at: Instant, lease_s: float) -> None:
        """The grant was sent to a worker whose leases last `lease_s`."""
        self._lease_s = lease_s
        self._until = Instant(sent_at + lease_s)

    def confirmed(self, sent_at: Instant) -> None:
        """Prefill held it when it received the message that was sent then."""
        self._until = Instant(max(self._until, sent_at + self._lease_s))

    def holds(self, now: Instant) -> bool:
        """Whether what was read up to now was held all the time."""
        return now < self._until
