"""Where each plane of a block is, as it was computed and as it is encoded.

Encodings of fixed length encode plane by plane and keep the order of planes and layers. Layers that
are alike are handled together, so that no call is made for each layer or block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from baton.encodings.raw import check_lengths
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from baton.encodings.interface import Grouping
    from baton.kv.layout import KVLayout, Plane

NUMPY_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Of KV that can be encoded. KV in eight bits is small already."""
CHUNK_NUMBERS: Final = 1 << 17
"""That are encoded at once: half a megabyte in float32, faster than 8 MiB by two fifths."""
LARGEST: Final = {"float32": 3.4028234e38, "float16": 65504.0, "bfloat16": 3.3895313e38}
"""The largest finite number of each."""


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """One plane of one layer of a block: `[num_tokens, num_heads, head_dim]`."""

    is_value: bool
    num_tokens: int
    num_heads: int
    head_dim: int

    @property
    def num_numbers(self) -> int:
        """Of the plane."""
        return self.num_tokens * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class PlaneRun:
    """The same plane of `num_layers` layers that follow one another and are alike.

    Of layer i of them it begins `first_byte + i * layer_bytes` bytes into a block.
    """

    shape: PlaneShape
    num_layers: int
    first_byte: int
    layer_bytes: int
    num_bytes: int

    def view(self, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Its bytes in uint8 `[num_blocks, block_bytes]`: `[num_blocks, num_layers, num_bytes]`."""
        stop = self.first_byte + self.num_layers * self.layer_bytes
        if stop > blocks.shape[1]:  # the last layer's stop: its planes that follow do not count
            stop = self.first_byte + (self.num_layers - 1) * self.layer_bytes + self.num_bytes
        block_stride, byte_stride = blocks.strides
        return np.lib.stride_tricks.as_strided(
            blocks[:, self.first_byte : stop],
            (len(blocks), self.num_layers, self.num_bytes),
            (block_stride, self.layer_bytes, byte_stride),
        )


def find_planes(layout: KVLayout, count_bytes: Callable[[PlaneShape], int]) -> list[PlaneRun]:
    """All planes of a block in which each takes `count_bytes`, in order."""
    found: list[PlaneRun] = []
    at = 0
    for layer, alike in groupby(layout.layers):
        num_layers = sum(1 for _ in alike)
        shapes = [_shape_of(layout, plane) for plane in layer.planes]
        sizes = [count_bytes(shape) for shape in shapes]
        first = at
        for shape, size in zip(shapes, sizes, strict=True):
            found.append(PlaneRun(shape, num_layers, first, sum(sizes), size))
            first += size
        at += num_layers * sum(sizes)
    return found


def check_dtype(layout: KVLayout) -> None:
    """Refuse KV of a dtype that no encoding takes.

    Raises:
        ConfigError: it is one.
    """
    if layout.dtype not in NUMPY_DTYPES or layout.order != "canonical":
        raise ConfigError(
            f"KV of {layout.dtype} in {layout.order} order cannot be encoded; only "
            f"{', '.join(NUMPY_DTYPES)} in canonical order can: use raw"
        )


class PlaneEncoding:
    """Base of encodings that write each plane in a fixed number of bytes. A `KVEncoding`.

    Subclasses state the three methods that raise here.
    """

    name: str
    is_exact = False
    grouping: Grouping

    def plane_bytes(self, shape: PlaneShape) -> int:
        """Bytes of an encoded plane."""
        raise NotImplementedError

    def encode_plane(
        self, shape: PlaneShape, numbers: NDArray[np.float32], out: NDArray[np.uint8]
    ) -> None:
        """Encode float32 `[blocks, layers, tokens, heads, dim]` into `[blocks, layers, bytes]`.

        `numbers` may be those of the engine: they are not overwritten.
        """
        raise NotImplementedError

    def decode_plane(
        self, shape: PlaneShape, encoded: NDArray[np.uint8], out: NDArray[Any], most: float
    ) -> None:
        """The inverse, into the dtype of `out`. What exceeds `most`, its largest, becomes that."""
        raise NotImplementedError

    def check(self, layout: KVLayout) -> None:
        """See `KVEncoding`."""
        check_dtype(layout)

    def max_bytes(self, layout: KVLayout) -> int:
        """See `KVEncoding`."""
        return _sum_bytes(self, layout)

    def encode(self, layout: KVLayout, blocks: NDArray[np.uint8]) -> Sequence[NDArray[np.uint8]]:
        """See `KVEncoding`."""
        if not len(blocks):
            return []
        dtype = NUMPY_DTYPES[layout.dtype]
        encoded = np.empty((len(blocks), self.max_bytes(layout)), np.uint8)
        for source, target in self._pairs(layout):
            numbers = shape_numbers(source.shape, source.view(blocks).view(dtype))
            out = target.view(encoded)
            for some in _chunks(len(blocks), source):
                floats = numbers[some].astype(np.float32, copy=False)
                self.encode_plane(source.shape, floats, out[some])
        return list(encoded)

    def decode(
        self, layout: KVLayout, encoded: Sequence[NDArray[np.uint8]], blocks: NDArray[np.uint8]
    ) -> None:
        """See `KVEncoding`. What the dtype cannot express becomes its largest number.

        A code may round up beyond it.
        """
        check_lengths(encoded, self.max_bytes(layout))
        if not encoded:
            return
        dtype = NUMPY_DTYPES[layout.dtype]
        most = LARGEST[layout.dtype]
        together = np.stack(encoded)
        for target, source in self._pairs(layout):
            out = shape_numbers(target.shape, target.view(blocks).view(dtype))
            codes = source.view(together)
            for some in _chunks(len(blocks), target):
                self.decode_plane(source.shape, codes[some], out[some], most)

    def _pairs(self, layout: KVLayout) -> list[tuple[PlaneRun, PlaneRun]]:
        """Each plane as it was computed, and as it is encoded."""
        size = layout.element_bytes
        return list(
            zip(
                find_planes(layout, lambda shape: shape.num_numbers * size),
                find_planes(layout, self.plane_bytes),
                strict=True,
            )
        )


def _chunks(num_blocks: int, run: PlaneRun) -> Iterator[tuple[slice, slice]]:
    """Blocks and layers of a plane, some at a time: what is computed of them stays in caches."""
    num_planes = max(1, CHUNK_NUMBERS // run.shape.num_numbers)
    layers = min(num_planes, run.num_layers)
    blocks = num_planes // layers
    for block in range(0, num_blocks, blocks):
        for layer in range(0, run.num_layers, layers):
            yield slice(block, block + blocks), slice(layer, layer + layers)


def pack_bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """As bfloat16, along the last axis, without rounding: the caller has rounded them."""
    return np.ascontiguousarray(numbers).astype(ml_dtypes.bfloat16).view(np.uint8)


def unpack_bfloat16(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The inverse."""
    numbers: NDArray[Any] = np.ascontiguousarray(packed).view(ml_dtypes.bfloat16)
    return numbers.astype(np.float32)


def round_up_bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """To the next number of bfloat16 that is not smaller; of finite numbers that are not below 0.

    What is not finite stays so.
    """
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(numbers), rounded.view(np.float32), numbers)


def _shape_of(layout: KVLayout, plane: Plane) -> PlaneShape:
    num_heads = len(layout.held_heads(plane))
    return PlaneShape(plane.name == "v", layout.block_size, num_heads, plane.head_dim)


def shape_numbers(shape: PlaneShape, numbers: NDArray[Any]) -> NDArray[Any]:
    """A view of `[blocks, layers, num_numbers]` as `[blocks, layers, tokens, heads, dim]`."""
    return numbers.reshape(*numbers.shape[:2], shape.num_tokens, shape.num_heads, shape.head_dim)


@lru_cache(maxsize=256)
def _sum_bytes(encoding: PlaneEncoding, layout: KVLayout) -> int:
    return sum(run.num_layers * run.num_bytes for run in find_planes(layout, encoding.plane_bytes))
