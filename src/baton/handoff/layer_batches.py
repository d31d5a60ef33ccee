"""When the agent is notified of layers that are computed, and of how many at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.handoff.interface import SendOrder
    from baton.ids import TicketId


class ReadyLayers(NamedTuple):
    """KV of tokens `[0, stop)` of these layers is in place."""

    ticket: TicketId
    layers: Sequence[int]
    stop: int


@dataclass(slots=True)
class _Progress:
    """One prompt: tokens `[start, stop)` are new in the layers that are being computed.

    `seen` has a bit for each layer that is ready up to `stop`; the agent was not notified of
    those in `pending` yet.
    """

    start: int
    stop: int
    seen: int = 0
    pending: list[int] = field(default_factory=list)

    def begin_chunk(self, stop: int) -> None:
        if stop < self.stop:  # it is computed again
            self.start = 0
        elif not self.pending:
            self.start = self.stop
        self.stop, self.seen = stop, 0
        self.pending.clear()  # they come again, up to this `stop`


class LayerBatcher:
    """Gathers ready layers of each prompt until they exceed `batch_bytes`, or the prompt ends.

    What is left goes with the prompt's end (`take`): a prompt of fewer bytes is sent at once. A
    notification wakes the agent's thread in the middle of a forward pass, and each
    write costs both workers some hundred microseconds; to send earlier is worth that only for
    bytes that take as long on their way. 0: each layer by itself.

    Prompts that are offered and not finished; owner: the engine's thread.
    """

    def __init__(self, batch_bytes: int, *, num_layers: int, bytes_per_token: int) -> None:
        self._batch_bytes = batch_bytes
        self._layer_token_bytes = bytes_per_token / num_layers
        self._prompts: dict[TicketId, _Progress] = {}

    def add(self, order: SendOrder) -> None:
        """A prompt is offered."""
        self._prompts[order.ticket.id] = _Progress(order.num_ready_tokens, order.num_ready_tokens)

    def layer_ready(
        self, tickets: Iterable[tuple[TicketId, int]], layer: int
    ) -> tuple[ReadyLayers, ...]:
        """For each `(ticket, stop)`: KV of tokens `[0, stop)` of `layer` is in place.

        Returns what the agent is to be notified of now.
        """
        bit = 1 << layer
        due: list[ReadyLayers] = []
        for ticket, stop in tickets:
            prompt = self._prompts.get(ticket)
            if prompt is None:
                continue  # it has ended
            if stop != prompt.stop:
                prompt.begin_chunk(stop)
            if prompt.seen & bit:
                continue
            prompt.seen |= bit
            prompt.pending.append(layer)
            num_bytes = len(prompt.pending) * (stop - prompt.start) * self._layer_token_bytes
            if num_bytes > self._batch_bytes:
                due.append(ReadyLayers(ticket, prompt.pending, stop))
                prompt.pending = []
        return tuple(due)

    def take(self, ticket: TicketId) -> ReadyLayers | None:
        """A prompt is computed, or has ended: the layers that are left, if there are any."""
        prompt = self._prompts.pop(ticket, None)
        if prompt is None or not prompt.pending:
            return None
        return ReadyLayers(ticket, prompt.pending, prompt.stop)
