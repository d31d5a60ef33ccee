"""`raw`: the bytes as they are. The default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from baton.encodings.interface import RAW, Grouping, KVEncoding, NoOptions
from baton.errors import ProtocolError
from baton.registry import Plugin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.kv.layout import KVLayout


@dataclass(frozen=True, slots=True)
class RawEncoding:
    """Implements `KVEncoding`."""

    name: str = RAW
    is_exact: bool = True
    grouping: Grouping = "token"

    def check(self, layout: KVLayout) -> None:
        """See `KVEncoding`: any."""

    def max_bytes(self, layout: KVLayout) -> int:
        """See `KVEncoding`."""
        return layout.block_bytes

    def encode(self, layout: KVLayout, blocks: NDArray[np.uint8]) -> Sequence[NDArray[np.uint8]]:
        """See `KVEncoding`."""
        del layout
        return list(blocks)

    def decode(
        self, layout: KVLayout, encoded: Sequence[NDArray[np.uint8]], blocks: NDArray[np.uint8]
    ) -> None:
        """See `KVEncoding`."""
        check_lengths(encoded, layout.block_bytes)
        if encoded:
            np.stack(encoded, out=blocks)


def check_lengths(encoded: Sequence[NDArray[np.uint8]], num_bytes: int) -> None:
    """Refuse encoded blocks of another length.

    Raises:
        ProtocolError: there is one.
    """
    for each in encoded:
        if len(each) != num_bytes:
            raise ProtocolError(f"an encoded block of {len(each)} bytes, not {num_bytes}")


def _build(_: NoOptions) -> KVEncoding:
    return RawEncoding()


PLUGIN = Plugin(NoOptions, _build)
