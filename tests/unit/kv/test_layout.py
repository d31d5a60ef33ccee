"""Sizes against published figures, bounds, shards and windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from baton.errors import ConfigError, InvalidLayoutError
from baton.kv.layout import KVLayout, LayerLayout, Plane, TensorParallelShard, needed_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

LLAMA_8B = KVLayout.gqa(32, 8, 128, block_size=16, dtype="bfloat16")


@pytest.mark.parametrize(
    ("layout", "bytes_per_token"),
    [
        pytest.param(LLAMA_8B, 131_072, id="Llama-3.1-8B"),
        pytest.param(
            KVLayout.gqa(80, 8, 128, block_size=16, dtype="bfloat16"), 327_680, id="Llama-3-70B"
        ),
        pytest.param(
            KVLayout.mla(61, 512 + 64, block_size=64, dtype="bfloat16"), 70_272, id="DeepSeek-V3"
        ),
        pytest.param(
            KVLayout.gqa(36, 8, 64, block_size=16, dtype="bfloat16"), 73_728, id="gpt-oss-120b"
        ),
    ],
)
def test_bytes_per_token(layout: KVLayout, bytes_per_token: int) -> None:
    assert layout.bytes_per_token == bytes_per_token
    assert layout.block_bytes == bytes_per_token * layout.block_size
    assert sum(map(layout.page_bytes, range(layout.num_layers))) == layout.block_bytes


def test_page_bytes_counts_k_and_v_apart() -> None:
    layout = KVLayout((LayerLayout.gqa(2, 6, v_head_dim=4),), block_size=8, dtype="float32")
    assert layout.page_bytes(0) == 8 * 2 * (6 + 4) * 4


@pytest.mark.parametrize(
    ("num_heads", "size", "held"),
    [
        (8, 1, [range(8)]),
        (8, 4, [range(2), range(2, 4), range(4, 6), range(6, 8)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
        (1, 3, [range(1), range(1), range(1)]),
    ],
)
def test_heads_are_divided_or_replicated(num_heads: int, size: int, held: list[range]) -> None:
    layer = LayerLayout.gqa(num_heads, 4)
    shards = [
        KVLayout((layer,), 16, "int8", shard=TensorParallelShard(rank, size))
        for rank in range(size)
    ]
    assert [shard.held_heads(layer.planes[0]) for shard in shards] == held
    assert [shard.page_bytes(0) for shard in shards] == [16 * 2 * 4 * len(heads) for heads in held]


def test_every_shard_holds_the_whole_latent_plane() -> None:
    layout = KVLayout((LayerLayout.mla(576),), 64, "bfloat16", shard=TensorParallelShard(3, 8))
    assert layout.bytes_per_token == 1152


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Plane("k", 0, 4), "num_heads: 0"),
        (lambda: Plane("k", 1025, 4), "num_heads: 1025"),
        (lambda: Plane("k", 1, 65_537), "head_dim: 65537"),
        (lambda: LayerLayout(()), "planes in a layer: 0"),
        (lambda: LayerLayout((Plane("k", 1, 1), Plane("k", 1, 1))), "same name"),
        (lambda: LayerLayout((Plane("k", 2, 1), Plane("v", 1, 1))), "different numbers of heads"),
        (lambda: LayerLayout.gqa(1, 1, window_tokens=0), "window_tokens: 0"),
        (lambda: TensorParallelShard(2, 2), "rank 2 of 2"),
        (lambda: TensorParallelShard(0, 0), "size: 0"),
        (lambda: KVLayout.gqa(0, 1, 1, block_size=1, dtype="int8"), "number of layers: 0"),
        (lambda: KVLayout.gqa(1025, 1, 1, block_size=1, dtype="int8"), "number of layers: 1025"),
        (lambda: KVLayout.gqa(1, 1, 1, block_size=0, dtype="int8"), "block_size: 0"),
        (lambda: KVLayout.gqa(1, 1, 1, block_size=65_537, dtype="int8"), "block_size: 65537"),
        (lambda: KVLayout.gqa(1, 1024, 65_536, block_size=16, dtype="int8"), "bytes in a page"),
        (
            lambda: msgspec.structs.replace(LLAMA_8B, shard=TensorParallelShard(0, 3)),
            "8 heads of k cannot be divided among 3",
        ),
    ],
)
def test_an_impossible_layout_cannot_be_made(build: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidLayoutError, match=says) as caught:
        build()
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("arrangement", ["", "x" * 129, "a\nb", "\x1b[2J"])
def test_an_opaque_layout_names_its_arrangement(arrangement: str) -> None:
    with pytest.raises(InvalidLayoutError, match="names its arrangement in 1 to 128 printable"):
        msgspec.structs.replace(LLAMA_8B, order="opaque", arrangement=arrangement)


@pytest.mark.parametrize("order", ["canonical", "heads_first"])
def test_other_layouts_have_no_arrangement(order: str) -> None:
    with pytest.raises(InvalidLayoutError, match=f"{order} order have no arrangement"):
        msgspec.structs.replace(LLAMA_8B, order=order, arrangement="a")


def test_an_opaque_layer_is_latent_or_has_heads() -> None:
    mixed = LayerLayout((Plane("k", 2, 4), Plane("latent", 1, 8)))
    with pytest.raises(InvalidLayoutError, match="latent or has heads, not both"):
        KVLayout((mixed,), 16, "int8", "opaque", arrangement="a")
    KVLayout((mixed,), 16, "int8")


def test_an_opaque_layout_is_as_large_as_any() -> None:
    opaque = msgspec.structs.replace(LLAMA_8B, order="opaque", arrangement="x" * 128)
    assert opaque.page_bytes(0) == LLAMA_8B.page_bytes(0)
    assert opaque.fingerprint() != msgspec.structs.replace(opaque, arrangement="y").fingerprint()
    assert msgspec.json.decode(msgspec.json.encode(opaque), type=KVLayout) == opaque


def test_a_peers_impossible_layout_does_not_decode() -> None:
    raw = msgspec.json.encode(LLAMA_8B).replace(b'"block_size":16', b'"block_size":-16')
    with pytest.raises(msgspec.ValidationError, match=r"block_size: -16 is not in \[1, 65536\]"):
        msgspec.json.decode(raw, type=KVLayout)


def test_a_layout_survives_the_wire_with_its_fingerprint() -> None:
    layout = KVLayout(
        (LayerLayout.gqa(8, 64, window_tokens=128), LayerLayout.gqa(8, 64)),
        block_size=16,
        dtype="bfloat16",
        order="heads_first",
        shard=TensorParallelShard(1, 2),
    )
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout)
    assert copy == layout
    assert hash(copy) == hash(layout)
    assert copy.fingerprint() == layout.fingerprint()


def test_the_fingerprint_is_fixed() -> None:
    """Golden: workers of two versions compare it. It changed when `arrangement` was added."""
    assert LLAMA_8B.fingerprint() == (
        "063dbf20c979c4167388202e9ed9549c216a2d8510d3cf6d91113c85edf92357"
    )


@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(LLAMA_8B, block_size=32),
        msgspec.structs.replace(LLAMA_8B, dtype="float16"),
        msgspec.structs.replace(LLAMA_8B, order="heads_first"),
        msgspec.structs.replace(LLAMA_8B, order="opaque", arrangement="a"),
        msgspec.structs.replace(LLAMA_8B, shard=TensorParallelShard(0, 2)),
        KVLayout.gqa(31, 8, 128, block_size=16, dtype="bfloat16"),
    ],
)
def test_every_field_is_in_the_fingerprint(other: KVLayout) -> None:
    assert other.fingerprint() != LLAMA_8B.fingerprint()


@pytest.mark.parametrize(
    ("window_tokens", "num_tokens", "needed"),
    [
        (None, 10, (0, 10)),
        (4, 0, (0, 0)),
        (4, 3, (0, 3)),
        (4, 4, (1, 4)),
        (4, 10, (7, 10)),  # token 10 sees itself, 9, 8 and 7
        (1, 10, (10, 10)),
    ],
)
def test_needed_tokens(window_tokens: int | None, num_tokens: int, needed: tuple[int, int]) -> None:
    layer = LayerLayout.gqa(1, 1, window_tokens=window_tokens)
    assert needed_tokens(layer, num_tokens) == needed
