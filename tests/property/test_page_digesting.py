"""sum128 of runs of bytes: torch's operations and Triton's kernel, against Python's integers."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engines.gpu.page_digester import PageDigester
from baton.errors import TransferError
from baton.kv.device_digest import PieceParts
from baton.transfer.interface import PageArray
from tests.property.page_digesting import check_torch, compute_sum128

PAGE_BYTES, NUM_PAGES = 512, 8


def test_torchs_own_operations():
    check_torch()


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (pip install triton)",
)
def test_the_kernel_in_tritons_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "tests.property.page_digesting", "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "digested" in done.stdout


@given(st.integers(0, 63), st.integers(1, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_a_change_within_one_word_changes_b(word, change, seed):
    page = np.random.default_rng(seed).integers(0, 2**64, PAGE_BYTES // 8, np.uint64)
    changed = page.copy()
    changed[word] ^= np.uint64(change)
    assert compute_sum128(page)[1] != compute_sum128(changed)[1]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_usual_accidents_change_both_sums(dtype):
    """Tokens exchanged, shifted, stale from one on, or zero; values like those of KV."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        tokens = rng.normal(0, 0.1, (8, PAGE_BYTES // 8 // np.dtype(dtype).itemsize)).astype(dtype)
        stale = rng.normal(0, 0.1, tokens.shape).astype(dtype)
        cut = rng.integers(1, 8)
        accidents = [
            tokens[::-1],
            np.roll(tokens, 1, axis=0),
            np.concatenate((tokens[:cut], stale[cut:])),
            np.concatenate((tokens[:cut], np.zeros_like(tokens[cut:]))),
            np.zeros_like(tokens),
            -tokens,
        ]
        right = compute_sum128(tokens.tobytes())
        for wrong in accidents:
            found = compute_sum128(wrong.tobytes())
            assert found[0] != right[0]
            assert found[1] != right[1]


def test_a_digester_reads_the_pages_of_each_layer_and_no_others():
    memory = np.random.default_rng(2).integers(0, 256, 2 * NUM_PAGES * PAGE_BYTES, np.uint8)
    arrays = [PageArray(n * NUM_PAGES * PAGE_BYTES, PAGE_BYTES, NUM_PAGES) for n in range(2)]
    digester = PageDigester(torch.from_numpy(memory), arrays)
    parts = PieceParts(np.array([(0, 5, 0, PAGE_BYTES, 0), (1, 2, 64, 16, 0)]), 2)
    layers = memory.reshape(2, NUM_PAGES, PAGE_BYTES)
    expected = [compute_sum128(data) for pages in layers for data in (pages[5], pages[2, 64:80])]
    assert digester.digest(range(2), parts) == np.array(expected, "<u8").tobytes()
    for outside in ((NUM_PAGES, 0, 8), (-1, 0, 8), (0, 505, 8), (0, -8, 8), (0, 0, 0)):
        with pytest.raises(TransferError, match="outside the region's pages"):
            digester.digest(range(1), PieceParts(np.array([(0, *outside, 0)]), 1))
