"""`zstd`: lossless. What compresses in KV is signs and exponents; the mantissas are noise.

An encoded block is, of each number, the lower bytes as they are (all lowest bytes, then the next),
and then one Zstandard frame of the highest bytes. Compressing all bytes takes longer and gives no
less (docs/adr/0036).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import zstandard

from baton.encodings.interface import Grouping, KVEncoding, NoOptions
from baton.encodings.planes import check_dtype
from baton.errors import ProtocolError
from baton.registry import Plugin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.kv.layout import KVLayout

LEVEL: Final = 1


@dataclass(frozen=True, slots=True)
class ZstdEncoding:
    """Implements `KVEncoding`."""

    name: str = "zstd/1"
    is_exact: bool = True
    grouping: Grouping = "none"

    def check(self, layout: KVLayout) -> None:
        """See `KVEncoding`."""
        check_dtype(layout)

    def max_bytes(self, layout: KVLayout) -> int:
        """See `KVEncoding`: the bound of Zstandard's own ZSTD_compressBound, and some."""
        num_highest = layout.block_bytes // layout.element_bytes
        return layout.block_bytes + num_highest // 128 + 512

    def encode(self, layout: KVLayout, blocks: NDArray[np.uint8]) -> Sequence[NDArray[np.uint8]]:
        """See `KVEncoding`."""
        return [encode_numbers(block, layout.element_bytes) for block in blocks]

    def decode(
        self, layout: KVLayout, encoded: Sequence[NDArray[np.uint8]], blocks: NDArray[np.uint8]
    ) -> None:
        """See `KVEncoding`."""
        for each, block in zip(encoded, blocks, strict=True):
            decode_numbers(each, layout.element_bytes, block)


def encode_numbers(block: NDArray[np.uint8], num_bytes: int) -> NDArray[np.uint8]:
    """Numbers of so many bytes each, uint8 `[n]`, encoded as above."""
    planes = block.reshape(-1, num_bytes).T
    highest = np.ascontiguousarray(planes[-1])
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(highest.data)
    return np.concatenate([planes[:-1].reshape(-1), np.frombuffer(frame, np.uint8)])


def decode_numbers(encoded: NDArray[np.uint8], num_bytes: int, block: NDArray[np.uint8]) -> None:
    """The inverse, into `block`, uint8 `[n]`.

    Raises:
        ProtocolError: it is not the encoding of as many bytes; `block` holds anything then.
    """
    num_numbers = len(block) // num_bytes
    num_lower = num_numbers * (num_bytes - 1)
    highest = _decompress(encoded[num_lower:], num_numbers)
    numbers = block.reshape(num_numbers, num_bytes)
    numbers[:, :-1] = encoded[:num_lower].reshape(num_bytes - 1, num_numbers).T
    numbers[:, -1] = highest


def _decompress(frame: NDArray[np.uint8], num_bytes: int) -> NDArray[np.uint8]:
    """One frame of exactly `num_bytes`: its header is checked before anything is allocated."""
    try:
        claimed = zstandard.frame_content_size(frame.data)
        if claimed != num_bytes:
            raise ProtocolError(f"a Zstandard frame of {claimed} bytes, not {num_bytes}")
        content = zstandard.ZstdDecompressor().decompress(frame.data, max_output_size=num_bytes)
    except zstandard.ZstdError as exc:
        raise ProtocolError(f"an encoded block is no Zstandard frame: {exc}") from exc
    return np.frombuffer(content, np.uint8)


def _build(_: NoOptions) -> KVEncoding:
    return ZstdEncoding()


PLUGIN = Plugin(NoOptions, _build)
