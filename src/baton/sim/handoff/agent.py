"""The production agent, watched: what it hears, what it tells its engine, what that tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.handoff.agent import HandoffAgent
from baton.handoff.messages import (
    Declined,
    Grant,
    Ping,
    Pong,
    Recalled,
    Renew,
    Renewed,
    Returned,
    Settled,
    Underway,
)
from baton.handoff.pooling.desk import PoolDesk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.authority.ticket import Ticket
    from baton.handoff.agent import AgentOptions
    from baton.handoff.interface import HandoffEvent, ReceiveOrder, SampledToken, SendOrder
    from baton.handoff.peers import Heard
    from baton.ids import TicketId
    from baton.sim.handoff.checker import Checker
    from baton.sim.handoff.process import SimProcess


class SimAgent(HandoffAgent):
    """A `HandoffAgent` without a thread, whose process is watched."""

    def __init__(self, options: AgentOptions, process: SimProcess, checker: Checker) -> None:
        super().__init__(options)
        self._process, self._checker = process, checker

    @property
    def pool_desk(self) -> PoolDesk | None:
        """The desk of mode pool, where there is a store."""
        return self._pool if isinstance(self._pool, PoolDesk) else None

    def give_up(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffAgent`."""
        super().give_up(ticket, reason)
        self.wake_pool()

    def wake_pool(self) -> None:
        """Something was asked of the pool's desk."""
        if self.pool_desk is not None:
            self._process.pool_driver.wake()

    def _heard(self, heard: Heard) -> None:
        message = heard.message
        if isinstance(message, Ping | Pong):
            return
        before = self._checker.before_hearing(self._process, heard)
        super()._heard(heard)
        self._checker.after_hearing(self._process, heard, before)

    def _emit(self, event: HandoffEvent) -> None:
        self._checker.told(self._process, event)
        super()._emit(event)


class WatchedPort:
    """Between an engine and its agent; implements `HandoffPort`."""

    def __init__(self, agent: SimAgent, process: SimProcess, checker: Checker) -> None:
        self._agent, self._process, self._checker = agent, process, checker
        self._uncomputed: tuple[Ticket, ...] = ()

    def expect(self, order: ReceiveOrder) -> None:
        """See `HandoffPort`."""
        self._checker.expected(self._process, order)
        self._agent.expect(order)
        self._agent.wake_pool()

    def offer(self, order: SendOrder) -> None:
        """See `HandoffPort`."""
        self._checker.offered(self._process, order)
        self._agent.offer(order)
        self._agent.wake_pool()

    def computing(self, prompts: Sequence[Ticket]) -> None:
        """See `HandoffPort`."""
        self._uncomputed = tuple(prompts)
        self._checker.deadlines.engine_lives(self._process, self._uncomputed)
        self._agent.computing(prompts)

    def layer_ready(self, tickets: Sequence[tuple[TicketId, int]], layer: int) -> None:
        """See `HandoffPort`."""
        self._checker.deadlines.engine_lives(self._process, self._uncomputed)
        self._agent.layer_ready(tickets, layer)
        self._agent.wake_pool()

    def finish(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `HandoffPort`."""
        self._checker.leases.begins(self._process, ticket)
        self._agent.finish(ticket, first_token)
        self._agent.wake_pool()

    def decline(self, ticket: Ticket, reason: str) -> None:
        """See `HandoffPort`."""
        self._agent.decline(ticket, reason)

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffPort`."""
        self._checker.aborted(self._process, ticket)
        self._agent.abort(ticket, reason)
        self._agent.wake_pool()

    def keep(self, ticket: Ticket) -> None:
        """See `HandoffPort`."""
        self._agent.keep(ticket)

    def give_back(self, ticket: TicketId) -> None:
        """See `LoanPort`."""
        self._agent.give_back(ticket)

    def recall(self) -> None:
        """See `LoanPort`."""
        self._agent.recall()

    def withdraw_oldest(self, tickets: Sequence[TicketId], reason: str) -> None:
        """See `HandoffPort`."""
        self._agent.withdraw_oldest(tickets, reason)

    def poll(self) -> list[HandoffEvent]:
        """See `HandoffPort`."""
        events = self._agent.poll()
        for event in events:
            self._checker.heard_by_engine(self._process, event)
        return events


def tickets_of(heard: Heard, sealed: dict[str, TicketId]) -> tuple[TicketId, ...]:
    """Which tickets a message is about; `sealed` ones are known by their text too."""
    message = heard.message
    match message:
        case Grant():
            return (message.id,)
        case Declined(text):
            return (sealed[text],) if text in sealed else ()
        case Renew() | Renewed() | Returned() | Recalled() | Settled() | Underway():
            return message.tickets
        case _:
            ticket = getattr(message, "ticket", None)
            return () if ticket is None else (ticket,)
