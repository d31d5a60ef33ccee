"""What sum128 is, as a numpy loop over words, and that runs of bytes on a device get it.

`python -m tests.property.page_digesting DEVICE` checks the Triton kernel: with TRITON_INTERPRET=1
in Triton's interpreter (`cpu`), without it on a GPU (`cuda`).
"""

import sys
from itertools import pairwise

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.engines.gpu.page_digester import digest_by_kernel, digest_by_torch
from tests.examples import examples

MASK = (1 << 64) - 1


def compute_sum128(data):
    """A and B of some bytes, as `baton.kv.device_digest` defines them, in Python's integers."""
    words = np.frombuffer(bytes(data) + bytes(-len(data) % 8), "<u8").tolist()
    a = b = 0
    for index, word in enumerate(words):
        key = (index + 1) * 0x9E3779B97F4A7C15 & MASK
        key = (key ^ (key >> 33)) * 0xFF51AFD7ED558CCD & MASK
        key ^= key >> 33
        mixed = word ^ key
        a += (mixed & 0xFFFFFFFF) * (mixed >> 32)
        b += word * (key | 1)
    return a & MASK, b & MASK


@st.composite
def cases(draw, max_bytes):
    """Pages with gaps between them, somewhere in a memory, each digested in one run or several."""
    page_bytes = draw(
        st.one_of(
            st.integers(1, 200),
            st.integers(1, 40).map(lambda n: 16 * n),
            st.integers(max_bytes - 100, max_bytes),
        )
    )
    num_pages, gap = draw(st.integers(1, 6)), draw(st.sampled_from([0, 1, 2, 4, 8, 48]))
    stride = page_bytes + gap
    if draw(st.booleans()):
        stride = -(-stride // 8) * 8
    lead, seed = draw(st.sampled_from([0, 1, 2, 4, 8])), draw(st.integers(0, 2**32 - 1))
    memory = np.random.default_rng(seed).integers(0, 256, lead + num_pages * stride, np.uint8)
    pages = draw(st.lists(st.integers(0, num_pages - 1), min_size=1, max_size=8))
    runs, expected = [], []
    for piece, page in enumerate(pages):
        first = lead + page * stride
        cuts = draw(st.lists(st.integers(0, page_bytes // 8), max_size=2))
        bounds = sorted({0, page_bytes, *(8 * cut for cut in cuts)})
        runs += [(first + low, high - low, low, piece) for low, high in pairwise(bounds)]
        expected.append(compute_sum128(memory[first : first + page_bytes]))
    runs = draw(st.permutations(runs))
    return memory, np.array(runs, np.int64), expected


def check_case(digest, case, device):
    memory, runs, expected = case
    found = digest(torch.from_numpy(memory).to(device), runs, len(expected))
    assert [tuple(each) for each in found.cpu().numpy().astype(np.uint64).tolist()] == expected


@settings(max_examples=examples(75), deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(max_bytes=2000))
def check_torch(case):
    check_case(digest_by_torch, case, "cpu")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(cases(max_bytes=40_000))
def check_kernel(case):
    check_case(digest_by_kernel, case, sys.argv[1])


if __name__ == "__main__":
    check_kernel()
    print("digested")
