"""`cuda_ipc` as it is, over a `libcuda.so.1` that works on memory of this host.

Tested is all that Baton says to the driver: prototypes, order, contexts, what is given back.
`python -m tests.contract.cuda_stand_in` is a `baton.testing.transport_peer` over the same library.
"""

import ctypes
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

from baton.ids import new_region_handle
from baton.testing.transport_peer import PeerSetup, fill_region, main
from baton.transfer.interface import DeviceMemory, PagedRegion
from baton.transfer.region import compute_region_bytes, place_arrays
from baton.transfer.transports.cuda_ipc import make_transport
from baton.transfer.transports.cuda_ipc.device import CudaDevice
from baton.transfer.transports.cuda_ipc.driver import load_driver
from baton.transfer.transports.cuda_ipc.session import CudaIpcOptions

SOURCE = Path(__file__).with_name("libcuda_stand_in.c")
COMPILER = shutil.which("cc")
LIBRARY_VARIABLE = "BATON_TEST_LIBCUDA"


def compile_library(folder, batch):
    """A library whose batched copy is that of CUDA `batch` (0: none)."""
    library = folder / f"libcuda_{batch}.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", f"-DBATCH={batch}", "-o", library, SOURCE]
    subprocess.run(command, check=True)
    return str(library)


def driver():
    """Over the library that the test chose."""
    return load_driver(os.environ[LIBRARY_VARIABLE])


def allocate(num_bytes):
    """Address of so much of the "GPU's" memory."""
    address = ctypes.c_uint64()
    context = driver().retain_context(0)
    allocate = ctypes.CDLL(os.environ[LIBRARY_VARIABLE]).cuMemAlloc_v2
    with driver().current(context):
        assert allocate(ctypes.byref(address), ctypes.c_size_t(num_bytes)) == 0
    driver().release_context(0)
    return address.value


def allocate_region(shapes):
    """A `cuda` region; this memory can be looked at, too."""
    arrays = place_arrays(shapes)
    num_bytes = compute_region_bytes(arrays)
    address = allocate(num_bytes)
    memory = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
    device = DeviceMemory(0, address)
    return PagedRegion(new_region_handle(), "cuda", memory, arrays, device=device)


def count(name):
    """What the library counts: `events`, `streams`, `mapped`, `batches`."""
    library = ctypes.CDLL(os.environ[LIBRARY_VARIABLE])
    return ctypes.c_int.in_dll(library, f"stand_in_num_{name}").value


def free_all():
    """Give back all memory that was allocated."""
    ctypes.CDLL(os.environ[LIBRARY_VARIABLE]).stand_in_free_all()


def build_transport(kind, options):
    assert (kind, dict(options)) == ("cuda_ipc", {})
    options = CudaIpcOptions()
    device = partial(CudaDevice, driver(), options.multiprocessors)
    return partial(make_transport, device, options)


if __name__ == "__main__":
    main(PeerSetup(build_transport, lambda *_: allocate_region, fill_region))
