"""A KV view whose pages are encoded: what a worker sends over slow links in fewer bytes.

    engine's pages ── gather: encode ──► staged pages ── any transport ──► the peer's staged pages
                                                     the peer's engine ◄── scatter: decode ──┘

An encoded page is one page of the engine's, all heads, encoded as a block of one layer, and padded
to a whole number of bytes a token. Peers see it as opaque pages whose arrangement names the
encoding and the layout that was encoded: two workers can use such views where both have the same
one, and choose for each handoff between them and their raw views (`link_encodings`). Digests are
made of, and compared with, the encoded bytes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from baton.encodings.interface import RAW, open_encoding
from baton.encodings.rates import calibrate
from baton.errors import ConfigError
from baton.handoff.kv_views import KVView
from baton.kv.copies import count_blocks
from baton.kv.geometry import page_geometry, view_planes
from baton.kv.layout import KVLayout, LayerLayout
from baton.transfer.region import allocate_shared_region, view_pages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from baton.clock import Clock, Instant
    from baton.encodings.interface import KVEncoding
    from baton.encodings.rates import EncodingRate, EncodingRates
    from baton.handoff.interface import StreamPosition
    from baton.telemetry.trace import RequestSpan
    from baton.transfer.devices.extents import AllocateRegion
    from baton.transfer.interface import PagedRegion

logger = logging.getLogger(__name__)

LOSSY_TRAIT: Final = "kv_encodings"
"""Of a worker's Hello: the encodings that KV there may have lost something to."""
_ARRANGEMENT: Final = "encoded/"
_FINGERPRINT_CHARS: Final = 32


@dataclass(frozen=True, slots=True)
class StagingSize:
    """At most `num_bytes` of encoded pages, for requests of `max_tokens` at most."""

    num_bytes: int
    max_tokens: int


def open_handoff_encoding(kind: str, layout: KVLayout) -> KVEncoding | None:
    """The encoding that `handoff.encoding` names; None for raw.

    Raises:
        ConfigError: there is none of that name, or it cannot encode pages of this layout.
    """
    if kind == RAW:
        return None
    encoding = open_encoding(
        kind, msgspec.structs.replace(layout, order="canonical"), "handoff.encoding"
    )
    if encoding.grouping != "token":
        raise ConfigError(
            f'handoff.encoding = "{kind}": pages are sent before all of their tokens are there, so '
            "only encodings of each token by itself can be used here: fp8, int8"
        )
    return encoding


def make_encoded_view(
    view: KVView,
    encoding: KVEncoding,
    size: StagingSize,
    *,
    clock: Clock,
    allocate: AllocateRegion = allocate_shared_region,
    rates: EncodingRates | None = None,
) -> KVView:
    """A view of the same pages, encoded. Its region is the caller's to release.

    Without `rates` it is measured now what the encoding takes.

    Raises:
        ConfigError: `view` is staged itself, or not one block has room.
        TransferError: there is not that much memory.
    """
    if view.staging is not None:
        raise ConfigError("pages that are staged already cannot be encoded")
    layout = _encode_layout(view.layout, encoding)
    num_pages = min(size.num_bytes // layout.block_bytes, view.region.arrays[0].num_pages)
    if not num_pages:
        raise ConfigError(
            f"handoff.staging_bytes: one encoded block alone has {layout.block_bytes} bytes"
        )
    needed = count_blocks(min(size.max_tokens, _count_tokens(view)), layout.block_size)
    if num_pages < needed:
        logger.warning(
            "handoff.staging_bytes: %d holds %d tokens encoded as %s; longer prompts are handed "
            "over raw, over slow links, too (%d tokens need %d bytes)",
            size.num_bytes,
            num_pages * layout.block_size,
            encoding.name,
            needed * layout.block_size,
            needed * layout.block_bytes,
        )
    region = allocate([(num_pages, layout.page_bytes(layer)) for layer in range(layout.num_layers)])
    if rates is None:
        canonical = msgspec.structs.replace(view.layout, order="canonical", arrangement="")
        rates = calibrate(encoding, canonical, clock)
    pages = EncodedPages(view.layout, view.region, encoding, region, rates, clock)
    return KVView(layout, region, pages)


def encoding_of(layout: KVLayout) -> str:
    """Name and version of the encoding of a view's pages; "raw" where they are not encoded."""
    if not layout.arrangement.startswith(_ARRANGEMENT):
        return RAW
    return layout.arrangement.removeprefix(_ARRANGEMENT).rpartition("/")[0]


def note_encoding(trace: RequestSpan, layout: KVLayout) -> None:
    """Write into a request's trace that its KV was encoded for the handoff."""
    name = encoding_of(layout)
    if name != RAW:
        trace.note_encoding(f"handoff={name}")


def list_lossy(encodings: Iterable[KVEncoding | None]) -> dict[str, str]:
    """The trait of a worker whose KV may have gone through these; none where it is exact."""
    names = {each.name for each in encodings if each is not None and not each.is_exact}
    return {LOSSY_TRAIT: ",".join(sorted(names))} if names else {}


@dataclass(frozen=True, slots=True)
class EncodedPages:
    """Implements `Staging`. `own` and `staged` are the engine's pages and the encoded ones.

    `rates` are what encoding and decoding take, copies included, as it is used.
    """

    layout: KVLayout
    own: PagedRegion
    encoding: KVEncoding
    staged: PagedRegion
    rates: EncodingRates
    clock: Clock
    _layers: tuple[KVLayout, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Each layer's page as a block of one layer."""
        layers = tuple(_one_layer(self.layout, layer) for layer in self.layout.layers)
        object.__setattr__(self, "_layers", layers)

    def gather(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        staged: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        began_at = self.clock.now()
        raw = self._read(layer, blocks)
        encoded = self.encoding.encode(self._layers[layer], raw)
        num_bytes = self.encoding.max_bytes(self._layers[layer])
        self._staged_pages(layer)[staged, :num_bytes] = np.stack(encoded)
        self._count(self.rates.encode, raw.nbytes, began_at)

    def scatter(
        self,
        layer: int,
        staged: NDArray[np.int64],
        blocks: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        began_at = self.clock.now()
        num_bytes = self.encoding.max_bytes(self._layers[layer])
        raw = np.empty((len(blocks), self._layers[layer].block_bytes), np.uint8)
        encoded = self._staged_pages(layer)[staged, :num_bytes]
        self.encoding.decode(self._layers[layer], list(encoded), raw)
        self._write(layer, blocks, raw)
        self._count(self.rates.decode, raw.nbytes, began_at)

    def _count(self, rate: EncodingRate, num_bytes: int, began_at: Instant) -> None:
        now = self.clock.now()
        rate.add(num_bytes, now - began_at, now)

    def _read(self, layer: int, blocks: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The engine's pages in canonical order, `[n, page_bytes]`."""
        pages = view_pages(self.own.memory, self.own.arrays[layer])
        if self.layout.order == "canonical":
            return pages[blocks]
        planes = view_planes(pages, page_geometry(self.layout, layer), None)
        return np.concatenate([each[blocks].reshape(len(blocks), -1) for each in planes], axis=1)

    def _write(self, layer: int, blocks: NDArray[np.int64], raw: NDArray[np.uint8]) -> None:
        pages = view_pages(self.own.memory, self.own.arrays[layer])
        if self.layout.order == "canonical":
            pages[blocks] = raw
            return
        at = 0
        for plane in view_planes(pages, page_geometry(self.layout, layer), None):
            stop = at + plane[0].size
            plane[blocks] = raw[:, at:stop].reshape(len(blocks), *plane.shape[1:])
            at = stop

    def _staged_pages(self, layer: int) -> NDArray[np.uint8]:
        return view_pages(self.staged.memory, self.staged.arrays[layer])


def _one_layer(layout: KVLayout, layer: LayerLayout) -> KVLayout:
    return msgspec.structs.replace(layout, layers=(layer,), order="canonical", arrangement="")


def _encode_layout(layout: KVLayout, encoding: KVEncoding) -> KVLayout:
    """Opaque pages of bytes. What a page holds is in the arrangement: all that was encoded."""
    canonical = msgspec.structs.replace(layout, order="canonical", arrangement="")
    layers = []
    for layer in layout.layers:
        page_bytes = encoding.max_bytes(_one_layer(layout, layer))
        token_bytes = -(-page_bytes // layout.block_size)
        layers.append(LayerLayout.mla(token_bytes, layer.window_tokens))
    return KVLayout(
        tuple(layers),
        layout.block_size,
        "int8",
        order="opaque",
        shard=layout.shard,
        arrangement=f"{_ARRANGEMENT}{encoding.name}/{canonical.fingerprint()[:_FINGERPRINT_CHARS]}",
    )


def _count_tokens(view: KVView) -> int:
    return view.region.arrays[0].num_pages * view.layout.block_size
