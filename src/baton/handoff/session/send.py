"""Prefill's half of one handoff."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.errors import HandoffError
from baton.handoff.interface import KVSent, SendFailed
from baton.handoff.messages import Failed
from baton.handoff.session.actions import Announce, Emit, Say, SayFinished, SendAction, Submit

if TYPE_CHECKING:
    from baton.clock import Instant
    from baton.handoff.interface import SampledToken, SendOrder
    from baton.handoff.messages import Grant
    from baton.ids import TicketId
    from baton.transfer.interface import TransferId


class SendPhase(StrEnum):
    """Where a handoff stands on the prefill worker."""

    OFFERED = "offered"
    SENDING = "sending"
    DRAINING = "draining"
    ENDING = "ending"
    ENDED = "ended"


_CLOSED: Final = frozenset({SendPhase.ENDING, SendPhase.ENDED})
_SETTLING: Final = frozenset({SendPhase.DRAINING, SendPhase.ENDING})


class SendSession:
    """Prefill's half of one handoff. `start` of what is sent comes with the grant."""

    def __init__(self, order: SendOrder, *, num_layers: int, deadline: Instant) -> None:
        self.order = order
        self.deadline = deadline
        self.phase = SendPhase.OFFERED
        self.grant: Grant | None = None
        self._ready = np.full(num_layers, order.num_ready_tokens, dtype=np.int64)
        self._sent = np.zeros(num_layers, dtype=np.int64)
        self._outstanding: set[TransferId] = set()
        self._page_tokens = 1
        self._finish: SayFinished | None = None
        self._error: HandoffError | None = None

    @property
    def ticket(self) -> TicketId:
        """The ticket's id."""
        return self.order.ticket.id

    @property
    def over(self) -> bool:
        """Whether nothing can happen any more."""
        return self.phase is SendPhase.ENDED

    def granted(self, grant: Grant) -> list[SendAction]:
        """The decode worker asks for KV: `begin` follows, once the way is clear."""
        if self.phase is not SendPhase.OFFERED or self.grant is not None:
            return []
        if grant.prompt_hash != self.order.prompt_hash or grant.num_tokens != self.order.num_tokens:
            return self.fail(
                f"the two workers see different prompts: {self.order.num_tokens} tokens here, "
                f"{grant.num_tokens} there, or another model or tenant",
                stage="grant",
            )
        self.grant = grant
        self._sent[:] = grant.start
        return []

    def begin(self, page_tokens: int) -> list[SendAction]:
        """Transport and staging are there: send what is ready already.

        KV moves in multiples of `page_tokens`, as they lie in the sequence, and at last the rest.
        """
        if self.phase is not SendPhase.OFFERED or self.grant is None:
            return []
        self._page_tokens = page_tokens
        self.phase = SendPhase.SENDING
        return self._submit_ready(range(len(self._ready)))

    def layer_ready(self, layer: int, stop: int) -> list[SendAction]:
        """KV of tokens `[0, stop)` of `layer` is in place."""
        self._ready[layer] = max(int(self._ready[layer]), stop)
        if self.phase is not SendPhase.SENDING:
            return []
        return self._submit_ready((layer,))

    def finish(self, first_token: SampledToken | None) -> list[SendAction]:
        """The engine is done with this prompt."""
        self._finish = SayFinished(first_token)
        return self._drain() if self.phase is SendPhase.SENDING else []

    def submitted(self, transfer: TransferId, layer: int, stop: int) -> list[SendAction]:
        """A `Submit`, or its part up to `stop`, was handed to the transport."""
        self._outstanding.add(transfer)
        self._sent[layer] = stop
        return self._drain()

    def announced(self, layer: int, stop: int) -> list[SendAction]:
        """An `Announce`, or its part up to `stop`, was said."""
        self._sent[layer] = stop
        return self._drain()

    def taken(self) -> list[SendAction]:
        """The peer has read and verified all that it asked for."""
        if self.phase is SendPhase.DRAINING and self._is_read:
            return self._over()
        return self.fail("the peer took what was not all announced to it", stage=str(self.phase))

    def completed(self, transfer: TransferId) -> list[SendAction]:
        """A write is done with its source pages."""
        self._outstanding.discard(transfer)
        return self._settle()

    def write_failed(self, transfer: TransferId, reason: str) -> list[SendAction]:
        """A write failed: the handoff is over (what it wrote is the peer's to drop)."""
        return [*self.fail(reason, stage="transfer"), *self.completed(transfer)]

    def fail(self, reason: str, *, stage: str) -> list[SendAction]:
        """End early and tell the peer."""
        if self.phase in _CLOSED:
            return []
        return [Say(Failed(self.ticket, reason)), *self.peer_failed(reason, stage=stage)]

    def peer_failed(self, reason: str, *, stage: str) -> list[SendAction]:
        """End early because the peer said so, or is gone."""
        if self.phase in _CLOSED:
            return []
        self.phase = SendPhase.ENDING
        self._error = HandoffError(reason, stage=stage, peer=self.order.ticket.decode.worker)
        return self._settle()

    def expire(self, now: Instant) -> list[SendAction]:
        """Fail if the deadline has passed."""
        if now < self.deadline:
            return []
        what = "no grant came from the decode worker" if self.grant is None else "still sending"
        return self.fail(f"the deadline passed: {what}", stage=str(self.phase))

    def _submit_ready(self, layers: range | tuple[int, ...]) -> list[SendAction]:
        send = Announce if self._is_read else Submit
        actions: list[SendAction] = [
            send(layer, int(self._sent[layer]), stop)
            for layer in layers
            if (stop := self._sendable(layer)) > self._sent[layer]
        ]
        return actions or self._drain()

    def _sendable(self, layer: int) -> int:
        """A page is sent once: when it is full, or the last."""
        ready = int(self._ready[layer])
        return ready if ready >= self.order.num_tokens else ready - ready % self._page_tokens

    @property
    def _is_read(self) -> bool:
        """Whether the peer reads: then the source pages are held until it says `Taken`."""
        return self.grant is not None and self.grant.mover == "decode"

    def _drain(self) -> list[SendAction]:
        """Once all is submitted and the token is known, say so."""
        if self.phase is not SendPhase.SENDING or self._finish is None:
            return []
        if int(self._sent.min()) < self.order.num_tokens:
            return []
        self.phase = SendPhase.DRAINING
        return [self._finish, *self._settle()]

    def _settle(self) -> list[SendAction]:
        """End, once no write holds the source pages and no reader is owed them."""
        if self._outstanding or self.phase not in _SETTLING:
            return []
        if self._is_read and self._error is None:
            return []
        return self._over()

    def _over(self) -> list[SendAction]:
        self.phase = SendPhase.ENDED
        if self._error is not None:
            return [Emit(SendFailed(self.ticket, self._error))]
        return [Emit(KVSent(self.ticket))]
