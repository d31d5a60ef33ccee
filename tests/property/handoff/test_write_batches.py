"""Layers that are written together carry what they would carry one by one."""

import itertools
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import Instant
from baton.handoff import write_batches
from baton.handoff.incoming import DigestVerifier, Sampler
from baton.handoff.messages import Finished, Grant, decode_notification, encode
from baton.handoff.session.actions import AnnounceReadable, WriteLayers
from baton.handoff.session.send import SendSession
from baton.handoff.write_batches import (
    MAX_SEGMENTS,
    WriteBatchBuilder,
)
from baton.kv.copies import (
    MAX_JOINED_BYTES,
    BlockTable,
    PageCopies,
    PagedSequence,
    apply_copies,
    apply_copies_in_parts,
)
from baton.kv.digest import DigestKey
from baton.kv.layout import KVLayout, LayerLayout
from baton.transfer.region import allocate_host_region, view_pages
from tests.unit.handoff.orders import make_ticket, send_order

NUM_BLOCKS = 12


def make_layout(kv_heads, block_size):
    """Layers one after another; those with as many heads have pages alike."""
    return KVLayout(tuple(LayerLayout.gqa(n, 8) for n in kv_heads), block_size, "float32")


@st.composite
def handoffs(draw):
    kv_heads = draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=8))
    sizes = draw(st.tuples(st.sampled_from([4, 8]), st.sampled_from([4, 8])))
    layouts = [make_layout(kv_heads, size) for size in sizes]
    blocks = [np.array(draw(st.permutations(range(NUM_BLOCKS))), np.int64) for _ in sizes]
    start = draw(st.integers(0, 20))
    stop = draw(st.integers(start, 4 * NUM_BLOCKS))
    sides = [
        PagedSequence(layout, BlockTable(0, each))
        for layout, each in zip(layouts, blocks, strict=True)
    ]
    return sides[0], sides[1], start, stop


def make_region(layout, seed, num_blocks=NUM_BLOCKS):
    region = allocate_host_region([
        (num_blocks, layout.page_bytes(layer)) for layer in range(layout.num_layers)
    ])
    for array in region.arrays:
        pages = view_pages(region.memory, array)
        pages[:] = np.random.default_rng(seed).integers(0, 256, pages.shape, np.uint8)
    return region


def view_layers(region):
    return [view_pages(region.memory, array) for array in region.arrays]


@given(handoffs(), st.booleans())
def test_together_is_the_same_as_one_by_one(handoff, is_keyed):
    source, target, start, stop = handoff
    num_layers = source.layout.num_layers
    region, theirs = make_region(source.layout, 1), make_region(target.layout, 2)
    key = DigestKey(b"k" * 32, b"handoff")
    builder = WriteBatchBuilder(view_layers(region), source, target, key=key)
    batches = list(builder.build(range(num_layers), start, stop))
    singles = [range(layer, layer + 1) for layer in range(num_layers)]
    alone = [batch for single in singles for batch in builder.build(single, start, stop)]
    split = [each for batch in batches for each in batch.split()]
    assert [p.written for p in split] == [p.written for p in alone]
    notifications = [
        decode_notification(encode(builder.digest(p, is_keyed=is_keyed))) for p in batches
    ]
    assert [each for n in notifications for each in n.split()] == [
        builder.digest(p, is_keyed=is_keyed) for p in alone
    ]
    verifier = DigestVerifier(view_layers(theirs), target, source.layout, key)
    for batch, notification in zip(batches, notifications, strict=True):
        for layer in batch.copies.layers:
            ours = view_pages(region.memory, region.arrays[layer])
            apply_copies(batch.copies, ours, view_pages(theirs.memory, theirs.arrays[layer]))
        assert verifier.verify(notification, is_keyed=is_keyed).wrong_layers == []
        assert not any(
            verifier.verify(each, is_keyed=is_keyed).wrong_layers for each in notification.split()
        )
        if not batch.copies.num_bytes:
            continue
        spoilt = batch.copies.layers[-1]  # only there is anything found
        group = batch.copies.groups[-1]
        view_pages(theirs.memory, theirs.arrays[spoilt])[
            group.dst_pages[-1], group.spans[-1, 1]
        ] ^= 1
        for sampler in (None, Sampler(1.0)):
            assert verifier.verify(notification, sampler, is_keyed=is_keyed).wrong_layers == [
                spoilt
            ]
        assert [
            each.layer
            for each in notification.split()
            if verifier.verify(each, is_keyed=is_keyed).wrong_layers
        ] == [spoilt]


@given(handoffs(), st.randoms())
def test_digests_made_in_the_copy_are_those_made_before(handoff, chance):
    source, target, start, stop = handoff
    region, theirs = make_region(source.layout, 1), make_region(target.layout, 2)
    builder = WriteBatchBuilder(view_layers(region), source, target)
    finished = Finished(b"t" * 16, None, "shared", "shared", {})
    with mock.patch.object(write_batches, "MIN_DIGESTED_PAGE_BYTES", 0):
        for batch in builder.build(range(source.layout.num_layers), start, stop):
            late = builder.try_digest_in_copy(batch, finished, lambda: Instant(0.0))
            pages = [page for group in batch.copies.groups for page in group.src_pages.tolist()]
            assert (late is None) == (len(set(pages)) < len(pages))
            if late is None:
                continue
            for layer in batch.copies.layers:
                ours = view_pages(region.memory, region.arrays[layer])
                there = view_pages(theirs.memory, theirs.arrays[layer])
                if chance.random() < 0.8:  # else a transport that misses a layer
                    copies = PageCopies(layer, batch.copies.groups)
                    apply_copies_in_parts(copies, [ours], [there], read=late.add_pages)
            before = msgspec.structs.replace(builder.digest(batch), finished=finished)
            assert decode_notification(late.finish()) == before


@given(handoffs())
def test_layers_whose_pages_differ_go_apart_and_others_do_not(handoff):
    source, target, start, stop = handoff
    if start == stop:
        return
    builder = WriteBatchBuilder(view_layers(make_region(source.layout, 1)), source, target)
    heads = [layer.planes[0].num_heads for layer in source.layout.layers]
    runs = 1 + sum(one != other for one, other in itertools.pairwise(heads))
    batches = list(builder.build(range(len(heads)), start, stop))
    assert len(batches) == runs
    for batch in batches:
        assert len({heads[layer] for layer in batch.copies.layers}) == 1


@pytest.mark.parametrize(
    ("block_size", "num_tokens", "token_bytes", "num_together"),
    [
        (16, 160, 4096, MAX_JOINED_BYTES // (160 * 4096)),
        (16, 1600, 4096, 1),
        (1, 500, 32, MAX_SEGMENTS // 500),
        (1, 5000, 32, 1),  # of one layer there are three
    ],
)
def test_what_is_together_is_bounded(block_size, num_tokens, token_bytes, num_together):
    """In bytes, so that the receiver has something to do meanwhile; in pieces, for the notice."""
    num_layers = 12
    layout = KVLayout.gqa(num_layers, 1, token_bytes // 8, block_size=block_size, dtype="float32")
    num_blocks = -(-num_tokens // block_size)
    sequence = PagedSequence(layout, BlockTable(0, np.arange(num_blocks, dtype=np.int64)))
    builder = WriteBatchBuilder(view_layers(make_region(layout, 1, num_blocks)), sequence, sequence)
    batches = list(builder.build(range(num_layers), 0, num_tokens))
    assert max(batch.copies.num_layers for batch in batches) == num_together
    assert sum(batch.copies.num_bytes for batch in batches) == num_layers * num_tokens * token_bytes
    token_ranges = [(layer, batch.start) for batch in batches for layer in batch.written.layers]
    assert token_ranges == sorted(token_ranges)
    assert {layer for layer, _ in token_ranges} == set(range(num_layers))
    for batch in batches:
        assert batch.copies.num_layers * (len(batch.bounds) - 1) <= MAX_SEGMENTS


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 4), st.booleans())
def test_a_session_asks_for_layers_that_are_alike_together(ready, start, is_read):
    """What it asks for is what is ready of each layer, in order, in as few actions as can be."""
    ticket, num_layers = make_ticket(), len(ready)
    order = send_order(ticket, num_tokens=9)
    session = SendSession(order, num_layers=num_layers, deadline=Instant(10.0))
    op = "READ" if is_read else "WRITE"
    session.granted(Grant(ticket.id, "sealed", order.prompt_hash, start, 9, 0, b"", op))
    for layer, stop in enumerate(ready):
        session.layers_ready([layer], stop)
    actions = session.begin(page_tokens=1)
    assert {type(action) for action in actions} <= {AnnounceReadable if is_read else WriteLayers}
    assert [
        (layer, action.start, action.stop)
        for action in actions
        for layer in range(action.layer, action.layer + action.num_layers)
    ] == [(layer, start, stop) for layer, stop in enumerate(ready) if stop > start]
    for one, other in itertools.pairwise(actions):
        tokens = (one.start, one.stop) == (other.start, other.stop)
        assert not (tokens and other.layer == one.layer + one.num_layers)
