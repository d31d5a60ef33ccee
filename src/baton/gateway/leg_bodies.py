"""What the two legs of one handoff are sent: one request, in the dialect of each worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.gateway import vllm_dialect

if TYPE_CHECKING:
    from baton.gateway.request import CompletionBody
    from baton.router.fleet import Dialect


@dataclass(frozen=True, slots=True)
class LegBodies:
    """JSON, ready to be sent."""

    prefill: bytes
    decode: bytes


def leg_bodies(
    body: CompletionBody, ticket: str, *, prefill: Dialect, decode: Dialect
) -> LegBodies:
    """Write both bodies. Between two Baton workers they are one and the same, written once."""
    if prefill == decode == "baton":
        ticketed = body.encode_with_ticket(ticket)
        return LegBodies(ticketed, ticketed)
    return LegBodies(
        vllm_dialect.prefill_body(body, ticket)
        if prefill == "vllm"
        else body.encode_with_ticket(ticket),
        vllm_dialect.decode_body(body, ticket)
        if decode == "vllm"
        else body.encode_with_ticket(ticket),
    )
