"""`cuda_ipc` against the public contract on a real GPU, with peers in this and other processes."""

import socket
from typing import ClassVar

import numpy as np
import pytest
import torch

from baton.clock import MachineClock
from baton.ids import new_epoch
from baton.testing.transport_contract import (
    MultiArrayContract,
    NetworkReadingContract,
    NetworkTransportContract,
)
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, TransportKit, check_write
from baton.testing.transport_contract.writing import WriteContract
from baton.testing.transport_pair import TransportPair, whole_pages
from baton.transfer.interface import TRANSPORTS, Arrived, RemoteLost, TransportContext
from baton.transfer.transports.cuda_ipc.driver import Driver
from tests.gpu.gpu_memory import GpuSide, allocate_region

if not torch.cuda.is_available():
    pytest.skip(f"needs a CUDA GPU (torch {torch.__version__} sees none)", allow_module_level=True)


BUSY_CYCLES = 1_000_000_000
"""Half a second of a GPU's time: a write takes milliseconds."""


class GpuKit(TransportKit):
    kind = "cuda_ipc"
    peer_writes = True
    peer_module = "tests.gpu.gpu_memory"
    side_type = GpuSide

    def allocate(self, shapes):
        return allocate_region(shapes)

    def connect_unauthenticated(self, descriptor):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect(b"\0" + descriptor.endpoint.encode())
        return sock

    @pytest.fixture(autouse=True)
    def check_descriptors(self):
        """The driver opens descriptors as it likes: nothing is checked."""


class TestCudaIpc(GpuKit, NetworkTransportContract, NetworkReadingContract, MultiArrayContract): ...


class TestCopyEngines(GpuKit, WriteContract):
    options: ClassVar = {"multiprocessors": 0}


class TestKernel(GpuKit):
    @pytest.mark.parametrize("num_pages", [1, 3, NUM_PAGES])
    def test_scattered_pages_are_copied_by_the_kernel(self, pair, num_pages, monkeypatch):
        called, call = [], Driver.call
        monkeypatch.setattr(
            Driver, "call", lambda self, name, *rest: called.append(name) or call(self, name, *rest)
        )
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        sources, targets = (
            np.random.default_rng(seed).permutation(NUM_PAGES)[:num_pages] for seed in (1, 2)
        )
        check_write(pair, remote, grant, [whole_pages(sources, targets, PAGE_BYTES)])
        assert called.count("cuLaunchKernel") == 1
        assert not any(name.startswith("cuMemcpy") for name in called)


class TestMemory(GpuKit):
    def test_a_write_does_not_wait_for_the_model(self, pair):
        """The model's stream is torch's; a write that is posted is no part of its order."""
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        group = whole_pages(range(NUM_PAGES), range(NUM_PAGES)[::-1], PAGE_BYTES)
        model = torch.cuda.Event()
        for num_written, cycles in enumerate((0, BUSY_CYCLES), start=1):  # the first is slower
            torch.cuda._sleep(cycles)
            model.record()
            pair.writer.transport.submit(pair.write(remote, grant, [group]))
            pair.pump(lambda: len(pair.seen(Arrived)) == num_written)  # noqa: B023 -- at once
        assert not model.query()
        torch.cuda.synchronize()
        assert (pair.reader.pages()[::-1] == pair.writer.pages()).all()

    def test_two_gpus(self):
        if torch.cuda.device_count() < 2:
            pytest.skip("there is one GPU")
        other = allocate_region(((NUM_PAGES, PAGE_BYTES),), torch.device("cuda", 1))
        context = TransportContext(self.credentials, new_epoch(), "127.0.0.1", MachineClock())
        transport = TRANSPORTS.build(self.kind, {})(context)
        reader = GpuSide.start(transport, context.epoch, other)
        pair = TransportPair.of(self.make_side(((NUM_PAGES, PAGE_BYTES),)), reader)
        pair.writer.fill(seed=1)
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        sources = np.random.default_rng(2).permutation(NUM_PAGES)
        group = whole_pages(sources, range(NUM_PAGES), PAGE_BYTES)
        if torch.cuda.can_device_access_peer(0, 1):
            check_write(pair, remote, grant, [group])
        else:  # another transport's turn
            pair.writer.transport.submit(pair.write(remote, grant, [group]))
            pair.pump(lambda: bool(pair.seen(RemoteLost)))
        pair.close()
