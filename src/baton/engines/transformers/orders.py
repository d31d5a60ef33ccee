"""What the handoff is told of a sequence: its prompt's name, its tokens, its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from baton.handoff.interface import ReceiveOrder, SendOrder
from baton.kv.copies import BlockTable
from baton.kv.identity import compute_prompt_hash

if TYPE_CHECKING:
    from baton.auth.ticket import Ticket
    from baton.engines.transformers.scheduler import PendingReceive
    from baton.engines.transformers.sequence import Sequence


def make_send_order(sequence: Sequence, ticket: Ticket, fingerprint: str) -> SendOrder:
    """Offer a prefill request's prompt; what the prefix cache had is ready."""
    return SendOrder(
        ticket=ticket,
        prompt_hash=_hash_prompt(sequence, fingerprint),
        num_tokens=sequence.num_prompt_tokens,
        num_ready_tokens=sequence.num_computed,
        blocks=BlockTable(first=0, blocks=np.array(sequence.blocks, dtype=np.int64)),
        deadline=sequence.request.deadline,
        trace=sequence.request.trace,
        prompt_ids=sequence.request.prompt_ids,
    )


def make_receive_order(receive: PendingReceive, fingerprint: str) -> ReceiveOrder:
    """Ask for the part of a decode request's prompt that the prefix cache lacks."""
    sequence = receive.sequence
    return ReceiveOrder(
        ticket=receive.ticket,
        prompt_hash=_hash_prompt(sequence, fingerprint),
        start=receive.start,
        num_tokens=sequence.num_prompt_tokens,
        blocks=BlockTable(
            first=receive.start // sequence.block_size,
            blocks=np.array(receive.blocks, dtype=np.int64),
        ),
        deadline=sequence.request.deadline,
        trace=sequence.request.trace,
        prompt_ids=sequence.request.prompt_ids,
    )


def _hash_prompt(sequence: Sequence, fingerprint: str) -> bytes:
    request = sequence.request
    return compute_prompt_hash(fingerprint, request.tenant_salt, request.prompt_ids)
