"""The kernel, the copy stream and mirrored pages on a real GPU."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from baton.engines.gpu.copy_stream import CopyStream, pin_memory
from baton.engines.gpu.page_copier import (
    IndexedCopier,
    KernelCopier,
    LaunchShape,
    choose_copier,
)
from baton.transfer.region import allocate_shared_region, release_region, view_pages

if not torch.cuda.is_available():
    pytest.skip(f"needs a CUDA GPU (torch {torch.__version__} sees none)", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
BUSY_CYCLES = 200_000_000
"""A tenth of a second of a GPU's time."""


def test_the_kernel_moves_what_numpy_moves():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.property.page_copying", "cuda"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_triton_is_taken_where_it_is():
    pytest.importorskip("triton")
    assert isinstance(choose_copier(DEVICE), KernelCopier)


@pytest.mark.parametrize("page_bytes", [32_768, 32_776, 100])
def test_both_copiers_agree_on_a_request(page_bytes):
    pytest.importorskip("triton")
    rng = np.random.default_rng(0)
    pages = torch.randint(0, 256, (4096, page_bytes), dtype=torch.uint8, device=DEVICE)
    index = rng.permutation(4096)[:1024]
    staging = [torch.zeros(1024, page_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    for copier, target in zip((IndexedCopier(), KernelCopier()), staging, strict=True):
        copier.gather(pages, index, target)
    assert torch.equal(*staging)


@pytest.mark.parametrize(
    "shape", [LaunchShape(1, 64, 1), LaunchShape(132, 8192, 32), LaunchShape(4, 4096, 16)]
)
@pytest.mark.parametrize("page_bytes", [32_768, 100])
def test_a_launch_of_any_shape_moves_the_same_bytes(shape, page_bytes):
    pytest.importorskip("triton")
    pages = torch.randint(0, 256, (512, page_bytes), dtype=torch.uint8, device=DEVICE)
    index = np.random.default_rng(0).permutation(512)
    staging, back = torch.empty_like(pages), torch.empty_like(pages)
    copier = KernelCopier(shape)
    copier.gather(pages, index, staging)
    copier.scatter(staging, index, back)
    assert torch.equal(staging, pages[torch.from_numpy(index).to(DEVICE)])
    assert torch.equal(back, pages)


@pytest.fixture
def host():
    region = allocate_shared_region([(256, 65_536)])
    pin_memory(region.memory, DEVICE)
    yield torch.from_numpy(view_pages(region.memory, region.arrays[0]))
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(
        torch.frombuffer(region.memory, dtype=torch.uint8).data_ptr()
    )
    release_region(region)


def test_memory_that_cannot_be_pinned_is_logged_and_fails_nothing_else(host, caplog):
    pin_memory(memoryview(host.numpy()).cast("B"), DEVICE)  # it is pinned already
    assert "cannot pin" in caplog.text
    assert torch.ones(8, device=DEVICE).sum() == 8


@pytest.mark.parametrize("is_scattered", [False, True])
def test_pages_reach_the_host_as_the_model_left_them(host, is_scattered):
    """What a busy stream will write is waited for, by the GPU: not by the host."""
    index = np.arange(256)
    if is_scattered:
        index = np.random.default_rng(1).permutation(256)
    pages = torch.zeros(256, 65_536, dtype=torch.uint8, device=DEVICE)
    copy_stream = CopyStream(DEVICE)
    copy_stream.to_host(pages, index, host, np.arange(256)).wait()  # kernels are compiled
    torch.cuda._sleep(BUSY_CYCLES)
    pages.fill_(7)
    event = copy_stream.to_host(pages, index, host, np.arange(256))
    assert not event.is_done()  # the host did not wait
    assert not host.any()
    event.wait()
    assert (host == 7).all()


def test_the_model_goes_on_while_pages_cross(host):
    pages = torch.zeros(256, 65_536, dtype=torch.uint8, device=DEVICE)
    copy_stream, index = CopyStream(DEVICE), np.arange(256)
    copy_stream.to_host(pages, index, host, index).wait()
    torch.ones(8, device=DEVICE).sum()  # a kernel's first launch may wait for the whole device
    torch.cuda.synchronize()
    with torch.cuda.stream(copy_stream._stream):
        torch.cuda._sleep(BUSY_CYCLES)
    event = copy_stream.to_host(pages, index, host, index)
    computed = torch.cuda.Event()
    torch.ones(8, device=DEVICE).sum()
    computed.record()
    computed.synchronize()
    assert not event.is_done()  # the model's stream was not behind the copy stream's
    event.wait()


@pytest.mark.parametrize("is_scattered", [False, True])
def test_the_model_sees_pages_that_came_from_the_host(host, is_scattered):
    index = np.arange(256)
    if is_scattered:
        index = np.random.default_rng(1).permutation(256)
    host[:] = torch.arange(256, dtype=torch.uint8)[:, None]
    pages = torch.zeros(256, 65_536, dtype=torch.uint8, device=DEVICE)
    copy_stream = CopyStream(DEVICE)
    copy_stream.to_device(host, np.arange(256), pages, index).wait()  # kernels are compiled
    pages.clone()
    pages.zero_()
    with torch.cuda.stream(copy_stream._stream):
        torch.cuda._sleep(BUSY_CYCLES)
    event = copy_stream.to_device(host, np.arange(256), pages, index)
    seen = pages.clone()  # on the model's stream, at once
    assert not event.is_done()  # the host did not wait
    expected = torch.zeros_like(host)
    expected[torch.from_numpy(index)] = host
    assert torch.equal(seen.cpu(), expected)
