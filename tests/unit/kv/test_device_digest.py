"""Where a device finds the bytes of pieces: the ones that a host digests, in the same order."""

import msgspec
import numpy as np
import pytest
from xxhash import xxh3_128_digest

from baton.errors import ProtocolError
from baton.kv.copies import BlockTable, PagedSequence, compute_pieces
from baton.kv.device_digest import WORD_BYTES, DevicePieceDigests, locate_parts
from baton.kv.digest import DIGEST_BYTES, compute_digests, locate_pieces
from baton.kv.geometry import page_geometry
from baton.kv.layout import KVLayout

GQA = KVLayout.gqa(2, 4, 8, block_size=4, dtype="float32")
LATENT = KVLayout.mla(2, 16, block_size=4, dtype="bfloat16")
BLOCKS = [5, 0, 3]


class PagesOfTheHost:
    """Digests by xxh3, as `compute_digests` does, what a device is asked to digest."""

    def __init__(self, layout):
        rng = np.random.default_rng(7)
        self.layers = [
            rng.integers(0, 256, (6, layout.page_bytes(layer)), np.uint8)
            for layer in range(layout.num_layers)
        ]

    def digest(self, layers, parts):
        found = b""
        for layer in layers:
            pieces = [b""] * parts.num_pieces
            for piece, page, first, num_bytes, position in parts.runs.tolist():
                assert len(pieces[piece]) == position
                assert position % WORD_BYTES == 0
                pieces[piece] += self.layers[layer][page, first : first + num_bytes].tobytes()
            found += b"".join(map(xxh3_128_digest, pieces))
        return found


def locate(layout, start, stop, other_block_size):
    sequence = PagedSequence(layout, BlockTable(0, np.array(BLOCKS)))
    bounds = compute_pieces(layout.block_size, other_block_size, start, stop)
    return locate_pieces(sequence, bounds)


@pytest.mark.parametrize("layout", [GQA, LATENT], ids=["gqa", "latent"])
@pytest.mark.parametrize(("start", "stop"), [(0, 12), (0, 1), (1, 11), (4, 8)])
@pytest.mark.parametrize("other_block_size", [4, 6, 8])
def test_the_bytes_are_those_that_a_host_digests(layout, start, stop, other_block_size):
    pages, pieces = PagesOfTheHost(layout), locate(layout, start, stop, other_block_size)
    geometry = page_geometry(layout, 0)
    digests = DevicePieceDigests(pages)
    for layers in (range(2), range(1, 2)):
        expected = compute_digests(
            geometry, pages.layers[layers.start : layers.stop], pieces, layer=layers.start
        )
        assert len(expected) == DIGEST_BYTES * len(layers) * len(pieces.blocks)
        assert digests.compute(geometry, layers, pieces, None) == expected


def test_pages_in_another_order_are_refused():
    layout = msgspec.structs.replace(GQA, order="heads_first")
    with pytest.raises(ProtocolError, match="their order differs"):
        locate_parts(page_geometry(layout, 0), locate(layout, 0, 12, 4), None)


def test_planes_that_do_not_begin_at_a_word_are_refused():
    layout = KVLayout.gqa(1, 1, 2, block_size=4, dtype="bfloat16")
    assert len(locate_parts(page_geometry(layout, 0), locate(layout, 0, 12, 4), None).runs) == 3
    with pytest.raises(ProtocolError, match="no multiple of 8 bytes"):
        locate_parts(page_geometry(layout, 0), locate(layout, 0, 3, 4), None)
