"""The contract of an encoding of KV, and where implementations are found.

A *block* here is one body of `kv.layout.KVLayout` in canonical order: some tokens, all layers of
the layout, `[layer][plane][token][head][head_dim]`. Callers encode many blocks of one layout at
once: uint8 `[num_blocks, layout.block_bytes]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

import msgspec

from baton.errors import ConfigError
from baton.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.kv.layout import KVLayout

RAW: Final = "raw"

Grouping: TypeAlias = Literal["none", "token", "tokens"]
"""What is encoded together: `none`: bytes have no fixed length; `token`: each token by itself;
`tokens`: runs of tokens."""


class KVEncoding(Protocol):
    """One way to write KV. Stateless: any thread may call it."""

    @property
    def name(self) -> str:
        """Name and version of the format: `int8/1`. It stands in entries' names and in views."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether decoding gives the bytes that were encoded."""
        ...

    @property
    def grouping(self) -> Grouping:
        """See `Grouping`. Blocks whose last tokens are not there yet can be sent with `token`."""
        ...

    def check(self, layout: KVLayout) -> None:
        """Refuse a layout whose numbers cannot be encoded.

        Raises:
            ConfigError: with the reason.
        """
        ...

    def max_bytes(self, layout: KVLayout) -> int:
        """The most bytes of an encoded block; all have so many, unless `grouping` is `none`."""
        ...

    def encode(self, layout: KVLayout, blocks: NDArray[np.uint8]) -> Sequence[NDArray[np.uint8]]:
        """Each of `blocks`, uint8 `[num_blocks, block_bytes]`, encoded: contiguous uint8 `[n]`."""
        ...

    def decode(
        self, layout: KVLayout, encoded: Sequence[NDArray[np.uint8]], blocks: NDArray[np.uint8]
    ) -> None:
        """The inverse, into `blocks`, uint8 `[num_blocks, block_bytes]`.

        Raises:
            ProtocolError: no encoded block of this layout; `blocks` hold anything then.
        """
        ...


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An encoding is its name: two workers that name the same one understand each other."""


ENCODINGS: Final[Registry[KVEncoding]] = Registry("baton.encodings", "encoding")


def open_encoding(kind: str, layout: KVLayout, setting: str) -> KVEncoding:
    """The encoding of that kind, for KV of `layout`; `setting` is the one that names it.

    Raises:
        ConfigError: there is none, or it cannot encode such KV.
    """
    try:
        encoding = ENCODINGS.build(kind, {})
        encoding.check(layout)
    except ConfigError as exc:
        raise ConfigError(f'{setting} = "{kind}": {exc}') from exc
    return encoding
