"""Prefill's side of patience: decode workers hear which of their prompts its engine works on.

The agent's thread only carries the word; what it says is the engine's own (`pulse.py`), with its
age. Where the engine has given no sign of life since, nothing is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.handoff.grants import epoch_of
from baton.handoff.messages import MAX_BATCH, Underway

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.authority.ticket import Ticket
    from baton.handoff.desk import Desk
    from baton.handoff.peers import Peer
    from baton.handoff.pulse import EnginePulse, Roll
    from baton.ids import Epoch, TicketId

WORDS_PER_TIMEOUT: Final = 4
"""Three of them may be late without harm."""

LONGEST_SILENCE_S: Final = 1.0
"""However long this worker's own timeout is: its peers may be less patient."""


def compute_interval_s(timeout_s: float) -> float:
    """Between two words of one engine."""
    return min(LONGEST_SILENCE_S, timeout_s / WORDS_PER_TIMEOUT)


class Vouching:
    """Says `Underway` now and then. Owner: the agent's thread."""

    def __init__(self, desk: Desk, pulse: EnginePulse) -> None:
        self._desk, self._pulse = desk, pulse
        self._interval_s = compute_interval_s(desk.timeout_s)
        self._next_at = Instant(0.0)
        self._said: Roll | None = None

    def tick(self) -> Roll | None:
        """What the engine has said since the last time; its decode workers have been told of it."""
        now, roll = self._desk.clock.now(), self._pulse.roll
        if now < self._next_at or roll is self._said:
            return None
        self._next_at, self._said = Instant(now + self._interval_s), roll
        groups = _by_decode(roll.prompts)
        for peer in self._desk.peers if groups else ():
            # KV goes to the side that dialed: this peer, where it is a ticket's decode worker.
            if peer.dialed is None:
                self._vouch(peer, groups.get(epoch_of(peer), ()), max(0.0, now - roll.lived_at))
        return roll

    def _vouch(self, peer: Peer, tickets: tuple[TicketId, ...], idle_s: float) -> None:
        for first in range(0, len(tickets), MAX_BATCH):
            self._desk.peers.say(peer, Underway(idle_s, tickets[first : first + MAX_BATCH]))


def _by_decode(prompts: Iterable[Ticket]) -> dict[Epoch | None, tuple[TicketId, ...]]:
    groups: dict[Epoch | None, list[TicketId]] = {}
    for ticket in prompts:
        groups.setdefault(ticket.decode.epoch, []).append(ticket.id)
    return {epoch: tuple(tickets) for epoch, tickets in groups.items()}
