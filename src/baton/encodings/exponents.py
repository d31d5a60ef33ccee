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
        compressor = zstandard.ZstdCompressor(level=LEVEL)
        size = layout.element_bytes
        planes = blocks.reshape(len(blocks), layout.block_bytes // size, size).transpose(0, 2, 1)
        lower, highest = np.ascontiguousarray(planes[:, :-1]), np.ascontiguousarray(planes[:, -1])
        return [
            np.concatenate([
                low.reshape(-1),
                np.frombuffer(compressor.compress(high.data), np.uint8),
            ])
            for low, high in zip(lower, highest, strict=True)
        ]

    def decode(
        self, layout: KVLayout, encoded: Sequence[NDArray[np.uint8]], blocks: NDArray[np.uint8]
    ) -> None:
        """See `KVEncoding`."""
        size = layout.element_bytes
        num_numbers = layout.block_bytes // size
        num_lower = num_numbers * (size - 1)
        for each, block in zip(encoded, blocks, strict=True):
            highest = _decompress(each[num_lower:], num_numbers)
            numbers = block.reshape(num_numbers, size)
            numbers[:, :-1] = each[:num_lower].reshape(size - 1, num_numbers).T
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
