"""The two halves of a handoff through the store, without a store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import Instant
from baton.errors import ConfigError
from baton.handoff.grants import Tombstone
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, SampledToken
from baton.handoff.pool_mode.block_copier import TokenSegment, hash_segments
from baton.handoff.pool_mode.store_reader import StoreRead
from baton.handoff.pool_mode.store_writer import StoreWrite
from baton.kv.identity import HashDomain, compute_block_hashes, compute_tail_hash
from tests.unit.handoff.orders import make_ticket, receive_order, send_order

NEVER = Instant(1e9)
FIRST = SampledToken(7)
DOMAIN = HashDomain("m", "", 8)


def make_pieces(num_tokens: int) -> tuple[TokenSegment, ...]:
    return hash_segments(DOMAIN, np.arange(num_tokens, dtype=np.int32))


@given(st.integers(1, 60), st.integers(1, 20))
def test_pieces_cover_the_prompt_and_all_but_a_tail_are_blocks(num_tokens: int, size: int) -> None:
    domain, tokens = HashDomain("m", "", size), np.arange(num_tokens, dtype=np.int32)
    segments = hash_segments(domain, tokens)
    assert [segment.start for segment in segments] == list(range(0, num_tokens, size))
    assert [segment.stop for segment in segments[:-1]] == [
        segment.start for segment in segments[1:]
    ]
    assert segments[-1].stop == num_tokens
    hashes = compute_block_hashes(domain, tokens)
    assert [segment.block_hash for segment in segments[: len(hashes)]] == hashes


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
    segments = make_pieces(20)
    store_write = StoreWrite(
        send_order(make_ticket(), num_tokens=20), segments, num_layers=2, deadline=NEVER
    )
    store_write.mark_layer_ready(0, 20)
    assert store_write.pending_segments() == ()
    store_write.mark_layer_ready(1, 15)
    assert store_write.pending_segments() == segments[:1]
    store_write.mark_layer_ready(1, 9)  # said late: nothing is taken back
    assert store_write.pending_segments() == segments[:1]
    store_write.add_stored(1)
    store_write.mark_prefill_done(FIRST)
    assert not store_write.is_done
    store_write.mark_layer_ready(1, 20)
    assert store_write.pending_segments() == segments[1:]
    store_write.add_stored(2)
    store_write.check_invariants()
    assert store_write.is_done
    assert (store_write.num_stored_tokens, store_write.first_token) == (20, FIRST)
    store_write.add_stored(1)
    with pytest.raises(AssertionError):
        store_write.check_invariants()


@dataclass
class Position:
    """A `StreamPosition`."""

    is_reached: bool = False

    def is_done(self) -> bool:
        return self.is_reached

    def wait(self) -> None:
        raise AssertionError


def test_what_a_gpu_has_yet_to_compute_is_not_kept() -> None:
    segments, after = make_pieces(20), Position()
    store_write = StoreWrite(
        send_order(make_ticket(), num_tokens=20), segments, num_layers=2, deadline=NEVER
    )
    for layer in range(2):
        store_write.mark_layer_ready(layer, 20, after)
    store_write.mark_prefill_done(FIRST)
    assert store_write.pending_segments() == ()
    assert not store_write.is_done
    after.is_reached = True
    assert store_write.pending_segments() == segments


def test_what_is_cached_on_prefill_can_be_kept_at_once() -> None:
    order = send_order(make_ticket(), num_tokens=20, num_ready_tokens=16)
    store_write = StoreWrite(order, make_pieces(20), num_layers=2, deadline=NEVER)
    assert [segment.stop for segment in store_write.pending_segments()] == [8, 16]


def test_pieces_that_are_cached_on_decode_are_not_asked_for() -> None:
    ticket = make_ticket()
    order = receive_order(ticket, start=12, num_tokens=20)
    store_read = StoreRead(order, make_pieces(20), started_at=Instant(0.0), deadline=NEVER)
    assert [segment.start for segment in store_read.pending_segments] == [8, 16]
    assert store_read.num_tokens == 12
    store_read.add_landed(1)
    assert store_read.num_tokens == 16
    assert store_read.end_early("evicted", "store") == [KVLanded(ticket.id, None, 16)]
    store_read.add_landed(1)
    assert store_read.complete(FIRST) == [KVLanded(ticket.id, FIRST)]


def test_nothing_landed_is_a_failure() -> None:
    ticket = make_ticket()
    order = receive_order(ticket, start=12, num_tokens=20)
    store_read = StoreRead(order, make_pieces(20), started_at=Instant(0.0), deadline=NEVER)
    store_read.tombstone = Tombstone("killed", "gateway")
    failed, quiescent = store_read.end_early("killed", "gateway")
    assert isinstance(failed, KVFailed)
    assert (failed.error.stage, failed.error.peer) == ("gateway", "p")
    assert quiescent == BlocksQuiescent(ticket.id)
