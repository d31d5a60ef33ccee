from __future__ import annotations

import hashlib

import msgspec
import pytest

from baton.auth.ticket import Ticket, WorkerRef
from baton.engines.vllm.identity import rank_epoch
from baton.engines.vllm.tickets import (
    RankPair,
    compute_pairs,
    compute_receiving_subtickets,
    compute_subtickets,
)
from baton.ids import Epoch, WorkerId, new_ticket_id
from baton.kv.layout import KVLayout
from tests.tickets import issue


def worker(name: str, num_ranks: int) -> WorkerRef:
    addresses = tuple(f"127.0.0.1:{9000 + rank}" for rank in range(num_ranks))
    ranks = addresses if num_ranks > 1 else ()
    return WorkerRef(WorkerId(name), Epoch(name * 32), addresses[0], ranks)


def ticket(num_prefill: int, num_decode: int) -> Ticket:
    ends = worker("p", num_prefill), worker("d", num_decode)
    return Ticket(new_ticket_id(), "req-1", *ends, "push", issue(60))


def layout(num_heads: int) -> KVLayout:
    return KVLayout.gqa(2, num_heads, 32, block_size=32, dtype="float32")


def test_between_two_workers_of_one_rank_the_ticket_is_the_gateways_own() -> None:
    one = ticket(1, 1)
    assert compute_subtickets(one, layout(8), sender=0) == (one,)
    assert compute_receiving_subtickets(one, layout(8), receiver=0) == (one,)


@pytest.mark.parametrize(
    ("num_heads", "num_prefill", "num_decode", "pairs"),
    [
        (8, 2, 2, [(0, 0), (1, 1)]),
        (8, 1, 2, [(0, 0), (0, 1)]),
        (8, 4, 2, [(0, 0), (1, 0), (2, 1), (3, 1)]),
        (8, 2, 4, [(0, 0), (0, 1), (1, 2), (1, 3)]),
        (2, 4, 1, [(0, 0), (2, 0)]),  # ranks 0 and 1 hold the same head: the first sends it
        (2, 4, 4, [(0, 0), (0, 1), (2, 2), (2, 3)]),
        (1, 2, 2, [(0, 0), (0, 1)]),
    ],
)
def test_ranks_pair_up_where_they_share_heads_and_each_head_comes_once(
    num_heads: int, num_prefill: int, num_decode: int, pairs: list[tuple[int, int]]
) -> None:
    found = compute_pairs(layout(num_heads), num_prefill, num_decode)
    assert found == tuple(RankPair(p, d) for p, d in pairs)


def test_in_mode_pool_each_rank_works_under_the_ticket_itself() -> None:
    pooled = msgspec.structs.replace(ticket(2, 4), mode="pool")
    for rank in range(4):
        assert compute_receiving_subtickets(pooled, layout(8), receiver=rank) == (pooled,)
        assert compute_subtickets(pooled, layout(8), sender=rank % 2) == (pooled,)


def test_latent_kv_comes_from_the_first_rank() -> None:
    mla = KVLayout.mla(2, 576, block_size=32, dtype="bfloat16")
    assert compute_pairs(mla, 2, 2) == (RankPair(0, 0), RankPair(0, 1))


def test_both_sides_derive_the_same_tickets() -> None:
    whole = ticket(2, 4)
    sent = [s for rank in range(2) for s in compute_subtickets(whole, layout(8), sender=rank)]
    received = [
        s
        for rank in range(4)
        for s in compute_receiving_subtickets(whole, layout(8), receiver=rank)
    ]
    assert {s.id: s for s in sent} == {s.id: s for s in received}
    assert len({s.id for s in sent}) == 4


def test_a_derived_ticket_names_the_two_ranks() -> None:
    whole = ticket(2, 1)
    _, second = compute_receiving_subtickets(whole, layout(8), receiver=0)
    message = b"baton/sub/1|" + whole.id + bytes([1, 0])
    assert second.id == hashlib.sha256(message).digest()[:16]
    epoch = rank_epoch(whole.prefill.epoch, 1, 2)
    assert second.prefill == WorkerRef(WorkerId("p/1"), epoch, "127.0.0.1:9001")
    assert second.decode == whole.decode
    assert (second.request_id, second.issue) == (whole.request_id, whole.issue)
