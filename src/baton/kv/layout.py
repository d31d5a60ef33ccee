"""The layout: one engine's physical arrangement of KV, page by page.

A *page* is one layer's part of one block. Inside a page the order is fixed by `PageOrder`; the
canonical order of a page is `[plane][token][head][dim]`, where the planes are K then V (or one
latent plane for MLA). All sizes follow from the fields here, all offsets from `kv.geometry`:
no other module computes one.

Layouts come from peers: an impossible one cannot be constructed, by decoding or otherwise
(`InvalidLayoutError`; inside a message, msgspec reports it as a ValidationError).

Two layouts may differ in block size, page order and tensor-parallel shard, no more.
Opaque pages move as they are: arrangement and block size must be equal too.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final, Literal, Self

import msgspec

from baton.errors import InvalidLayoutError, LayoutMismatchError

DType = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
DTYPE_BYTES: Final[dict[DType, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}

MAX_LAYERS: Final = 1024
MAX_PLANES: Final = 3
MAX_HEADS: Final = 1024
MAX_HEAD_DIM: Final = 65_536
MAX_BLOCK_SIZE: Final = 65_536
MAX_SHARDS: Final = 1024
MAX_PAGE_BYTES: Final = 1 << 30
MAX_WINDOW_TOKENS: Final = 1 << 40
MAX_ARRANGEMENT_CHARS: Final = 128

PageOrder = Literal["canonical", "heads_first", "opaque"]
"""`canonical` is `[plane][token][head][dim]`; `heads_first` is `[plane][head][token][dim]`.

`opaque` is `[head][unit]`: a head's unit has what all planes keep of it for the block's tokens, and
how is known to engines of one `arrangement` alone. So only whole pages (or whole heads of them)
move, and only between equal arrangements and block sizes.
"""


def _check_bounds(what: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise InvalidLayoutError(f"{what}: {value} is not in [1, {most}]")


class Plane(msgspec.Struct, frozen=True):
    """One tensor of a layer's KV.

    `num_heads` is the whole model's: which of them a worker holds follows from its shard
    (`KVLayout.held_heads`).
    """

    name: Literal["k", "v", "latent"]
    num_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _check_bounds("num_heads", self.num_heads, MAX_HEADS)
        _check_bounds("head_dim", self.head_dim, MAX_HEAD_DIM)


class LayerLayout(msgspec.Struct, frozen=True):
    """What one layer keeps for each token. `window_tokens` is None for full attention.

    A sliding window counts the token itself: with a window of 1 a token sees only itself.
    """

    planes: tuple[Plane, ...]
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_bounds("planes in a layer", len(self.planes), MAX_PLANES)
        if self.window_tokens is not None:
            _check_bounds("window_tokens", self.window_tokens, MAX_WINDOW_TOKENS)
        if len({plane.name for plane in self.planes}) != len(self.planes):
            raise InvalidLayoutError("two planes of one layer have the same name")
        if len({plane.num_heads for plane in self.planes if plane.name != "latent"}) > 1:
            raise InvalidLayoutError("k and v of one layer have different numbers of heads")

    @classmethod
    def gqa(
        cls,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        window_tokens: int | None = None,
    ) -> Self:
        """Keys and values for each kv head; `v_head_dim` where it is not `head_dim`."""
        v_dim = head_dim if v_head_dim is None else v_head_dim
        planes = (Plane("k", num_kv_heads, head_dim), Plane("v", num_kv_heads, v_dim))
        return cls(planes, window_tokens)

    @classmethod
    def mla(cls, latent_dim: int, window_tokens: int | None = None) -> Self:
        """One latent vector a token (DeepSeek-V3: 512 + 64 rotary = 576)."""
        return cls((Plane("latent", 1, latent_dim),), window_tokens)


class TensorParallelShard(msgspec.Struct, frozen=True):
    """Which of `size` tensor-parallel workers this is: `rank` in `[0, size)`."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        _check_bounds("tensor-parallel size", self.size, MAX_SHARDS)
        if not 0 <= self.rank < self.size:
            raise InvalidLayoutError(f"tensor-parallel rank {self.rank} of {self.size}")


class KVLayout(msgspec.Struct, frozen=True, cache_hash=True):
    """One worker's arrangement of KV: its layers, and how a page of each is laid out.

    To derive one from another: `msgspec.structs.replace(layout, order="heads_first")`.
    `arrangement` names what is inside an opaque page (`vllm-cpu/vec/LBHNC`); others have none.
    """

    layers: tuple[LayerLayout, ...]
    block_size: int
    dtype: DType
    order: PageOrder = "canonical"
    shard: TensorParallelShard = TensorParallelShard()
    arrangement: str = ""

    def __post_init__(self) -> None:
        _check_bounds("number of layers", len(self.layers), MAX_LAYERS)
        _check_bounds("block_size", self.block_size, MAX_BLOCK_SIZE)
        for layer in dict.fromkeys(self.layers):
            _check_divides(layer, self.shard.size)
            page_bytes = self._token_bytes(layer) * self.block_size
            _check_bounds("bytes in a page", page_bytes, MAX_PAGE_BYTES)
        if self.order == "opaque":
            _check_opaque(self)
        elif self.arrangement:
            raise InvalidLayoutError(f"pages in {self.order} order have no arrangement")

    @classmethod
    def gqa(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        block_size: int,
        dtype: DType,
    ) -> Self:
        """Equal layers of grouped-query attention, all heads on this worker, canonical order."""
        return cls((LayerLayout.gqa(num_kv_heads, head_dim),) * num_layers, block_size, dtype)

    @classmethod
    def mla(cls, num_layers: int, latent_dim: int, *, block_size: int, dtype: DType) -> Self:
        """Equal layers of multi-head latent attention, canonical order."""
        return cls((LayerLayout.mla(latent_dim),) * num_layers, block_size, dtype)

    @property
    def num_layers(self) -> int:
        """Layers, hence page arrays."""
        return len(self.layers)

    @property
    def element_bytes(self) -> int:
        """Bytes of one number."""
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that this worker keeps for one token in all layers, windows disregarded."""
        return _sum_token_bytes(self)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.bytes_per_token * self.block_size

    def page_bytes(self, layer: int) -> int:
        """Bytes of one page of `layer`."""
        return self._token_bytes(self.layers[layer]) * self.block_size

    def held_heads(self, plane: Plane) -> range:
        """Which of the model's heads this worker holds of `plane`.

        Latent planes are on every worker; with fewer heads than workers, heads are replicated.
        """
        if plane.name == "latent":
            return range(plane.num_heads)
        rank, size = self.shard.rank, self.shard.size
        first = rank * plane.num_heads // size
        return range(first, first + max(1, plane.num_heads // size))

    def fingerprint(self) -> str:
        """64 hex digits: equal for equal layouts, in any process."""
        return hashlib.sha256(b"baton/layout/1" + msgspec.json.encode(self)).hexdigest()

    def _token_bytes(self, layer: LayerLayout) -> int:
        held = sum(len(self.held_heads(plane)) * plane.head_dim for plane in layer.planes)
        return held * self.element_bytes


@lru_cache(maxsize=256)
def _sum_token_bytes(layout: KVLayout) -> int:
    """Of all layers; asked for each layer of each handoff."""
    return sum(map(layout.page_bytes, range(layout.num_layers))) // layout.block_size


def needed_tokens(layer: LayerLayout, num_tokens: int) -> tuple[int, int]:
    """Which of tokens `[0, num_tokens)` the token after them still attends to: `[start, stop)`.

    The tokens before `start` are dead for *this* sequence only. A block that lacks them must not
    be published under its hash: a shorter prefix that ends in it would need them.
    """
    if layer.window_tokens is None:
        return 0, num_tokens
    return max(0, num_tokens + 1 - layer.window_tokens), num_tokens


def _check_opaque(layout: KVLayout) -> None:
    name = layout.arrangement
    if not name or len(name) > MAX_ARRANGEMENT_CHARS or not name.isprintable():
        raise InvalidLayoutError(
            f"an opaque layout names its arrangement in 1 to {MAX_ARRANGEMENT_CHARS} printable "
            f"characters, not {name[:MAX_ARRANGEMENT_CHARS]!r}"
        )
    for layer in layout.layers:
        if len({plane.name == "latent" for plane in layer.planes}) > 1:
            # A head's unit would hold all of the latent plane, or a share that is not defined.
            raise InvalidLayoutError("a layer of an opaque layout is latent or has heads, not both")


def _check_divides(layer: LayerLayout, num_shards: int) -> None:
    for plane in layer.planes:
        few, many = sorted((plane.num_heads, num_shards))
        if plane.name != "latent" and many % few:
            raise InvalidLayoutError(
                f"{plane.num_heads} heads of {plane.name} cannot be divided among "
                f"{num_shards} tensor-parallel workers"
            )


@lru_cache(maxsize=256)
def find_differences(src: KVLayout, dst: KVLayout) -> tuple[str, ...]:
    """Why KV of `src` cannot become KV of `dst`: readable lines, none if it can."""
    found: list[str] = []
    if src.dtype != dst.dtype:
        found.append(f"dtype: {src.dtype} at the source, {dst.dtype} at the destination")
    found += _find_opaque_differences(src, dst)
    if src.num_layers != dst.num_layers:
        found.append(f"layers: {src.num_layers} at the source, {dst.num_layers} at the destination")
        return tuple(found)
    differing = [n for n in range(src.num_layers) if src.layers[n] != dst.layers[n]]
    if differing:
        first = differing[0]
        found.append(
            f"layer {first}: {_describe(src.layers[first])} at the source, "
            f"{_describe(dst.layers[first])} at the destination"
        )
    if len(differing) > 1:
        found.append(f"{len(differing) - 1} more layers differ, the last is {differing[-1]}")
    return tuple(found)


def check_compatible(src: KVLayout, dst: KVLayout) -> None:
    """Refuse two layouts between which KV cannot be copied.

    Two shards without a head in common are exchangeable: there is nothing to copy between them.

    Raises:
        LayoutMismatchError: names each difference.
    """
    differences = find_differences(src, dst)
    if differences:
        raise LayoutMismatchError(differences)


def _find_opaque_differences(src: KVLayout, dst: KVLayout) -> list[str]:
    if "opaque" not in {src.order, dst.order}:
        return []
    if src.order != dst.order:
        sides = _describe_order(src), _describe_order(dst)
        return ["page order: {} at the source, {} at the destination".format(*sides)]
    found: list[str] = []
    if src.arrangement != dst.arrangement:
        found.append(
            f"arrangement: {src.arrangement} at the source, {dst.arrangement} at the destination"
        )
    if src.block_size != dst.block_size:
        found.append(
            f"block size of opaque pages: {src.block_size} at the source, "
            f"{dst.block_size} at the destination"
        )
    return found


def _describe_order(layout: KVLayout) -> str:
    return f"opaque ({layout.arrangement})" if layout.order == "opaque" else layout.order


def _describe(layer: LayerLayout) -> str:
    planes = ", ".join(f"{p.name} {p.num_heads}x{p.head_dim}" for p in layer.planes)
    window = "" if layer.window_tokens is None else f", window {layer.window_tokens}"
    return planes + window
