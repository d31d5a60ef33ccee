"""Orders for the handoff and the store, from what the scheduler has planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from baton.engines.transformers.sequence import is_computed_while_landing
from baton.handoff.interface import (
    LandingLayers,
    LoadOrder,
    LookupOrder,
    ReceiveOrder,
    SendOrder,
)
from baton.kv.copies import BlockTable
from baton.kv.identity import compute_prompt_hash

if TYPE_CHECKING:
    from baton.auth.ticket import Ticket
    from baton.engines.transformers.queued_prefixes import PendingLoad, PendingLookup
    from baton.engines.transformers.scheduler import PendingReceive
    from baton.engines.transformers.sequence import Sequence


def make_lookup_order(lookup: PendingLookup, token_s: float) -> LookupOrder:
    """Look for what the prefix cache lacks."""
    request = lookup.sequence.request
    return LookupOrder(lookup.id, request.tenant_salt, request.prompt_ids, lookup.start, token_s)


def make_load_order(load: PendingLoad, token_s: float) -> LoadOrder:
    """Load what the store has of it."""
    request, size = load.sequence.request, load.sequence.block_size
    return LoadOrder(
        id=load.id,
        tenant_salt=request.tenant_salt,
        prompt_ids=request.prompt_ids[: load.stop],
        start=load.start,
        blocks=BlockTable(load.start // size, np.array(load.blocks, dtype=np.int64)),
        token_s=token_s,
        trace=request.trace,
    )


def make_send_order(sequence: Sequence, ticket: Ticket, fingerprint: str) -> SendOrder:
    """Offer a prefill request's prompt; what the prefix cache had is ready."""
    return SendOrder(
        ticket=ticket,
        prompt_hash=_hash_prompt(sequence, sequence.num_prompt_tokens, fingerprint),
        num_tokens=sequence.num_prompt_tokens,
        num_ready_tokens=sequence.num_computed,
        blocks=BlockTable(first=0, blocks=np.array(sequence.blocks, dtype=np.int64)),
        deadline=sequence.request.deadline,
        trace=sequence.request.trace,
        prompt_ids=sequence.request.prompt_ids,
    )


def make_receive_order(
    receive: PendingReceive, fingerprint: str, *, in_place: bool
) -> ReceiveOrder:
    """Ask for what the prefix cache lacks of the tokens that are handed over.

    `in_place`: what lands can be read where it lands, layer by layer.
    """
    sequence, size = receive.sequence, receive.sequence.block_size
    num_tokens = receive.ticket.count_handed_over(sequence.num_prompt_tokens)
    first = receive.start // size
    num_blocks = sequence.num_blocks_for(num_tokens) - first
    return ReceiveOrder(
        ticket=receive.ticket,
        prompt_hash=_hash_prompt(sequence, num_tokens, fingerprint),
        start=receive.start,
        num_tokens=num_tokens,
        blocks=BlockTable(
            first=first, blocks=np.array(receive.blocks[:num_blocks], dtype=np.int64)
        ),
        deadline=sequence.request.deadline,
        trace=sequence.request.trace,
        prompt_ids=sequence.request.prompt_ids[:num_tokens],
        layers=LandingLayers() if in_place and is_computed_while_landing(sequence) else None,
    )


def _hash_prompt(sequence: Sequence, num_tokens: int, fingerprint: str) -> bytes:
    request = sequence.request
    return compute_prompt_hash(fingerprint, request.tenant_salt, request.prompt_ids[:num_tokens])
