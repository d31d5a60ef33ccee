"""What is used of `libcuda.so.1`, typed. Nothing here knows pages or peers."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError, TransferError
from baton.transfer.transports.cuda_ipc.session import HANDLE_BYTES, Allocation

if TYPE_CHECKING:
    from collections.abc import Generator

    import numpy as np
    from numpy.typing import NDArray

LIBRARY: Final = "libcuda.so.1"

_NOT_READY: Final = 600
_NON_BLOCKING_STREAM: Final = 1
"""Not ordered with the default stream."""
_HIGH_PRIORITY: Final = -5
"""Blocks of a kernel go before those of the model that have not begun."""
_EVENT_WITHOUT_TIME: Final = 2
_LAZY_PEER_ACCESS: Final = 1
_IS_LEGACY_IPC_CAPABLE: Final = 10
_MPS_ENABLED: Final = 133
_ORDER_OF_STREAM: Final = 1
_PREFER_OVERLAP_WITH_COMPUTE: Final = 1
"""Copy engines rather than SMs; before CUDA 13.1 the driver takes no notice of it."""


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle; handed over by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_INT, _UINT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
_ADDRESS: Final = ctypes.c_uint64
_PROTOTYPES: Final[dict[str, tuple[type, ...]]] = {
    "cuInit": (_UINT,),
    "cuDeviceGetCount": (ctypes.POINTER(_INT),),
    "cuDeviceGet": (ctypes.POINTER(_INT), _INT),
    "cuDeviceGetAttribute": (ctypes.POINTER(_INT), _INT, _INT),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_POINTER), _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_POINTER),),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_ADDRESS), ctypes.POINTER(_SIZE), _ADDRESS),
    "cuPointerGetAttribute": (_POINTER, _INT, _ADDRESS),
    "cuIpcGetMemHandle": (ctypes.POINTER(IpcHandle), _ADDRESS),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_ADDRESS), IpcHandle, _UINT),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuModuleLoadData": (ctypes.POINTER(_POINTER), ctypes.c_char_p),
    "cuModuleUnload": (_POINTER,),
    "cuModuleGetFunction": (ctypes.POINTER(_POINTER), _POINTER, ctypes.c_char_p),
    "cuLaunchKernel": (_POINTER, *[_UINT] * 7, _POINTER, ctypes.POINTER(_POINTER), _POINTER),
    "cuStreamCreateWithPriority": (ctypes.POINTER(_POINTER), _UINT, _INT),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuEventCreate": (ctypes.POINTER(_POINTER), _UINT),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    "cuEventDestroy_v2": (_POINTER,),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, _SIZE, _POINTER),
    "cuGetErrorName": (_INT, ctypes.POINTER(ctypes.c_char_p)),
}
_BATCH: Final = (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE)
"""Destinations, sources, sizes, how many; attributes, the first copy of each, how many."""
_OPTIONAL_PROTOTYPES: Final[dict[str, tuple[type, ...]]] = {
    "cuMemcpyBatchAsync_v2": (*_BATCH, _POINTER),
    "cuMemcpyBatchAsync": (*_BATCH, ctypes.POINTER(_SIZE), _POINTER),
}
"""Of CUDA 13.0 and 12.8. The older one also reports which copy was wrong."""


@cache
def load_driver(library: str = LIBRARY) -> Driver:
    """The driver, ready for use.

    Raises:
        ConfigError: it is not installed, is too old, or finds no GPU.
    """
    try:
        driver = Driver(ctypes.CDLL(library))
        driver.call("cuInit", 0)
    except OSError as exc:
        raise ConfigError(
            f"the transport cuda_ipc needs an NVIDIA GPU and its driver: no {library} here"
        ) from exc
    except (AttributeError, TransferError) as exc:
        raise ConfigError(f"the transport cuda_ipc cannot use {library}: {exc}") from exc
    if driver.count_devices() == 0:
        raise ConfigError("the transport cuda_ipc needs an NVIDIA GPU: the driver shows none")
    return driver


class Driver:
    """Calls, and errors as exceptions. Stateless; safe to share."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError where a function that is needed is missing."""
        self._library = library
        for name, types in _PROTOTYPES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, _INT
        self._batch_function = None
        for name, types in _OPTIONAL_PROTOTYPES.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = types, _INT
                self._batch_function = self._batch_function or name

    def call(self, name: str, *arguments: object) -> None:
        """Call a function.

        Raises:
            TransferError: it failed.
        """
        result = getattr(self._library, name)(*arguments)
        if result:
            raise TransferError(f"CUDA: {name}: {self._name_of(result)}")

    def count_devices(self) -> int:
        """GPUs that this process may use."""
        count = _INT()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def is_shared_by_mps(self, number: int) -> bool:
        """Whether processes share one context there; older drivers do not report it."""
        device, value = _INT(), _INT()
        self.call("cuDeviceGet", ctypes.byref(device), number)
        result = self._library.cuDeviceGetAttribute(ctypes.byref(value), _MPS_ENABLED, device)
        return bool(result == 0 and value.value)

    def retain_context(self, number: int) -> int:
        """The primary context of a device, which torch uses too; once more for each call."""
        device, context = _INT(), _POINTER()
        self.call("cuDeviceGet", ctypes.byref(device), number)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context.value or 0

    def release_context(self, number: int) -> None:
        """Give back what `retain_context` took."""
        device = _INT()
        self.call("cuDeviceGet", ctypes.byref(device), number)
        self.call("cuDevicePrimaryCtxRelease_v2", device)

    @contextmanager
    def current(self, context: int) -> Generator[None]:
        """Make a context this thread's for a while; whatever it had before is so again after."""
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(_POINTER()))

    def find_allocation(self, address: int) -> Allocation:
        """What was allocated in one piece around an address; mapped memory counts too."""
        base, num_bytes = _ADDRESS(), _SIZE()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(num_bytes), address)
        return Allocation(base.value, num_bytes.value)

    def get_ipc_handle(self, address: int) -> bytes:
        """The handle of the allocation that begins at `address`.

        Raises:
            TransferError: memory of this kind has none.
        """
        is_capable, handle = _INT(), IpcHandle()
        self.call(
            "cuPointerGetAttribute", ctypes.byref(is_capable), _IS_LEGACY_IPC_CAPABLE, address
        )
        if not is_capable.value:
            raise TransferError(
                "this GPU memory has no IPC handle: with torch, unset "
                "PYTORCH_CUDA_ALLOC_CONF's expandable_segments and backend:cudaMallocAsync"
            )
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open_ipc_handle(self, handle: bytes) -> int:
        """The address of a peer's allocation here; to be closed once for each time."""
        address = _ADDRESS()
        self.call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            IpcHandle.from_buffer_copy(handle),
            _LAZY_PEER_ACCESS,
        )
        return address.value

    def create_stream(self) -> int:
        """A stream that waits for no other, of high priority."""
        stream = _POINTER()
        self.call(
            "cuStreamCreateWithPriority",
            ctypes.byref(stream),
            _NON_BLOCKING_STREAM,
            _HIGH_PRIORITY,
        )
        return stream.value or 0

    def record_event(self, stream: int) -> int:
        """An event of its own, which has happened when all that was given to `stream` is done."""
        event = _POINTER()
        self.call("cuEventCreate", ctypes.byref(event), _EVENT_WITHOUT_TIME)
        try:
            self.call("cuEventRecord", event, stream)
        except TransferError:
            self.call("cuEventDestroy_v2", event)
            raise
        return event.value or 0

    def has_happened(self, event: int) -> bool:
        """Does not wait.

        Raises:
            TransferError: something that was given to the GPU before has failed.
        """
        result = self._library.cuEventQuery(event)
        if result not in {0, _NOT_READY}:
            raise TransferError(f"CUDA: a copy failed: {self._name_of(result)}")
        return bool(result == 0)

    def copy_batch(self, runs: NDArray[np.uint64], stream: int) -> None:
        """Copies in no order among each other: uint64 `[r, 3]` of (source, destination, bytes).

        Many at once where the driver can; else one by one. r is 1 or more.
        """
        if self._batch_function is None:
            for source, destination, num_bytes in runs.tolist():
                self.call("cuMemcpyDtoDAsync_v2", destination, source, num_bytes, stream)
            return
        sources, destinations, sizes = (runs[:, i].copy() for i in range(3))
        attributes = _CopyAttributes(order=_ORDER_OF_STREAM, flags=_PREFER_OVERLAP_WITH_COMPUTE)
        first, wrong = _SIZE(0), _SIZE()
        is_older = self._batch_function == "cuMemcpyBatchAsync"
        self.call(
            self._batch_function,
            *(each.ctypes.data for each in (destinations, sources, sizes)),
            len(runs),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            *([ctypes.byref(wrong)] if is_older else []),
            stream,
        )

    def _name_of(self, result: int) -> str:
        name = ctypes.c_char_p()
        if self._library.cuGetErrorName(result, ctypes.byref(name)) or name.value is None:
            return f"error {result}"
        return name.value.decode(errors="replace")
