"""`int8` and `fp8`: eight bits for a number, and a scale for each token and head.

A plane is `[token][head][dim]` codes of one byte, then `[token][head]` scales in bfloat16, rounded
up. A row is the numbers of one token and head; `most` is the largest absolute value in it.

    int8   number = code * scale, code in [-127, 127]; off by at most half a scale, most / 252
    fp8    number = code * scale, code in e4m3; off by at most 1/15 of itself, or scale / 1,000

A row with a number that is not finite is NaN as a whole. A row whose largest number is below 2^-126
times the code's range is zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from baton.encodings.interface import KVEncoding, NoOptions
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


SCALE_BYTES: Final = 2
_TINY: Final = np.float32(2.0**-126)


class RowEncoding(PlaneEncoding):
    """Codes and scales of rows; `most_code` is the code of a row's largest number."""

    grouping = "token"
    most_code: float

    def plane_bytes(self, shape: PlaneShape) -> int:
        """See `PlaneEncoding`."""
        return shape.num_tokens * shape.num_heads * (shape.head_dim + SCALE_BYTES)

    def encode_plane(
        self, shape: PlaneShape, numbers: NDArray[np.float32], out: NDArray[np.uint8]
    ) -> None:
        """See `PlaneEncoding`."""
        with np.errstate(invalid="ignore", over="ignore"):
            most = _find_largest(numbers)
            scale = round_up_bfloat16(most * np.float32(1 / self.most_code))
            scale[scale < _TINY] = 0
            scale[~np.isfinite(most)] = np.nan
            inverse = np.where(scale > 0, 1 / np.where(scale > 0, scale, 1), 0)
            scaled = numbers * inverse.astype(np.float32)[..., None]
            if np.isnan(scale).any():
                scaled[np.isnan(scale)] = 0
        out[..., : shape.num_numbers] = self.to_codes(scaled).reshape(*out.shape[:2], -1)
        out[..., shape.num_numbers :] = pack_bfloat16(scale.reshape(*out.shape[:2], -1))

    def decode_plane(
        self, shape: PlaneShape, encoded: NDArray[np.uint8], out: NDArray[Any], most: float
    ) -> None:
        """See `PlaneEncoding`."""
        rows = (*encoded.shape[:2], shape.num_tokens, shape.num_heads)
        scale = unpack_bfloat16(encoded[..., shape.num_numbers :]).reshape(*rows, 1)
        codes = encoded[..., : shape.num_numbers].reshape(*rows, shape.head_dim)
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = self.from_codes(codes)
            exceeds = bool((scale * np.float32(self.most_code) > most).any())
            if out.dtype == numbers.dtype and not exceeds:
                np.multiply(numbers, scale, out=out)
                return
            numbers *= scale
            if exceeds:
                np.clip(numbers, -most, most, out=numbers)
        out[...] = numbers

    def to_codes(self, numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Numbers in `[-most_code, most_code]` as codes of one byte."""
        raise NotImplementedError

    def from_codes(self, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The inverse: a new array."""
        raise NotImplementedError


def _find_largest(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """The largest absolute value of each row; NaN where there is one.

    By bits, which sort as absolute values do, and NaN last: a third of the time of float minima.
    """
    bits = numbers.view(np.uint32) & np.uint32(0x7FFFFFFF)
    largest: NDArray[np.uint32] = bits.max(-1)
    return largest.view(np.float32)


class Int8Encoding(RowEncoding):
    """Whole numbers."""

    name = "int8/1"
    most_code = 127.0

    def to_codes(self, numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
        """See `RowEncoding`."""
        return np.rint(numbers, out=numbers).astype(np.int8).view(np.uint8)

    def from_codes(self, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        """See `RowEncoding`."""
        return codes.view(np.int8).astype(np.float32)


def _list_codes() -> NDArray[np.uint8]:
    """The e4m3 code of every number of bfloat16, by its bits."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore", over="ignore"):
        within = np.clip(numbers.astype(np.float32), -448, 448)
        codes: NDArray[Any] = within.astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8)


def _list_numbers() -> NDArray[np.float32]:
    """The number of every e4m3 code."""
    codes: NDArray[Any] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float32)


_CODES: Final = _list_codes()
_NUMBERS: Final = _list_numbers()


class Fp8Encoding(RowEncoding):
    """OCP e4m3, without infinities. Rounded to bfloat16 first, so that codes come from a table."""

    name = "fp8/1"
    most_code = 448.0

    def to_codes(self, numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
        """See `RowEncoding`."""
        return _CODES.take(numbers.astype(ml_dtypes.bfloat16).view(np.uint16))

    def from_codes(self, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        """See `RowEncoding`."""
        return _NUMBERS.take(codes)


def _build_int8(_: NoOptions) -> KVEncoding:
    return Int8Encoding()


def _build_fp8(_: NoOptions) -> KVEncoding:
    return Fp8Encoding()


INT8 = Plugin(NoOptions, _build_int8)
FP8 = Plugin(NoOptions, _build_fp8)
