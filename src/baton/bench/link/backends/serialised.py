"""pickle and torch.save over a socket: gather the pages, serialise, send, load, scatter."""

from __future__ import annotations

import importlib
import io
import pickle
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from baton.bench.link.backends.limits import HEADER_BYTES, OverSocket, wait_messages
from baton.errors import ConfigError, PeerLostError, ProtocolError
from baton.rig.pages import view_bytes

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import ModuleType

    from numpy.typing import NDArray

    from baton.rig.backend import BackendContext, StopRequested
    from baton.rig.pages import Direction, Move
    from baton.transfer.interface import PageArray

ACK: Final = b"k"
NEEDED_TO_LOAD: Final = frozenset({
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
})


class Form(Protocol):
    """A serialisation of arrays."""

    def dump(self, array: NDArray[np.uint8]) -> bytes | memoryview:
        """Serialise."""
        ...

    def load(self, text: bytearray) -> NDArray[np.uint8]:
        """Deserialise."""
        ...


class Serialised(OverSocket):
    """See `Backend`. A message has two frames: the target pages, and the serialised bytes."""

    def __init__(self, form: Form, context: BackendContext) -> None:
        super().__init__(context)
        self._form = form

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Backend`."""
        del direction
        stream, form, pool = self._pair.stream, self._form, view_bytes(self.region)
        array, (src, dst, _) = move.array, move.ranges[0].tolist()

        def push_run() -> None:
            _send(stream, np.array([dst, 0]), form.dump(pool[src : src + move.num_bytes]))

        def push_pages() -> None:
            where = np.concatenate(([array.offset_bytes, array.page_bytes], move.dst_pages))
            _send(stream, where, form.dump(_view_pages(pool, array)[move.src_pages]))

        return push_run if move.is_run else push_pages

    def serve(self, stop: StopRequested) -> None:
        """See `Backend`."""
        stream, pool = self._pair.accept(), view_bytes(self.region)
        arrays = {array.offset_bytes: array for array in self.region.arrays}
        for _ in wait_messages(stream, stop):
            where = np.frombuffer(_receive(stream), np.int64)
            loaded = self._form.load(_receive(stream))
            if where[1]:
                _view_pages(pool, arrays[int(where[0])])[where[2:]] = loaded
            else:
                pool[int(where[0]) : int(where[0]) + loaded.size] = loaded
            stream.send(ACK)


class Pickle:
    """Python's pickle."""

    def dump(self, array: NDArray[np.uint8]) -> bytes:
        """See `Form`."""
        return pickle.dumps(array, protocol=5)

    def load(self, text: bytearray) -> NDArray[np.uint8]:
        """See `Form`. Builds arrays only, whatever the bytes name."""
        loaded: NDArray[np.uint8] = _OnlyArrays(io.BytesIO(text)).load()
        return loaded


class TorchSave:
    """PyTorch's file format, in memory."""

    def __init__(self) -> None:
        self._torch = _load_torch()
        self._torch.set_num_threads(1)

    def dump(self, array: NDArray[np.uint8]) -> memoryview:
        """See `Form`. A clone: of a view the whole pool would be saved."""
        file = io.BytesIO()
        self._torch.save(self._torch.from_numpy(array).clone(), file)
        return file.getbuffer()

    def load(self, text: bytearray) -> NDArray[np.uint8]:
        """See `Form`."""
        loaded: NDArray[np.uint8] = self._torch.load(io.BytesIO(text), weights_only=True).numpy()
        return loaded


def pickled(context: BackendContext) -> Serialised:
    """Arrays as pickles."""
    return Serialised(Pickle(), context)


def torch_saved(context: BackendContext) -> Serialised:
    """Arrays as files of `torch.save`."""
    return Serialised(TorchSave(), context)


class _OnlyArrays(pickle.Unpickler):  # noqa: S301 - it builds what is listed, nothing else
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as in pickle
        if (module, name) not in NEEDED_TO_LOAD:
            raise ProtocolError(f"the other process pickled a {module}.{name}")
        return super().find_class(module, name)


def _send(stream: socket.socket, where: NDArray[np.int64], body: bytes | memoryview) -> None:
    """Send one message; returns when the owner has stored it."""
    for frame in (where.tobytes(), body):
        stream.sendall(len(frame).to_bytes(HEADER_BYTES, "little"))
        stream.sendall(frame)
    if stream.recv(1) != ACK:
        raise PeerLostError("the other process closed the connection")


def _receive(stream: socket.socket) -> bytearray:
    """Receive one frame. Its length is trusted: the driver has sent the token."""
    announced_bytes = int.from_bytes(_receive_bytes(stream, HEADER_BYTES), "little")
    return _receive_bytes(stream, announced_bytes)


def _receive_bytes(stream: socket.socket, num_bytes: int) -> bytearray:
    text = bytearray(num_bytes)
    view = memoryview(text)
    while view:
        num_received = stream.recv_into(view)
        if num_received == 0:
            raise PeerLostError("the other process closed the connection")
        view = view[num_received:]
    return text


def _view_pages(pool: NDArray[np.uint8], array: PageArray) -> NDArray[np.uint8]:
    """One array of the pool, uint8 `[num_pages, page_bytes]`."""
    end = array.offset_bytes + array.num_pages * array.page_bytes
    return pool[array.offset_bytes : end].reshape(-1, array.page_bytes)


def _load_torch() -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ImportError as exc:
        raise ConfigError("torch is not installed: pip install torch") from exc
