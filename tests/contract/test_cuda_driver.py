"""What `cuda_ipc` says to the CUDA driver, against a stand-in for it; needs a C compiler."""

import numpy as np
import pytest

from baton.errors import ConfigError, TransferError
from baton.testing.transport_contract import NetworkReadingContract
from baton.testing.transport_contract.kit import (
    NUM_PAGES,
    PAGE_BYTES,
    TransportKit,
    check_write,
    list_open_fds,
)
from baton.testing.transport_contract.process import ProcessContract
from baton.testing.transport_contract.writing import WriteContract
from baton.testing.transport_pair import TransportPair, spans_of_pages, whole_pages
from baton.transfer.interface import GrantQuiescent, RemoteLost, WriteFailed
from baton.transfer.transports.cuda_ipc.device import CudaDevice
from baton.transfer.transports.cuda_ipc.driver import load_driver
from tests.contract import cuda_stand_in

if cuda_stand_in.COMPILER is None:
    pytest.skip("there is no C compiler", allow_module_level=True)


@pytest.fixture(scope="module", params=[0, 12, 13], ids=["CUDA 11", "CUDA 12.8", "CUDA 13"])
def library(request, tmp_path_factory):
    """A driver of each age."""
    name = cuda_stand_in.compile_library(tmp_path_factory.mktemp("cuda"), request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cuda_stand_in.LIBRARY_VARIABLE, name)
        yield request.param


class StandInKit(TransportKit):
    kind = "cuda_ipc"
    peer_writes = True
    peer_module = "tests.contract.cuda_stand_in"

    def make_transport(self, context):
        return cuda_stand_in.build_transport(self.kind, self.options)(context)

    def allocate(self, shapes):
        return cuda_stand_in.allocate_region(shapes)

    @pytest.fixture(autouse=True)
    def check_descriptors(self, library):
        """And the GPU's own: what a transport made there, it gives back."""
        before, counted = list_open_fds(), count_all()
        yield
        assert count_all() == counted
        cuda_stand_in.free_all()
        assert not list_open_fds() - before


def count_all():
    """What a transport makes on a GPU."""
    return [cuda_stand_in.count(each) for each in ("events", "streams", "mapped", "modules")]


newest = pytest.mark.parametrize("library", [13], indirect=True, scope="module")


@newest
class TestMoving(StandInKit, WriteContract): ...


@newest
class TestReading(StandInKit, NetworkReadingContract): ...


@newest
class TestProcess(StandInKit, ProcessContract): ...


class TestDevice(StandInKit):
    def test_scattered_pages_take_the_kernel_and_long_runs_the_copy_engines(
        self, pair, library, caplog
    ):
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        counts = []
        for sources in (np.random.default_rng(5).permutation(NUM_PAGES), np.arange(NUM_PAGES)):
            before = cuda_stand_in.count("launches"), cuda_stand_in.count("batches")
            check_write(pair, remote, grant, [whole_pages(sources, range(NUM_PAGES), PAGE_BYTES)])
            after = cuda_stand_in.count("launches"), cuda_stand_in.count("batches")
            counts.append((after[0] - before[0], after[1] - before[1]))
        assert counts == ([(1, 0), (0, 1)] if library else [(0, 0), (0, 0)])
        assert ("CUDA 12.1 and a GPU of compute capability 8.0" in caplog.text) != bool(library)

    def test_a_span_of_odd_bytes_takes_the_copy_engines(self, pair, library):
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        before = cuda_stand_in.count("launches")
        check_write(pair, remote, grant, [spans_of_pages([1, 5], [2, 9], [(8, 16, 100)])])
        assert cuda_stand_in.count("launches") == before

    def test_memory_without_a_handle_is_not_shared(self, pair, monkeypatch):
        monkeypatch.setenv("STAND_IN_EXPANDABLE", "1")
        pair.writer.transport.attach(pair.reader.descriptor)
        pair.pump(lambda: bool(pair.seen(RemoteLost)))
        assert "expandable_segments" in str(pair.seen(RemoteLost)[0].error)

    def test_a_gpu_shared_by_mps_is_not_used(self, monkeypatch):
        monkeypatch.setenv("STAND_IN_MPS", "1")
        with pytest.raises(TransferError, match="MPS"):
            CudaDevice(cuda_stand_in.driver(), 8, 0)

    def test_a_device_that_is_not_there(self):
        with pytest.raises(TransferError, match="STAND_IN_101"):
            CudaDevice(cuda_stand_in.driver(), 8, 1)


class TestHungDevice(StandInKit):
    @pytest.fixture(autouse=True)
    def check_descriptors(self, library):
        """A device that hangs gives nothing back."""
        yield
        cuda_stand_in.free_all()

    def test_copies_that_do_not_end_are_never_called_over(self, monkeypatch):
        module = "baton.transfer.transports.cuda_ipc.device"
        monkeypatch.setattr(f"{module}.CLOSE_TIMEOUT_S", 0.001)
        pair = TransportPair.of(self.make_side(), self.make_side())
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        group = whole_pages(range(NUM_PAGES), range(NUM_PAGES), PAGE_BYTES)
        hung = []
        monkeypatch.setattr(
            type(cuda_stand_in.driver()), "has_happened", lambda _, event: bool(hung.append(event))
        )
        pair.writer.transport.submit(pair.write(remote, grant, [group]))
        pair.writer.transport.detach(remote)
        pair.reader.transport.close_grant(grant)
        pair.poll_for()
        assert hung
        assert pair.seen(WriteFailed)
        assert not pair.seen(GrantQuiescent)  # it waits for the writer's process
        monkeypatch.undo()
        pair.close()


def test_without_a_driver_the_reason_is_said():
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU and its driver"):
        load_driver("libcuda-of-nobody.so.1")


def test_a_library_that_is_another_is_refused():
    with pytest.raises(ConfigError, match="cuInit"):
        load_driver("libc.so.6")
