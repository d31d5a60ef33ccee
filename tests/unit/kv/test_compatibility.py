"""What may differ between two workers, and what may not."""

from __future__ import annotations

import msgspec
import pytest

from baton.errors import LayoutMismatchError
from baton.kv.geometry import shared_heads
from baton.kv.layout import (
    KVLayout,
    LayerLayout,
    TensorParallelShard,
    check_compatible,
    find_differences,
)

LAYOUT = KVLayout.gqa(4, 8, 8, block_size=16, dtype="bfloat16")


def sharded(rank: int, size: int) -> KVLayout:
    return msgspec.structs.replace(LAYOUT, shard=TensorParallelShard(rank, size))


@pytest.mark.parametrize(
    "other",
    [
        LAYOUT,
        msgspec.structs.replace(LAYOUT, block_size=48),
        msgspec.structs.replace(LAYOUT, order="heads_first"),
        sharded(3, 4),
    ],
)
def test_arrangement_may_differ(other: KVLayout) -> None:
    check_compatible(LAYOUT, other)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            msgspec.structs.replace(LAYOUT, dtype="float16"),
            ("dtype: bfloat16 at the source, float16 at the destination",),
        ),
        (
            KVLayout.gqa(5, 8, 8, block_size=16, dtype="bfloat16"),
            ("layers: 4 at the source, 5 at the destination",),
        ),
        (
            KVLayout.gqa(4, 4, 8, block_size=16, dtype="bfloat16"),
            (
                "layer 0: k 8x8, v 8x8 at the source, k 4x8, v 4x8 at the destination",
                "3 more layers differ, the last is 3",
            ),
        ),
        (
            msgspec.structs.replace(
                LAYOUT, layers=(*LAYOUT.layers[:3], LayerLayout.gqa(8, 8, window_tokens=9))
            ),
            ("layer 3: k 8x8, v 8x8 at the source, k 8x8, v 8x8, window 9 at the destination",),
        ),
        (
            KVLayout.mla(4, 512, block_size=16, dtype="bfloat16"),
            (
                "layer 0: k 8x8, v 8x8 at the source, latent 1x512 at the destination",
                "3 more layers differ, the last is 3",
            ),
        ),
    ],
)
def test_the_model_may_not(other: KVLayout, says: tuple[str, ...]) -> None:
    assert find_differences(LAYOUT, other) == says
    with pytest.raises(LayoutMismatchError) as caught:
        check_compatible(LAYOUT, other)
    assert caught.value.differences == says


OPAQUE = msgspec.structs.replace(LAYOUT, order="opaque", arrangement="engine/isa/a")


@pytest.mark.parametrize(
    "other",
    [OPAQUE, msgspec.structs.replace(OPAQUE, shard=TensorParallelShard(1, 2))],
    ids=["the same", "another shard"],
)
def test_opaque_pages_may_differ_in_their_shard(other: KVLayout) -> None:
    check_compatible(OPAQUE, other)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            LAYOUT,
            ("page order: opaque (engine/isa/a) at the source, canonical at the destination",),
        ),
        (
            msgspec.structs.replace(OPAQUE, arrangement="engine/isa/b"),
            ("arrangement: engine/isa/a at the source, engine/isa/b at the destination",),
        ),
        (
            msgspec.structs.replace(OPAQUE, block_size=32),
            ("block size of opaque pages: 16 at the source, 32 at the destination",),
        ),
        (
            msgspec.structs.replace(OPAQUE, dtype="float16", arrangement="b", block_size=8),
            (
                "dtype: bfloat16 at the source, float16 at the destination",
                "arrangement: engine/isa/a at the source, b at the destination",
                "block size of opaque pages: 16 at the source, 8 at the destination",
            ),
        ),
    ],
)
def test_opaque_pages_may_differ_in_nothing_else(other: KVLayout, says: tuple[str, ...]) -> None:
    assert find_differences(OPAQUE, other) == says
    assert len(find_differences(other, OPAQUE)) == len(says)
    with pytest.raises(LayoutMismatchError):
        check_compatible(other, OPAQUE)


def test_shared_heads() -> None:
    assert shared_heads(sharded(1, 2), sharded(2, 4), 0) == range(4, 6)
    assert len(shared_heads(sharded(0, 2), sharded(3, 4), 0)) == 0
