"""A KV view whose pages are encoded: what a worker sends over slow links in fewer bytes.

    engine's pages ── gather: encode ──► staged pages ── any transport ──► the peer's staged pages
                                                     the peer's engine ◄── scatter: decode ──┘

Pages whose order only their engine knows (vLLM's) are first converted into scratch pages: those of
a raw view with staging, some at a time.

An encoded page is one page of the engine's, all heads, encoded as a block of one layer, and padded
to a whole number of bytes a token. Peers see it as opaque pages whose arrangement names the
encoding and the layout that was encoded: two workers can use such views where both have the same
one, and choose for each handoff between them and their raw views (`link_encodings`). Digests are
made of, and compared with, the encoded bytes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from baton.encodings.error_budget import check_is_alone, find_for_links
from baton.encodings.interface import RAW, KVEncoding, open_encoding
from baton.encodings.rates import EncodingRate, EncodingRates, calibrate
from baton.errors import ConfigError
from baton.handoff.kv_views import KVView
from baton.kv.copies import count_blocks
from baton.kv.geometry import page_geometry, view_planes
from baton.kv.layout import KVLayout, LayerLayout, TensorParallelShard
from baton.transfer.region import allocate_shared_region, find_run, view_pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from baton.clock import Clock, Instant
    from baton.handoff.interface import StreamPosition
    from baton.telemetry.trace import RequestSpan
    from baton.transfer.devices.extents import AllocateRegion
    from baton.transfer.interface import PagedRegion

logger = logging.getLogger(__name__)

LOSSY_TRAIT: Final = "kv_encodings"
"""Of a worker's Hello: the encodings that KV there may have lost something to."""
_ARRANGEMENT: Final = "encoded/"
_MEASURED_TOKENS: Final = 64
"""In each block of the reference KV that an error budget is compared with."""
_FINGERPRINT_CHARS: Final = 32
PART_BYTES: Final = 1 << 20
"""Of raw pages that are encoded, or decoded, at once."""


@dataclass(frozen=True, slots=True)
class StagingSize:
    """At most `num_bytes` of encoded pages, for requests of `max_tokens` at most.

    `num_blocks`: the engine's; None: as many as the raw view has pages. `setting` is named in
    messages about the size.
    """

    num_bytes: int
    max_tokens: int
    num_blocks: int | None = None
    setting: str = "handoff.staging_bytes"


def open_handoff_encodings(
    kind: str, layout: KVLayout, error_budget: float | None = None
) -> tuple[KVEncoding, ...]:
    """The encoding that `handoff.encoding` names, or those within `handoff.error_budget`.

    A budget permits the same ones to all workers of a model, whatever their block size and shard:
    they are in the names of entries.

    Raises:
        ConfigError: both are set, there is none of that name, or it cannot encode such pages.
    """
    canonical = msgspec.structs.replace(layout, order="canonical", arrangement="")
    if error_budget is not None:
        check_is_alone("handoff", kind)
        measured = msgspec.structs.replace(
            canonical, block_size=_MEASURED_TOKENS, shard=TensorParallelShard()
        )
        encodings = find_for_links(error_budget, measured)
        for encoding in encodings:
            encoding.check(canonical)
        return encodings
    if kind == RAW:
        return ()
    encoding = open_encoding(kind, canonical, "handoff.encoding")
    if encoding.grouping != "token":
        raise ConfigError(
            f'handoff.encoding = "{kind}": pages are sent before all of their tokens are there, so '
            "only encodings of each token by itself can be used here: fp8, int8, int4_token"
        )
    return (encoding,)


def make_encoded_views(
    view: KVView,
    encodings: Sequence[KVEncoding],
    size: StagingSize,
    *,
    clock: Clock,
    allocate: AllocateRegion = allocate_shared_region,
) -> tuple[KVView, ...]:
    """A view for each encoding, as `make_encoded_view`; all have room for the same tokens."""
    block_bytes = [_encode_layout(view.layout, each).block_bytes for each in encodings]
    return tuple(
        make_encoded_view(
            view,
            encoding,
            replace(size, num_bytes=size.num_bytes * own // sum(block_bytes)),
            clock=clock,
            allocate=allocate,
        )
        for encoding, own in zip(encodings, block_bytes, strict=True)
    )


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

    Where `view` has staging, its pages are canonical, in the host's memory, and used by the agent's
    thread for encoded views only: scratch memory. `size.num_blocks` is needed then. Without
    `rates` it is measured now what the encoding takes.

    Raises:
        ConfigError: not one block has room.
        TransferError: there is not that much memory.
    """
    layout = _encode_layout(view.layout, encoding)
    num_blocks = view.region.arrays[0].num_pages if size.num_blocks is None else size.num_blocks
    num_pages = min(size.num_bytes // layout.block_bytes, num_blocks)
    if not num_pages:
        raise ConfigError(f"{size.setting}: one encoded block alone has {layout.block_bytes} bytes")
    num_tokens = min(size.max_tokens, num_blocks * layout.block_size)
    needed = count_blocks(num_tokens, layout.block_size)
    if num_pages < needed:
        logger.warning(
            "%s: %d holds %d tokens encoded as %s; longer prompts are handed over raw, over slow "
            "links, too (%d tokens need %d bytes)",
            size.setting,
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
    pages = EncodedPages(view, encoding, region, rates, clock)
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


@dataclass(frozen=True, slots=True)
class EncodedPages:
    """Implements `Staging`. `staged` are the encoded pages, `raw` shows the engine's.

    `rates` are what encoding and decoding take, copies included, as it is used.
    """

    raw: KVView
    encoding: KVEncoding
    staged: PagedRegion
    rates: EncodingRates
    clock: Clock
    _layers: tuple[KVLayout, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Each layer's page as a block of one layer."""
        layout = self.raw.layout
        layers = tuple(_one_layer(layout, layer) for layer in layout.layers)
        object.__setattr__(self, "_layers", layers)

    def gather(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        staged: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        """See `Staging`."""
        began_at = self.clock.now()
        num_bytes = self.encoding.max_bytes(self._layers[layer])
        for part in self._parts(layer, len(blocks)):
            raw = self._read(layer, blocks[part])
            encoded = self.encoding.encode(self._layers[layer], raw)
            pages, run = self._staged_pages(layer), find_run(staged[part])
            if run is None:
                pages[staged[part], :num_bytes] = np.stack(encoded)
            else:
                np.stack(encoded, out=pages[run, :num_bytes])
        self._count(self.rates.encode, layer, len(blocks), began_at)

    def scatter(
        self,
        layer: int,
        staged: NDArray[np.int64],
        blocks: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        """See `Staging`."""
        began_at = self.clock.now()
        num_bytes = self.encoding.max_bytes(self._layers[layer])
        for part in self._parts(layer, len(blocks)):
            encoded = self._staged_pages(layer)[staged[part], :num_bytes]
            in_place = self._find_place(layer, blocks[part])
            raw = in_place
            if raw is None:
                raw = np.empty((len(encoded), self._layers[layer].block_bytes), np.uint8)
            self.encoding.decode(self._layers[layer], list(encoded), raw)
            if self.raw.staging is not None:
                self.raw.staging.scatter(layer, np.arange(len(encoded)), blocks[part])
            elif in_place is None:
                self._write(layer, blocks[part], raw)
        self._count(self.rates.decode, layer, len(blocks), began_at)

    def _count(self, rate: EncodingRate, layer: int, num_blocks: int, began_at: Instant) -> None:
        now = self.clock.now()
        rate.add(num_blocks * self._layers[layer].block_bytes, now - began_at, now)

    def _parts(self, layer: int, num_blocks: int) -> Iterator[slice]:
        """As many at once as stay in caches, and as there are scratch pages."""
        step = max(1, PART_BYTES // self._layers[layer].block_bytes)
        if self.raw.staging is not None:
            step = min(step, self.raw.region.arrays[layer].num_pages)
        for start in range(0, num_blocks, step):
            yield slice(start, start + step)

    def _read(self, layer: int, blocks: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The engine's pages in canonical order, `[n, page_bytes]`."""
        layout, pages = self.raw.layout, self._raw_pages(layer)
        if self.raw.staging is not None:
            self.raw.staging.gather(layer, blocks, np.arange(len(blocks)))
            return pages[: len(blocks)]
        if layout.order == "canonical":
            return pages[blocks]
        planes = view_planes(pages, page_geometry(layout, layer), None)
        return np.concatenate([each[blocks].reshape(len(blocks), -1) for each in planes], axis=1)

    def _find_place(self, layer: int, blocks: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        """Where blocks are decoded to without a copy: scratch pages, or the engine's own."""
        pages = self._raw_pages(layer)
        if self.raw.staging is not None:
            return pages[: len(blocks)]
        run = find_run(blocks) if self.raw.layout.order == "canonical" else None
        return None if run is None else pages[run]

    def _write(self, layer: int, blocks: NDArray[np.int64], raw: NDArray[np.uint8]) -> None:
        layout, pages = self.raw.layout, self._raw_pages(layer)
        if layout.order == "canonical":
            pages[blocks] = raw
            return
        at = 0
        for plane in view_planes(pages, page_geometry(layout, layer), None):
            stop = at + plane[0].size
            plane[blocks] = raw[:, at:stop].reshape(len(blocks), *plane.shape[1:])
            at = stop

    def _raw_pages(self, layer: int) -> NDArray[np.uint8]:
        return view_pages(self.raw.region.memory, self.raw.region.arrays[layer])

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
