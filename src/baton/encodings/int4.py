"""`int4`, `int4_token`: four bits for a number, a least number and a step for each group.

Channels of keys differ in size, and a token's keys have outliers in few channels: keys (and latent
planes) have a group for each channel of a head and `RUN_TOKENS` tokens, values one for each token
and head. `int4_token` has groups by token and head in all planes: it errs more, but a page can be
sent before its last tokens are there. Measured beside each other: docs/adr/0036, 0074.

A plane is its codes, two in a byte (the first in the low half; of an odd number of channels a
token's last half byte is 0), then the groups' least numbers and steps in bfloat16:
`number = least + code * step`, off by at most half a step. The least number is rounded down, the
step up; what is below all of bfloat16 counts as its least, 2^-8 of itself away. A group with a
number that is not finite is NaN as a whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from baton.encodings.interface import Grouping, KVEncoding, NoOptions
from baton.encodings.planes import (
    PlaneEncoding,
    PlaneShape,
    pack_bfloat16,
    round_up_bfloat16,
    unpack_bfloat16,
)
from baton.registry import Plugin

if TYPE_CHECKING:
    from numpy.typing import NDArray


RUN_TOKENS: Final = 32
MOST_CODE: Final = 15
GROUP_BYTES: Final = 4
_TINY: Final = np.float32(2.0**-126)
_MOST: Final = np.float32(float.fromhex("0x1.fep127"))
"""The largest number of bfloat16."""


class Int4Encoding(PlaneEncoding):
    """See above."""

    name = "int4/1"
    grouping: Grouping = "tokens"

    def plane_bytes(self, shape: PlaneShape) -> int:
        """See `PlaneEncoding`."""
        return _code_bytes(shape) + GROUP_BYTES * _count_groups(shape)

    def encode_plane(
        self, shape: PlaneShape, numbers: NDArray[np.float32], out: NDArray[np.uint8]
    ) -> None:
        """See `PlaneEncoding`."""
        groups, axis = _group(shape, numbers)
        with np.errstate(invalid="ignore", over="ignore"):
            low = groups.min(axis, keepdims=True)
            least = np.where(np.isfinite(low), np.maximum(-_round_up(-low), -_MOST), low)
            # Each by itself: the difference of two large numbers may exceed float32.
            step = groups.max(axis, keepdims=True) / MOST_CODE - least / MOST_CODE
            step = round_up_bfloat16(np.maximum(step, 0))
            step[step < _TINY] = 0
            is_broken = ~(np.isfinite(least) & np.isfinite(step))
            step[is_broken] = np.nan
            least[is_broken] = np.nan
            inverse = np.where(step > 0, 1 / np.where(step > 0, step, 1), 0).astype(np.float32)
            codes = groups * inverse
            codes -= least * inverse
            np.nan_to_num(codes, copy=False, nan=0, posinf=MOST_CODE, neginf=0)
        np.clip(np.rint(codes, out=codes), 0, MOST_CODE, out=codes)
        flat = _ungroup(shape, codes, numbers.shape).astype(np.uint8)
        num_bytes = _code_bytes(shape)
        out[..., :num_bytes] = _pack_pairs(flat).reshape(*out.shape[:2], -1)
        pairs = np.stack([least, step], axis=-1).reshape(*out.shape[:2], -1)
        out[..., num_bytes:] = pack_bfloat16(pairs)

    def decode_plane(
        self, shape: PlaneShape, encoded: NDArray[np.uint8], out: NDArray[Any], most: float
    ) -> None:
        """See `PlaneEncoding`."""
        num_bytes = _code_bytes(shape)
        half = (shape.head_dim + 1) // 2
        packed = encoded[..., :num_bytes].reshape(
            *encoded.shape[:2], shape.num_tokens, shape.num_heads, half
        )
        numbers = _unpack_pairs(packed)[..., : shape.head_dim].astype(np.float32)
        groups, axis = _group(shape, numbers)
        kept = list(groups.shape)
        kept[axis] = 1
        pairs = unpack_bfloat16(encoded[..., num_bytes:]).reshape(*kept, 2)
        codes: NDArray[Any] = groups
        with np.errstate(over="ignore", invalid="ignore"):
            if (pairs[..., 1] > _MOST / (2 * MOST_CODE)).any():  # a product may exceed float32
                codes = groups.astype(np.float64)
            decoded = codes * pairs[..., 1] + pairs[..., 0]
        out[...] = np.clip(_ungroup(shape, decoded, numbers.shape), -most, most)


class Int4TokenEncoding(Int4Encoding):
    """Each token by itself: keys have the groups of values."""

    name = "int4_token/1"
    grouping = "token"

    def plane_bytes(self, shape: PlaneShape) -> int:
        """See `PlaneEncoding`."""
        return super().plane_bytes(replace(shape, is_value=True))

    def encode_plane(
        self, shape: PlaneShape, numbers: NDArray[np.float32], out: NDArray[np.uint8]
    ) -> None:
        """See `PlaneEncoding`."""
        super().encode_plane(replace(shape, is_value=True), numbers, out)

    def decode_plane(
        self, shape: PlaneShape, encoded: NDArray[np.uint8], out: NDArray[Any], most: float
    ) -> None:
        """See `PlaneEncoding`."""
        super().decode_plane(replace(shape, is_value=True), encoded, out, most)


def _round_up(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """To bfloat16, towards positive infinity: below 0 the surplus bits are dropped."""
    up = round_up_bfloat16(np.maximum(numbers, 0))
    bits = np.ascontiguousarray(numbers).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.where(numbers < 0, bits.view(np.float32), up)


def _count_groups(shape: PlaneShape) -> int:
    if shape.is_value:
        return shape.num_tokens * shape.num_heads
    return -(-shape.num_tokens // RUN_TOKENS) * shape.num_heads * shape.head_dim


def _group(shape: PlaneShape, numbers: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
    """The numbers with their groups along one axis, and that axis; of `[…, tokens, heads, dim]`.

    Keys: `[…, runs, tokens, heads, dim]`; a short last run repeats its last token.
    """
    if shape.is_value:
        return numbers, numbers.ndim - 1
    missing = -shape.num_tokens % RUN_TOKENS
    if missing:
        last = numbers[:, :, -1:].repeat(missing, axis=2)
        numbers = np.concatenate([numbers, last], axis=2)
    runs = (*numbers.shape[:2], -1, RUN_TOKENS, shape.num_heads, shape.head_dim)
    return numbers.reshape(runs), 3


def _ungroup(
    shape: PlaneShape, groups: NDArray[np.float32], original: tuple[int, ...]
) -> NDArray[np.float32]:
    if shape.is_value:
        return groups
    tokens = groups.reshape(*original[:2], -1, *original[3:])
    return tokens[:, :, : shape.num_tokens]


def _code_bytes(shape: PlaneShape) -> int:
    return shape.num_tokens * shape.num_heads * ((shape.head_dim + 1) // 2)


def _pack_pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two codes in a byte, along the last axis."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def _unpack_pairs(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse; of an odd number of codes there is one more."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 0xF, out=codes[..., 0::2])
    np.right_shift(packed, 4, out=codes[..., 1::2])
    return codes


def _build(_: NoOptions) -> KVEncoding:
    return Int4Encoding()


def _build_token(_: NoOptions) -> KVEncoding:
    return Int4TokenEncoding()


PLUGIN = Plugin(NoOptions, _build)
TOKEN = Plugin(NoOptions, _build_token)
