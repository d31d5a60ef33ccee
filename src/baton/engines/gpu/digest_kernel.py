"""The kernel that digests runs of bytes: sum128 (`baton.kv.device_digest`).

Few programs walk over all runs, each with all of its threads over one run, and add what they found
to the sums of the run's piece. With TRITON_INTERPRET=1 it runs on tensors of the host.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

MAX_PROGRAMS: Final = 32
BLOCK_WORDS: Final = 2048
"""16 KiB a step: 64 bytes in flight for each of 256 threads."""
NUM_WARPS: Final = 8
WORD_BYTES: Final = 8
_UNITS: Final = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


# Compiled once for any number of runs: the first handoff does not wait for the compiler.
@triton.jit(do_not_specialize=["num_runs"])  # type: ignore[untyped-decorator]
def add_digests(  # type: ignore[no-untyped-def]  # noqa: ANN201, PLR0913, PLR0917 - a kernel's launch is flat
    memory,  # noqa: ANN001
    runs,  # noqa: ANN001
    sums,  # noqa: ANN001
    num_runs,  # noqa: ANN001
    UNIT: tl.constexpr,  # noqa: N803
    UNIT_BYTES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Add each run's part of A and B to `sums[piece]`; runs count offsets and bytes.

    Of each word, `8 / UNIT_BYTES` units are loaded: all addresses and lengths are multiples of one.
    """
    units = memory.to(tl.pointer_type(UNIT), bitcast=True)
    word_units: tl.constexpr = 8 // UNIT_BYTES
    for number in range(tl.program_id(0), num_runs, tl.num_programs(0)):
        first_unit = tl.load(runs + number * 4) // UNIT_BYTES
        num_units = tl.load(runs + number * 4 + 1) // UNIT_BYTES
        position = tl.load(runs + number * 4 + 2) // 8
        piece = tl.load(runs + number * 4 + 3)
        num_words = (num_units + word_units - 1) // word_units
        products = tl.zeros((BLOCK,), tl.uint64)
        weighted = tl.zeros((BLOCK,), tl.uint64)
        for first in range(0, num_words, BLOCK):
            word = first + tl.arange(0, BLOCK)
            data = tl.zeros((BLOCK,), tl.uint64)
            for part in tl.static_range(word_units):
                unit = word * word_units + part
                taken = tl.load(units + first_unit + unit, mask=unit < num_units, other=0)
                data |= taken.to(tl.uint64) << (part * UNIT_BYTES * 8)
            key = (position + word + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
            key = (key ^ (key >> 33)) * 0xFF51AFD7ED558CCD
            key = key ^ (key >> 33)
            mixed = data ^ key
            product = (mixed & 0xFFFFFFFF) * (mixed >> 32)
            products += tl.where(word < num_words, product, tl.zeros_like(product))
            weighted += data * (key | 1)
        tl.atomic_add(sums + piece * 2, tl.sum(products.to(tl.int64)))
        tl.atomic_add(sums + piece * 2 + 1, tl.sum(weighted.to(tl.int64)))


def launch_digests(memory: torch.Tensor, runs: torch.Tensor, sums: torch.Tensor, unit: int) -> None:
    """Queue it on the current stream.

    Args:
        memory: uint8 `[n]`.
        runs: int64 `[k, 4]` on the same device: first byte, bytes, place in the piece, piece.
        sums: int64 `[pieces, 2]` there, 0 at first.
        unit: 1, 2, 4 or 8, of which the memory's address and all first bytes and lengths are
            multiples (`compute_unit_bytes`).
    """
    if not len(runs):
        return
    add_digests[min(len(runs), MAX_PROGRAMS),](
        memory,
        runs,
        sums,
        len(runs),
        UNIT=_UNITS[unit],
        UNIT_BYTES=unit,
        BLOCK=BLOCK_WORDS,
        num_warps=NUM_WARPS,
    )


def compute_unit_bytes(address: int, gcd_of_runs: int) -> int:
    """The largest power of two up to 8 that divides both."""
    return math.gcd(WORD_BYTES, address, gcd_of_runs)
