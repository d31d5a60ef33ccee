"""When a worker must stop by itself, since gateways may give its name away. Pure.

    waiting ──accepted──► serving ──no acceptance in time──► fenced ──accepted──► serving
       │                     │                                 │
       └─────────────────────┴──────── superseded ◄────────────┘   the end

A gateway counts a lease from the receipt of an announcement; this worker counts from its sending,
and ends earlier: so the fence comes first, whatever a message takes. No clocks are compared.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING, Final, assert_never

from baton.clock import Instant

if TYPE_CHECKING:
    from baton.ids import Epoch

FENCE_SHARE: Final = 0.8
"""Of its lease, after which a worker is fenced. The rest is for two clocks that do not run equally
fast, and for what a worker takes to stop; two of three renewals may fail before."""
MAX_PENDING: Final = 64


class Standing(StrEnum):
    """What a worker may do: only one that is `SERVING` takes requests and writes to others."""

    WAITING = "waiting"
    SERVING = "serving"
    FENCED = "fenced"
    SUPERSEDED = "superseded"


class MembershipFence:
    """One epoch of a worker. Every `now` is by this worker's own monotonic clock."""

    def __init__(self, lease_s: float) -> None:
        self._serve_s = lease_s * FENCE_SHARE
        self._sent_at: OrderedDict[int, Instant] = OrderedDict()
        self.until = Instant(-math.inf)
        """Until when this worker may serve, unless another announcement is accepted."""
        self.standing = Standing.WAITING
        self.superseded_by: Epoch | None = None
        self.num_fenced = 0

    def sent(self, sequence: int, now: Instant) -> None:
        """An announcement is about to be sent."""
        self._sent_at[sequence] = now
        while len(self._sent_at) > MAX_PENDING:
            self._sent_at.popitem(last=False)

    def accepted(self, sequence: int, now: Instant) -> None:
        """Some gateway has taken an announcement; it may have taken long to report that."""
        sent_at = self._sent_at.get(sequence)
        if sent_at is None or self.standing is Standing.SUPERSEDED:
            return
        self.until = max(self.until, Instant(sent_at + self._serve_s))
        if now < self.until:
            self.standing = Standing.SERVING

    def superseded(self, owner: Epoch) -> None:
        """A gateway has given the name to another epoch: this one has to end."""
        if self.standing is not Standing.SUPERSEDED:
            self.standing, self.superseded_by = Standing.SUPERSEDED, owner

    def explain(self, now: Instant) -> str | None:
        """Why this worker serves nothing, now; None where it does."""
        match self.look(now):
            case Standing.SERVING:
                return None
            case Standing.WAITING:
                return "no gateway has accepted this worker's announcement yet; see its log"
            case Standing.FENCED:
                return (
                    "no gateway has accepted this worker's announcements for "
                    f"{now - self.until + self._serve_s:.1f} s: it is fenced until one does"
                )
            case Standing.SUPERSEDED:
                return f"its name was given to epoch {self.superseded_by}: this worker ends"
            case other:
                assert_never(other)

    def look(self, now: Instant) -> Standing:
        """The standing, now."""
        if self.standing is Standing.SERVING and now >= self.until:
            self.standing = Standing.FENCED
            self.num_fenced += 1
        return self.standing
