"""`cuda_ipc`: pages on one host's GPUs, copied from device to device by the copying side.

Enters: whole page index lists and, of a write, its notification. Leaves: pages copied by the GPU on
a stream of their own, scattered ones by a kernel and long runs by copy engines, then a notification
over our own connection. What is not CUDA's own is in `baton.transfer.onesided`: a closed grant is
quiescent once its writers reported that no copy is in progress, or are dead.

CUDA is reached through `libcuda.so.1`, by ctypes, not through torch or the runtime's `libcudart`:
the driver brings exactly one such library to every host that has a GPU, its functions keep their
ABI for decades, and `baton` need import nothing. Torch's wheels, in contrast, carry one of several
`libcudart`s under one of several names. Both share the device's primary context, so an address of
torch's means the same here.

File map:
    session.py      options; pages become runs of bytes between two mapped memories; the metadata
                    that an owner sends of its memory; the interface to one device (`CopyDevice`)
    device.py       `CopyDevice` on a real GPU
    copy_kernel.py  the kernel, in PTX, and which runs it is for
    driver.py       `libcuda.so.1`, typed
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from baton.registry import Plugin
from baton.transfer.onesided.session import Library
from baton.transfer.onesided.transport import OneSidedTransport
from baton.transfer.transports.cuda_ipc.device import CudaDevice
from baton.transfer.transports.cuda_ipc.driver import load_driver
from baton.transfer.transports.cuda_ipc.session import (
    CudaIpcHandle,
    CudaIpcOptions,
    CudaIpcSession,
    OpenDevice,
)

if TYPE_CHECKING:
    from baton.transfer.interface import Transport, TransportContext, TransportFactory


def make_transport(
    open_device: OpenDevice, options: CudaIpcOptions, context: TransportContext
) -> Transport:
    """The transport over a seam: tests bring one of their own."""
    return OneSidedTransport[CudaIpcHandle](
        "cuda_ipc",
        Library(
            partial(CudaIpcSession, open_device), reach="host", memory=("cuda",), multi_array=True
        ),
        context,
        connect_timeout_s=options.connect_timeout_s,
        max_connections=options.max_connections,
        advertise_host=None,
    )


def _build(options: CudaIpcOptions) -> TransportFactory:
    """The factory.

    Raises:
        ConfigError: this host has no GPU that CUDA can use.
    """
    driver = load_driver()
    return partial(make_transport, partial(CudaDevice, driver, options.multiprocessors), options)


PLUGIN = Plugin(CudaIpcOptions, _build)
