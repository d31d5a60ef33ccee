"""Short prompts are sent at once: the agent is notified when all layers are computed.

Each word to the agent wakes its thread in the middle of a forward pass. Where a prompt is computed
in little more time than that takes, there is nothing to gain by sending it layer by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.handoff.interface import SendOrder
    from baton.ids import TicketId


class ShortPromptBatcher:
    """Prompts of at most `max_tokens` tokens, offered and not finished. Owner: the engine's thread.

    `max_tokens` 0: none.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._stops: dict[TicketId, int] = {}

    def add(self, order: SendOrder) -> None:
        """A prompt is offered."""
        if order.num_tokens <= self._max_tokens:
            self._stops[order.ticket.id] = order.num_tokens

    def exclude(self, tickets: Iterable[tuple[TicketId, int]]) -> tuple[tuple[TicketId, int], ...]:
        """Those of which the agent is notified layer by layer."""
        if not self._stops:
            return tuple(tickets)
        return tuple(each for each in tickets if each[0] not in self._stops)

    def take(self, ticket: TicketId) -> int | None:
        """How many tokens of a prompt are to be announced, if it leaves in one piece."""
        return self._stops.pop(ticket, None)
