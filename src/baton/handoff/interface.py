"""The contract between an engine and the handoff agent of its worker.

The engine's thread calls; the agent answers through `poll`, never by calling back (it only calls
`wake`, given to it at construction, to say that `poll` has something). Blocks named here belong
to the agent from the call until the event that gives them back:

    expect ──► KVLanded                      blocks are ready, all tokens verified
           └─► KVFailed ──► BlocksQuiescent  quarantined in between
    offer  ──► KVSent | SendFailed           source blocks may change again
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.authority.ticket import Ticket
    from baton.clock import Instant
    from baton.errors import HandoffError
    from baton.ids import TicketId
    from baton.kv.copies import BlockTable
    from baton.telemetry.trace import LegTrace


DECLINED_STAGE: Final = "declined"
"""Stage of the `HandoffError` that ends an offer which the decode worker did not need."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token and its natural-log probability."""

    token_id: int
    logprob: float


class SampledToken(msgspec.Struct, frozen=True):
    """One sampled token, as any worker would have sampled it (the seed decides, not the place).

    `logprob` is that of the token itself; `top` are the most likely ones, best first. Both are
    empty when the request asked for none.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """Decode's side: get KV of tokens `[start, num_tokens)` into `blocks`.

    `prompt_hash` commits to all prompt tokens, the model and the tenant (`kv.identity`).
    """

    ticket: Ticket
    prompt_hash: bytes
    start: int
    num_tokens: int
    blocks: BlockTable
    deadline: Instant
    trace: LegTrace


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Prefill's side: KV of tokens `[0, num_tokens)` will be computed, or is cached, in `blocks`.

    `num_ready_tokens` of them are already in place in every layer (a prefix-cache hit).
    """

    ticket: Ticket
    prompt_hash: bytes
    num_tokens: int
    num_ready_tokens: int
    blocks: BlockTable
    deadline: Instant
    trace: LegTrace


@dataclass(frozen=True, slots=True)
class KVLanded:
    """All KV is in place and verified; `first_token` was sampled by the prefill worker.

    Where it is None the engine computes the last prompt token itself, and samples.
    """

    ticket: TicketId
    first_token: SampledToken | None


@dataclass(frozen=True, slots=True)
class KVFailed:
    """The handoff ended without its KV: recompute. The blocks stay quarantined for now."""

    ticket: TicketId
    error: HandoffError


@dataclass(frozen=True, slots=True)
class BlocksQuiescent:
    """Nothing can land any more in the blocks of a failed or aborted handoff: free them."""

    ticket: TicketId


@dataclass(frozen=True, slots=True)
class KVSent:
    """The decode worker has everything it asked for: the source blocks may be released."""

    ticket: TicketId


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The handoff ended early; stop computing. The source blocks may be released."""

    ticket: TicketId
    error: HandoffError


HandoffEvent: TypeAlias = KVLanded | KVFailed | BlocksQuiescent | KVSent | SendFailed


class HandoffPort(Protocol):
    """What an engine sees of the handoff agent. Thread-safe, never blocks."""

    def expect(self, order: ReceiveOrder) -> None:
        """Ask the prefill worker for KV; `KVLanded` or `KVFailed` follows once."""
        ...

    def offer(self, order: SendOrder) -> None:
        """Announce KV that is about to be computed; `KVSent` or `SendFailed` follows once."""
        ...

    def layer_ready(self, tickets: Sequence[tuple[TicketId, int]], layer: int) -> None:
        """For each `(ticket, stop)`: KV of tokens `[0, stop)` of `layer` is in place.

        Called from the middle of a forward pass: only queues.
        """
        ...

    def finish(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """Prefill of this ticket is done; `first_token` if this side sampled one to hand over."""
        ...

    def decline(self, ticket: Ticket, reason: str) -> None:
        """Decode's side wants nothing of this ticket (all is cached): the prefill worker may stop.

        Instead of `expect`; no event follows.
        """
        ...

    def abort(self, ticket: TicketId, reason: str) -> None:
        """End a handoff from this side (client left, engine failed).

        Receiving side: `BlocksQuiescent` follows once, and no `KVLanded` or `KVFailed`. Sending
        side: `SendFailed` follows once. After the handoff's end it does nothing.
        """
        ...

    def withdraw_oldest(self, tickets: Sequence[TicketId], reason: str) -> None:
        """End the first of these offers that was not granted, if there is one: `SendFailed`."""
        ...

    def poll(self) -> list[HandoffEvent]:
        """What happened since the last call, each thing once."""
        ...
