"""The kernel that digests runs of bytes: sum128 (`baton.kv.device_digest`).

Programs walk over all runs, each with all of its threads over a few of them, and add what they
found to the sums of the runs' pieces. With TRITON_INTERPRET=1 it runs on tensors of the host.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

MAX_PROGRAMS: Final = 128
"""As many as a GPU has multiprocessors, about: a digest takes all of them for microseconds. Fewer
would share the GPU with the model for longer, and a receiver keeps a sender's model waiting where
two processes take turns on one GPU."""
TILE_RUNS: Final = 4
"""Runs that a program digests at once, with one computation of the multipliers."""
BLOCK_WORDS: Final = 1024
"""Of each of them, in one step: 32 KiB together, 128 bytes in flight for each of 256 threads."""
NUM_WARPS: Final = 8
WORD_BYTES: Final = 8
_UNITS: Final = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


# Compiled once for any number of tiles: the first handoff does not wait for the compiler.
@triton.jit(do_not_specialize=["num_tiles"])  # type: ignore[untyped-decorator]
def add_digests(  # type: ignore[no-untyped-def]  # noqa: ANN201, PLR0913, PLR0917 - a kernel's launch is flat
    memory,  # noqa: ANN001
    runs,  # noqa: ANN001
    sums,  # noqa: ANN001
    num_tiles,  # noqa: ANN001
    UNIT: tl.constexpr,  # noqa: N803
    UNIT_BYTES: tl.constexpr,  # noqa: N803
    RUNS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Add each run's part of A and B to `sums[piece]`; the runs of a tile have one place.

    Of each word, `8 / UNIT_BYTES` units are loaded: all addresses and lengths are multiples of one.
    """
    units = memory.to(tl.pointer_type(UNIT), bitcast=True)
    word_units: tl.constexpr = 8 // UNIT_BYTES
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = (tile * RUNS + tl.arange(0, RUNS)) * 4
        first_unit = tl.load(runs + row) // UNIT_BYTES
        num_units = tl.load(runs + row + 1) // UNIT_BYTES
        position = tl.load(runs + tile * RUNS * 4 + 2) // 8
        piece = tl.load(runs + row + 3)
        num_words = (num_units + word_units - 1) // word_units
        products = tl.zeros((RUNS, BLOCK), tl.uint64)
        weighted = tl.zeros((RUNS, BLOCK), tl.uint64)
        for first in range(0, tl.max(num_words), BLOCK):
            word = first + tl.arange(0, BLOCK)
            key = (position + word + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
            key = (key ^ (key >> 33)) * 0xFF51AFD7ED558CCD
            key = key ^ (key >> 33)
            data = tl.zeros((RUNS, BLOCK), tl.uint64)
            for part in tl.static_range(word_units):
                unit = word * word_units + part
                taken = tl.load(
                    units + first_unit[:, None] + unit[None, :],
                    mask=unit[None, :] < num_units[:, None],
                    other=0,
                )
                data |= taken.to(tl.uint64) << (part * UNIT_BYTES * 8)
            mixed = data ^ key[None, :]
            product = (mixed & 0xFFFFFFFF) * (mixed >> 32)
            is_inside = word[None, :] < num_words[:, None]
            products += tl.where(is_inside, product, tl.zeros_like(product))
            weighted += data * (key[None, :] | 1)
        tl.atomic_add(sums + piece * 2, tl.sum(products.to(tl.int64), axis=1))
        tl.atomic_add(sums + piece * 2 + 1, tl.sum(weighted.to(tl.int64), axis=1))


def launch_digests(memory: torch.Tensor, runs: torch.Tensor, sums: torch.Tensor, unit: int) -> None:
    """Queue it on the current stream.

    Args:
        memory: uint8 `[n]`.
        runs: int64 `[tiles * TILE_RUNS, 4]` on the same device, from `make_tiles`.
        sums: int64 `[pieces, 2]` there, 0 at first.
        unit: 1, 2, 4 or 8, of which the memory's address and all first bytes and lengths are
            multiples (`compute_unit_bytes`).
    """
    num_tiles = len(runs) // TILE_RUNS
    if not num_tiles:
        return
    add_digests[min(num_tiles, MAX_PROGRAMS),](
        memory,
        runs,
        sums,
        num_tiles,
        UNIT=_UNITS[unit],
        UNIT_BYTES=unit,
        RUNS=TILE_RUNS,
        BLOCK=BLOCK_WORDS,
        num_warps=NUM_WARPS,
    )


def make_tiles(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Runs `[k, 4]` (first byte, bytes, place in the piece, piece), `TILE_RUNS` of one place each.

    Filled up with runs of no bytes. Pages digested whole have one place, 0.
    """
    places = np.unique(runs[:, 2]) if runs[:, 2].any() else np.zeros(1, np.int64)
    tiles = []
    for place in places:
        some = runs if len(places) == 1 else runs[runs[:, 2] == place]
        missing = -len(some) % TILE_RUNS
        tiles.append(np.concatenate((some, np.zeros((missing, 4), np.int64))) if missing else some)
    return np.concatenate(tiles) if len(tiles) > 1 else tiles[0]


def compute_unit_bytes(address: int, gcd_of_runs: int) -> int:
    """The largest power of two up to 8 that divides both."""
    return math.gcd(WORD_BYTES, address, gcd_of_runs)
