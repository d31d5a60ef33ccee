"""Layers that are written together carry what they would carry one by one."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.handoff.incoming import DigestVerifier, Sampler
from baton.handoff.messages import decode_notification, encode
from baton.handoff.session.actions import AnnounceReadable, SendFinished, WriteLayers
from baton.handoff.write_batches import (
    MAX_SEGMENTS,
    WriteBatchBuilder,
    merge_layers,
)
from baton.kv.copies import MAX_JOINED_BYTES, BlockTable, PagedSequence, apply_copies
from baton.kv.digest import DigestKey
from baton.kv.layout import KVLayout, LayerLayout
from baton.transfer.region import allocate_host_region, view_pages

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
    assert [p.token_ranges for p in split] == [p.token_ranges for p in alone]
    assert [s for p in batches for s in p.token_ranges] == [
        s for p in alone for s in p.token_ranges
    ]
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
    token_ranges = [token_range for batch in batches for token_range in batch.token_ranges]
    assert token_ranges == sorted(token_ranges)
    assert {token_range.layer for token_range in token_ranges} == set(range(num_layers))
    for batch in batches:
        assert batch.copies.num_layers * (len(batch.bounds) - 1) <= MAX_SEGMENTS


ranges = st.integers(0, 5), st.integers(0, 1), st.integers(2, 3)
submits, announcements = st.builds(WriteLayers, *ranges), st.builds(AnnounceReadable, *ranges)
others = st.just(SendFinished(None))


@given(st.lists(st.one_of(submits, submits, announcements, announcements, others), max_size=12))
def test_joined_submits_ask_for_the_same_in_the_same_order(actions):
    joined = list(merge_layers(actions))
    apart = []
    for action in joined:
        if isinstance(action, WriteLayers | AnnounceReadable):
            layers = range(action.layer, action.layer + action.num_layers)
            apart += [type(action)(layer, action.start, action.stop) for layer in layers]
        else:
            apart.append(action)
    assert apart == actions
    for one, other in itertools.pairwise(joined):
        if type(one) is type(other) is not SendFinished:
            tokens = (one.start, one.stop) == (other.start, other.stop)
            assert not (tokens and other.layer == one.layer + one.num_layers)
