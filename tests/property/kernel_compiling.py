"""`python -m tests.property.kernel_compiling 90`: the kernels for a GPU that need not be there."""

import re
import sys

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from baton.engines.gpu import digest_kernel
from baton.engines.gpu.kernels import copy_pages
from baton.engines.gpu.page_copier import LaunchShape

SHAPE = LaunchShape()
POINTERS = {
    "source": "*u8", "source_pages": "*i64", "target": "*u8", "target_pages": "*i64",
    "memory": "*u8", "runs": "*i64", "sums": "*i64",
}  # fmt: skip
CONSTANTS = {
    "PICKS_SOURCE": True,
    "PICKS_TARGET": True,
    "WORD": tl.int64,
    "WORD_BYTES": 8,
    "UNIT_WORDS": 2,
    "BLOCK": SHAPE.block_words,
}
ONES = ("source_stride", "target_stride", "num_pages", "page_units", "tail_bytes")
"""What is 1 at a launch is a constant of it."""
VARIANTS = (
    CONSTANTS,
    CONSTANTS | {"PICKS_SOURCE": False},
    CONSTANTS | {"PICKS_TARGET": False},
    CONSTANTS | dict.fromkeys(ONES, 1),
    CONSTANTS | {"UNIT_WORDS": 1},
    CONSTANTS | {"WORD": tl.int32, "WORD_BYTES": 4, "UNIT_WORDS": 1},
    CONSTANTS | {"WORD": tl.int16, "WORD_BYTES": 2, "UNIT_WORDS": 1},
    CONSTANTS | {"WORD": tl.int8, "WORD_BYTES": 1, "UNIT_WORDS": 1},
)


DIGESTS = [
    {
        "UNIT": unit,
        "UNIT_BYTES": size,
        "BLOCK": digest_kernel.BLOCK_WORDS,
        "RUNS": digest_kernel.TILE_RUNS,
    }
    for size, unit in ((1, tl.uint8), (2, tl.uint16), (4, tl.uint32), (8, tl.uint64))
]


def compile_for(capability, constants, kernel=copy_pages, aligned=("source", "target")):
    names = list(kernel.arg_names)
    signature = {
        name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names
    }
    # As at a launch: addresses are multiples of 16; nothing is known of strides.
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    return compile_kernel(source, target=target, options={"num_warps": SHAPE.num_warps})


if __name__ == "__main__":
    compiled = [compile_for(int(sys.argv[1]), constants) for constants in VARIANTS]
    for constants in DIGESTS:
        compile_for(int(sys.argv[1]), constants, digest_kernel.add_digests, aligned=("memory",))
    ptx = compiled[0].asm["ptx"]
    loads = re.findall(r"ld\.global\S*\.v2\.b64|ld\.global\S*\.v4\.b32", ptx)
    stores = re.findall(r"st\.global\S*\.v2\.b64|st\.global\S*\.v4\.b32", ptx)
    assert len(loads) == len(stores) == SHAPE.block_words // 2 // (32 * SHAPE.num_warps), ptx
