"""One ticket → one for each pair of tensor-parallel ranks that have heads in common.

Prefill and decode compute the same pairs, each from the ticket and the model alone. Between two
workers of one rank there is one pair, whose ticket is the gateway's own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from baton.auth.ticket import WorkerRef
from baton.engines.vllm.identity import rank_epoch, rank_name
from baton.ids import TicketId
from baton.kv.layout import TensorParallelShard

if TYPE_CHECKING:
    from baton.auth.ticket import Ticket
    from baton.kv.layout import KVLayout

TICKET_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class RankPair:
    """KV moves from rank `prefill` of the one worker to rank `decode` of the other."""

    prefill: int
    decode: int


def count_ranks(worker: WorkerRef) -> int:
    """The tensor-parallel ranks of a worker."""
    return max(1, len(worker.rank_addresses))


def compute_pairs(
    layout: KVLayout, num_prefill_ranks: int, num_decode_ranks: int
) -> tuple[RankPair, ...]:
    """Which ranks hand over to which, in order of the decode ranks.

    Where several prefill ranks hold the same head (there are more ranks than heads), the first of
    them sends it. `layout` is that of any rank of either side.
    """
    return tuple(
        RankPair(prefill, decode)
        for decode in range(num_decode_ranks)
        for prefill in _senders(layout, num_prefill_ranks, decode, num_decode_ranks)
    )


def compute_subtickets(ticket: Ticket, layout: KVLayout, *, sender: int) -> tuple[Ticket, ...]:
    """The tickets under which prefill rank `sender` sends.

    In mode pool ranks do not meet: each works under the ticket itself.
    """
    if ticket.mode == "pool":
        return (ticket,)
    return tuple(
        derive_subticket(ticket, pair)
        for pair in _pairs_of(ticket, layout)
        if pair.prefill == sender
    )


def compute_receiving_subtickets(
    ticket: Ticket, layout: KVLayout, *, receiver: int
) -> tuple[Ticket, ...]:
    """The tickets under which decode rank `receiver` receives; at least one."""
    if ticket.mode == "pool":
        return (ticket,)
    return tuple(
        derive_subticket(ticket, pair)
        for pair in _pairs_of(ticket, layout)
        if pair.decode == receiver
    )


def derive_subticket(ticket: Ticket, pair: RankPair) -> Ticket:
    """The ticket of one pair of ranks. Its holder seals it with the cluster key."""
    if count_ranks(ticket.prefill) == count_ranks(ticket.decode) == 1:
        return ticket
    message = b"baton/sub/1|" + ticket.id + bytes((pair.prefill, pair.decode))
    return msgspec.structs.replace(
        ticket,
        id=TicketId(hashlib.sha256(message).digest()[:TICKET_ID_BYTES]),
        prefill=_refer_to_rank(ticket.prefill, pair.prefill),
        decode=_refer_to_rank(ticket.decode, pair.decode),
    )


def _pairs_of(ticket: Ticket, layout: KVLayout) -> tuple[RankPair, ...]:
    return compute_pairs(layout, count_ranks(ticket.prefill), count_ranks(ticket.decode))


def _refer_to_rank(worker: WorkerRef, rank: int) -> WorkerRef:
    num_ranks = count_ranks(worker)
    if num_ranks == 1:
        return worker
    return WorkerRef(
        worker=rank_name(worker.worker, rank, num_ranks),
        epoch=rank_epoch(worker.epoch, rank, num_ranks),
        address=worker.rank_addresses[rank],
    )


def _senders(
    layout: KVLayout, num_prefill_ranks: int, decode: int, num_decode_ranks: int
) -> list[int]:
    missing = _held(layout, decode, num_decode_ranks)
    senders: list[int] = []
    for prefill in range(num_prefill_ranks):
        shared = missing & _held(layout, prefill, num_prefill_ranks)
        if shared:
            senders.append(prefill)
            missing -= shared
    return senders


def _held(layout: KVLayout, rank: int, num_ranks: int) -> set[tuple[str, int, int]]:
    """Heads that a rank holds: which kind of plane, of how many heads, which one."""
    sharded = msgspec.structs.replace(layout, shard=TensorParallelShard(rank, num_ranks))
    planes = {plane for layer in layout.layers for plane in layer.planes}
    return {
        (plane.name, plane.num_heads, head)
        for plane in planes
        for head in sharded.held_heads(plane)
    }
