"""An engine's heartbeat: that it computes, and which prompts it has yet to compute.

One reference, replaced as a whole by the engine's thread and read by any other. The instant in it
moves only when the thread that computes passes by: at the beginning of a step, and with each layer
that is ready. So no other thread reports for an engine that is stuck in a forward pass, waits for
a lock, or whose process was stopped.

`HeartbeatPublisher` sends it to decode workers as keepalives: which of their prompts this worker's
engine works on. The agent's thread only forwards the engine's own report, with its age. Where the
engine reported nothing since, nothing is sent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from baton.clock import Clock, Instant
from baton.handoff.grants import Incarnation, incarnation_of, incarnation_of_peer
from baton.handoff.messages import MAX_BATCH, Keepalive
from baton.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.auth.ticket import Ticket
    from baton.handoff.kv_views import AgentContext
    from baton.handoff.peers import Peer
    from baton.ids import TicketId


class PendingPrefills(Record, frozen=True):
    """Prefills that are queued or not all computed, as last reported, and when that was."""

    last_progress_at: Instant
    prompts: tuple[Ticket, ...]


class EngineHeartbeat:
    """`report_progress` and `tick` are the engine's thread's alone; `pending` is anybody's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.pending = PendingPrefills(Instant(-math.inf), ())
        """The last report."""

    def report_progress(self, prompts: Sequence[Ticket]) -> None:
        """See `HandoffPort.report_progress`."""
        self.pending = PendingPrefills(self._clock.now(), tuple(prompts))

    def tick(self) -> None:
        """A layer of the step is done."""
        self.pending = PendingPrefills(self._clock.now(), self.pending.prompts)


KEEPALIVES_PER_TIMEOUT: Final = 4
"""Three of them may be late without harm."""

MAX_KEEPALIVE_INTERVAL_S: Final = 1.0
"""However long this worker's own timeout is: its peers may be less patient."""


def compute_interval_s(timeout_s: float) -> float:
    """Between two words of one engine."""
    return min(MAX_KEEPALIVE_INTERVAL_S, timeout_s / KEEPALIVES_PER_TIMEOUT)


class HeartbeatPublisher:
    """Sends `Keepalive` periodically. Owner: the agent's thread."""

    def __init__(self, context: AgentContext, heartbeat: EngineHeartbeat) -> None:
        self._context, self._heartbeat = context, heartbeat
        self._interval_s = compute_interval_s(context.timeout_s)
        self._next_at = Instant(0.0)
        self._published: PendingPrefills | None = None

    def tick(self) -> PendingPrefills | None:
        """The engine's report since the last call; its decode workers have been sent it."""
        now, pending = self._context.clock.now(), self._heartbeat.pending
        if now < self._next_at or pending is self._published:
            return None
        self._next_at, self._published = Instant(now + self._interval_s), pending
        groups = _by_decode(pending.prompts)
        for peer in self._context.peers if groups else ():
            # KV goes to the side that dialed: this peer, where it is a ticket's decode worker.
            if peer.dialed is None:
                tickets = groups.get(incarnation_of_peer(peer), ())
                self._publish(peer, tickets, max(0.0, now - pending.last_progress_at))
        return pending

    def _publish(self, peer: Peer, tickets: tuple[TicketId, ...], idle_s: float) -> None:
        for first in range(0, len(tickets), MAX_BATCH):
            self._context.peers.send(peer, Keepalive(idle_s, tickets[first : first + MAX_BATCH]))


def _by_decode(prompts: Iterable[Ticket]) -> dict[Incarnation | None, tuple[TicketId, ...]]:
    groups: dict[Incarnation | None, list[TicketId]] = {}
    for ticket in prompts:
        groups.setdefault(incarnation_of(ticket.decode), []).append(ticket.id)
    return {incarnation: tuple(tickets) for incarnation, tickets in groups.items()}
