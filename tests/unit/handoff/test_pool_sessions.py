"""The two halves of a handoff through the store, without a store."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import Instant
from baton.errors import ConfigError
from baton.handoff.graves import Grave
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, SampledToken
from baton.handoff.pooling.collection import Collection
from baton.handoff.pooling.deposit import Deposit
from baton.handoff.pooling.pieces import Piece, name_pieces
from baton.kv.identity import HashDomain, compute_block_hashes, compute_tail_hash
from tests.unit.handoff.orders import make_ticket, receive_order, send_order

NEVER = Instant(1e9)
FIRST = SampledToken(7)
DOMAIN = HashDomain("m", "", 8)


def make_pieces(num_tokens: int) -> tuple[Piece, ...]:
    return name_pieces(DOMAIN, np.arange(num_tokens, dtype=np.int32))


@given(st.integers(1, 60), st.integers(1, 20))
def test_pieces_cover_the_prompt_and_all_but_a_tail_are_blocks(num_tokens: int, size: int) -> None:
    domain, tokens = HashDomain("m", "", size), np.arange(num_tokens, dtype=np.int32)
    pieces = name_pieces(domain, tokens)
    assert [piece.start for piece in pieces] == list(range(0, num_tokens, size))
    assert [piece.stop for piece in pieces[:-1]] == [piece.start for piece in pieces[1:]]
    assert pieces[-1].stop == num_tokens
    hashes = compute_block_hashes(domain, tokens)
    assert [piece.block_hash for piece in pieces[: len(hashes)]] == hashes


def test_tails_are_told_apart() -> None:
    tokens = np.arange(12, dtype=np.int32)
    (block,) = compute_block_hashes(DOMAIN, tokens)
    tails = {
        compute_tail_hash(DOMAIN, tokens[8:12], block),
        compute_tail_hash(DOMAIN, tokens[8:11], block),
        compute_tail_hash(DOMAIN, tokens[8:12], None),
        compute_tail_hash(HashDomain("m", "salt", 8), tokens[8:12], None),
        compute_tail_hash(HashDomain("n", "", 8), tokens[8:12], None),
        compute_block_hashes(HashDomain("m", "", 4), tokens[8:12], block)[0],
    }
    assert len(tails) == 6
    for wrong in (tokens[:0], tokens[:8]):
        with pytest.raises(ConfigError):
            compute_tail_hash(DOMAIN, wrong, None)


def test_a_piece_is_kept_once_all_its_layers_are_ready() -> None:
    pieces = make_pieces(20)
    deposit = Deposit(
        send_order(make_ticket(), num_tokens=20), pieces, num_layers=2, deadline=NEVER
    )
    deposit.layer_ready(0, 20)
    assert deposit.next_pieces() == ()
    deposit.layer_ready(1, 15)
    assert deposit.next_pieces() == pieces[:1]
    deposit.layer_ready(1, 9)  # said late: nothing is taken back
    assert deposit.next_pieces() == pieces[:1]
    deposit.kept(1)
    deposit.finish(FIRST)
    assert not deposit.is_done
    deposit.layer_ready(1, 20)
    assert deposit.next_pieces() == pieces[1:]
    deposit.kept(2)
    deposit.check_invariants()
    assert deposit.is_done
    assert (deposit.num_kept_tokens, deposit.first_token) == (20, FIRST)
    deposit.kept(1)
    with pytest.raises(AssertionError):
        deposit.check_invariants()


def test_what_is_cached_on_prefill_can_be_kept_at_once() -> None:
    order = send_order(make_ticket(), num_tokens=20, num_ready_tokens=16)
    deposit = Deposit(order, make_pieces(20), num_layers=2, deadline=NEVER)
    assert [piece.stop for piece in deposit.next_pieces()] == [8, 16]


def test_pieces_that_are_cached_on_decode_are_not_asked_for() -> None:
    ticket = make_ticket()
    order = receive_order(ticket, start=12, num_tokens=20)
    collection = Collection(order, make_pieces(20), deadline=NEVER)
    assert [piece.start for piece in collection.next_pieces] == [8, 16]
    assert collection.num_tokens == 12
    collection.landed(1)
    assert collection.num_tokens == 16
    assert collection.end_early("evicted", "store") == [KVLanded(ticket.id, None, 16)]
    collection.landed(1)
    assert collection.complete(FIRST) == [KVLanded(ticket.id, FIRST)]


def test_nothing_landed_is_a_failure() -> None:
    ticket = make_ticket()
    order = receive_order(ticket, start=12, num_tokens=20)
    collection = Collection(order, make_pieces(20), deadline=NEVER)
    collection.grave = Grave("killed", "gateway")
    failed, quiescent = collection.end_early("killed", "gateway")
    assert isinstance(failed, KVFailed)
    assert (failed.error.stage, failed.error.peer) == ("gateway", "p")
    assert quiescent == BlocksQuiescent(ticket.id)
