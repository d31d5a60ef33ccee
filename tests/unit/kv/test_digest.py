"""Digests: what they cover, the copy-free path against the gathered one, and what is refused."""

from __future__ import annotations

import hmac
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_128_digest

from baton.errors import ProtocolError
from baton.kv.canonical import read_canonical
from baton.kv.copies import BlockTable, PagedSequence, compute_pieces
from baton.kv.digest import DigestKey, compute_digests, locate_pieces
from baton.kv.geometry import page_geometry
from baton.kv.layout import KVLayout

LAYOUT = KVLayout.gqa(1, 4, 8, block_size=4, dtype="int8")
PAGES = np.random.default_rng(7).integers(0, 256, (6, LAYOUT.page_bytes(0)), dtype=np.uint8)


def paged(layout: KVLayout, blocks: list[int]) -> PagedSequence:
    return PagedSequence(layout, BlockTable(0, np.array(blocks, dtype=np.int64)))


@pytest.mark.parametrize("order", ["canonical", "heads_first"])
@pytest.mark.parametrize("heads", [None, range(4), range(1, 3), range(2, 9), range(0)])
def test_a_digest_is_xxh3_of_the_canonical_bytes(order: str, heads: range | None) -> None:
    sequence = paged(msgspec.structs.replace(LAYOUT, order=order), [5, 0, 3])
    bounds = compute_pieces(4, 6, 1, 11)
    expected = b"".join(
        xxh3_128_digest(
            read_canonical(
                sequence, 0, PAGES, start=int(start), stop=int(stop), heads=heads
            ).tobytes()
        )
        for start, stop in pairwise(bounds)
    )
    assert (
        compute_digests(
            page_geometry(sequence.layout, 0), [PAGES], locate_pieces(sequence, bounds), heads=heads
        )
        == expected
    )


def test_a_whole_canonical_page_is_digested_as_it_lies() -> None:
    bounds = np.array([0, 4, 8], dtype=np.int64)
    expected = xxh3_128_digest(PAGES[2].tobytes()) + xxh3_128_digest(PAGES[1].tobytes())
    assert (
        compute_digests(
            page_geometry(LAYOUT, 0), [PAGES], locate_pieces(paged(LAYOUT, [2, 1]), bounds)
        )
        == expected
    )


OPAQUE = msgspec.structs.replace(LAYOUT, order="opaque", arrangement="a")
UNIT_BYTES = LAYOUT.page_bytes(0) // 4


@pytest.mark.parametrize(
    ("heads", "first", "stop"),
    [(None, 0, 4), (range(4), 0, 4), (range(1, 3), 1, 3), (range(2, 9), 2, 4), (range(0), 0, 0)],
)
def test_a_digest_of_an_opaque_page_covers_the_units_as_they_lie(
    heads: range | None, first: int, stop: int
) -> None:
    bounds = np.array([2, 4, 8, 9], dtype=np.int64)
    expected = b"".join(
        xxh3_128_digest(PAGES[page, first * UNIT_BYTES : stop * UNIT_BYTES].tobytes())
        for page in (5, 0, 3)
    )
    assert (
        compute_digests(
            page_geometry(OPAQUE, 0),
            [PAGES],
            locate_pieces(paged(OPAQUE, [5, 0, 3]), bounds),
            heads=heads,
        )
        == expected
    )


@pytest.mark.parametrize("bounds", [[0, 4, 8], [1, 4, 6]])
def test_a_key_makes_it_gmac_over_the_same_bytes(bounds: list[int]) -> None:
    """The nonce is the layer and the piece's first token."""
    secret, handoff, layer, sequence = bytes(range(32)), b"ticket", 3, paged(LAYOUT, [2, 1])
    mac = AESGCM(hmac.digest(secret, b"handoff|ticket", "sha256"))
    expected = b"".join(
        mac.encrypt(
            layer.to_bytes(4, "little") + start.to_bytes(8, "little"),
            b"",
            read_canonical(sequence, 0, PAGES, start=start, stop=stop).tobytes(),
        )
        for start, stop in pairwise(bounds)
    )
    pieces = locate_pieces(sequence, np.array(bounds, dtype=np.int64))
    key = DigestKey(secret, handoff)
    geometry = page_geometry(LAYOUT, 0)
    assert compute_digests(geometry, [PAGES], pieces, key=key, layer=layer) == expected


def test_no_piece_no_digest() -> None:
    assert (
        compute_digests(
            page_geometry(LAYOUT, 0),
            [PAGES],
            locate_pieces(paged(LAYOUT, []), np.array([3], dtype=np.int64)),
        )
        == b""
    )


@pytest.mark.parametrize("bounds", [[0, 5], [0, 2, 6], [2, 2], [4, 2], [0, 4, 8, 12]])
def test_pieces_that_are_none_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ProtocolError):
        compute_digests(
            page_geometry(LAYOUT, 0),
            [PAGES],
            locate_pieces(paged(LAYOUT, [0, 1]), np.array(bounds, dtype=np.int64)),
        )
