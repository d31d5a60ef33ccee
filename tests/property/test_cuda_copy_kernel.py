"""`cuda_ipc`'s kernel: its PTX, interpreted, against copies of bytes; and what it is given."""

import importlib.util
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.transfer.transports.cuda_ipc.copy_kernel import (
    LONG_RUN_BYTES,
    MAX_PARTS,
    MAX_RUNS,
    PTX,
    WARPS_PER_BLOCK,
    count_parts,
    suits_kernel,
)
from tests.examples import examples
from tests.property.ptx_interpreter import Memory, run_kernel

BASE = 0x7F00_0000_0000
HALF_BYTES = 64 << 10


@st.composite
def runs_between_halves(draw):
    """Runs of units from anywhere in the lower half to places of their own in the upper one."""
    runs, at = [], 0
    for _ in range(draw(st.integers(1, 9))):
        at += 16 * draw(st.integers(0, 40))
        num_bytes = 16 * draw(st.one_of(st.integers(1, 40), st.integers(240, 1200)))
        if at + num_bytes > HALF_BYTES:
            break
        source = 16 * draw(st.integers(0, (HALF_BYTES - num_bytes) // 16))
        runs.append((BASE + source, BASE + HALF_BYTES + at, num_bytes))
        at += num_bytes
    return np.array(runs, np.uint64).reshape(-1, 3)


LONG_RUNS = np.array(
    [(BASE, BASE + HALF_BYTES, 40_016), (BASE + 64, BASE + HALF_BYTES + 40_016, 4096)], np.uint64
)


@settings(max_examples=examples(15), deadline=None)
@example(LONG_RUNS, 2, 32, 2)
@example(LONG_RUNS, 1, 96, 8)
@given(
    runs_between_halves(), st.integers(1, 3), st.sampled_from([32, 96]), st.sampled_from([1, 2, 8])
)
def test_the_ptx_copies_each_run_and_nothing_else(runs, num_blocks, num_threads, num_parts):
    content = np.random.default_rng(0).integers(0, 256, 2 * HALF_BYTES, np.uint8)
    memory = Memory(BASE, content.tobytes())
    parameters = {
        "runs": runs.tobytes().ljust(MAX_RUNS * 24),
        "num_runs": len(runs).to_bytes(4, "little"),
        "num_parts": num_parts.to_bytes(4, "little"),
    }
    run_kernel(PTX.decode(), parameters, memory, num_blocks, num_threads)
    for source, target, num_bytes in (runs.astype(np.int64) - [BASE, BASE, 0]).tolist():
        content[target : target + num_bytes] = content[source : source + num_bytes]
    assert memory.content == content.tobytes()


@given(st.integers(1, MAX_RUNS), st.integers(1, 1024))
def test_few_runs_are_shared_by_warps(num_runs, multiprocessors):
    parts = count_parts(num_runs, multiprocessors)
    assert 1 <= parts <= MAX_PARTS
    num_warps = multiprocessors * WARPS_PER_BLOCK
    assert parts == MAX_PARTS or num_runs * parts >= num_warps


@pytest.mark.parametrize(
    ("runs", "suits"),
    [
        ([(0, 16, 32_768)], True),
        ([(0, 16, LONG_RUN_BYTES)], False),
        ([(0, 16, LONG_RUN_BYTES), (0, 16, 64)], True),
        ([(0, 8, 32_768)], False),
        ([(0, 16, 32_768), (0, 16, 100)], False),
    ],
)
def test_short_aligned_runs_are_for_the_kernel(runs, suits):
    assert suits_kernel(np.array(runs, np.uint64)) is suits


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="ptxas comes with Triton (pip install triton)",
)
@pytest.mark.parametrize("capability", [80, 90])
def test_ptxas_accepts_it(capability, tmp_path):
    found = importlib.util.find_spec("triton")
    ptxas = Path(found.origin).parent / "backends/nvidia/bin/ptxas"
    (tmp_path / "kernel.ptx").write_bytes(PTX)
    command = [ptxas, "-v", f"-arch=sm_{capability}", "kernel.ptx", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores" in done.stderr
