"""What the two legs of one handoff are sent: one request, in the protocol of each worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.gateway import vllm_adapter

if TYPE_CHECKING:
    from baton.gateway.request import CompletionBody
    from baton.router.fleet import WorkerProtocol


@dataclass(frozen=True, slots=True)
class RequestBodies:
    """JSON, ready to be sent."""

    prefill: bytes
    decode: bytes


def request_bodies(
    body: CompletionBody, ticket: str, *, prefill: WorkerProtocol, decode: WorkerProtocol
) -> RequestBodies:
    """Write both bodies. Between two Baton workers they are one and the same, written once."""
    if prefill == decode == "baton":
        ticketed = body.encode_with_ticket(ticket)
        return RequestBodies(ticketed, ticketed)
    return RequestBodies(
        vllm_adapter.prefill_body(body, ticket)
        if prefill == "vllm"
        else body.encode_with_ticket(ticket),
        vllm_adapter.decode_body(body, ticket)
        if decode == "vllm"
        else body.encode_with_ticket(ticket),
    )
