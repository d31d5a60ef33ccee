"""Pages gathered and scattered, against numpy loops: torch's own way, and the kernel's."""

import importlib
import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from baton.engines.gpu.page_copier import IndexedCopier, KernelCopier, choose_copier, view_rows
from baton.errors import TransferError
from tests.property.page_copying import check_indexed

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (pip install triton)",
)


def test_torchs_own_copies():
    check_indexed()


@needs_triton
def test_the_kernel_in_tritons_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "tests.property.page_copying", "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "moved" in done.stdout


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles_to_16_byte_loads_and_stores(capability, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.property.kernel_compiling", str(capability)],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_gpu_torch_does_it():
    assert isinstance(choose_copier(torch.device("cpu")), IndexedCopier)


@pytest.mark.parametrize("index", [[4], [-1], [0, 9]])
def test_a_page_that_is_not_there_is_refused(index):
    rows, staging = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 16, dtype=torch.uint8)
    with pytest.raises(TransferError):
        IndexedCopier().gather(rows, np.array(index), staging)
    with pytest.raises(TransferError):
        IndexedCopier().scatter(staging, np.array(index), rows)
    assert staging.all()
    assert not rows.any()


@needs_triton
@pytest.mark.parametrize(
    ("page_bytes", "shift", "unit"),
    [(32_768, 0, 16), (48, 0, 16), (56, 0, 8), (100, 0, 4), (48, 1, 1)],
)
def test_the_widest_words_that_fit(page_bytes, shift, unit):
    kernels = importlib.import_module("baton.engines.gpu.kernels")
    memory = torch.zeros(4 * page_bytes + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    aligned = memory.as_strided((4, page_bytes), (page_bytes, 1), start)
    shifted = memory.as_strided((4, page_bytes), (page_bytes, 1), start + shift)
    assert kernels.compute_unit_bytes(aligned, shifted) == unit


@needs_triton
def test_the_kernel_refuses_the_same():
    rows, staging = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 16, dtype=torch.uint8)
    with pytest.raises(TransferError):
        KernelCopier().gather(rows, np.array([4]), staging)
    with pytest.raises(TransferError):
        KernelCopier().gather(rows, np.arange(4), staging[:3])
    with pytest.raises(TransferError):
        KernelCopier().scatter(torch.zeros(4, 8, dtype=torch.uint8), np.arange(2), rows)


def test_rows_of_other_tensors():
    pages = torch.arange(4 * 3 * 8, dtype=torch.int16).view(4, 3, 8)
    rows = view_rows(pages)
    assert rows.shape == (4, 48)
    assert (rows.view(torch.int16).view(4, 3, 8) == pages).all()
    assert view_rows(pages[1::2]).stride(0) == 96
    assert (view_rows(pages[1::2])[1].view(torch.int16) == pages[3].flatten()).all()
    for bad in (pages.transpose(1, 2), pages[:1].expand(4, 3, 8)):
        with pytest.raises(TransferError):
            view_rows(bad)
