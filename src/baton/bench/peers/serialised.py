"""What an application writes first: gather the pages, serialise, send, load, scatter."""

from __future__ import annotations

import importlib
import io
import pickle
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from baton.bench.contender import Traits
from baton.bench.pool import allocate_pool, view_bytes
from baton.bench.sockets import HEADER_BYTES, SocketPair, announced
from baton.errors import ConfigError, PeerLostError, ProtocolError
from baton.transfer.region import release_region

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import ModuleType

    from numpy.typing import NDArray

    from baton.bench.contender import CallWaiting, Surroundings
    from baton.bench.workload import Direction, Move
    from baton.transfer.interface import PageArray

TAKEN: Final = b"k"
NEEDED_TO_LOAD: Final = frozenset({
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
})


class Form(Protocol):
    """A way to write an array as bytes, and back."""

    def dump(self, array: NDArray[np.uint8]) -> bytes | memoryview:
        """Serialise."""
        ...

    def load(self, text: bytearray) -> NDArray[np.uint8]:
        """And back."""
        ...


class Serialised:
    """See `Contender`: one message, two frames: where it goes, and the serialised bytes."""

    def __init__(self, form: Form, around: Surroundings) -> None:
        self._form, self._pair = form, SocketPair(around)
        self.traits = Traits("TCP", ("push",), "tuned socket")
        self.region = self.target = allocate_pool(("host",), around.num_pages)

    def introduce(self) -> bytes:
        """See `Contender`."""
        return self._pair.introduce()

    def meet(self, introduction: bytes) -> None:
        """See `Contender`."""
        self._pair.meet(introduction)

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Contender`."""
        del direction
        stream, form, pool = self._pair.stream, self._form, view_bytes(self.region)
        array, (src, dst, _) = move.array, move.ranges[0].tolist()

        def push_run() -> None:
            _send(stream, np.array([dst, 0]), form.dump(pool[src : src + move.num_bytes]))

        def push_pages() -> None:
            where = np.concatenate(([array.offset_bytes, array.page_bytes], move.dst_pages))
            _send(stream, where, form.dump(_view_pages(pool, array)[move.src_pages]))

        return push_run if move.is_run else push_pages

    def rest(self) -> None:
        """See `Contender`: the owner sees orders itself."""

    def serve(self, call: CallWaiting) -> None:
        """See `Contender`."""
        stream, pool = self._pair.accept(), view_bytes(self.region)
        arrays = {array.offset_bytes: array for array in self.region.arrays}
        for _ in announced(stream, call):
            where = np.frombuffer(_receive(stream), np.int64)
            loaded = self._form.load(_receive(stream))
            if where[1]:
                _view_pages(pool, arrays[int(where[0])])[where[2:]] = loaded
            else:
                pool[int(where[0]) : int(where[0]) + loaded.size] = loaded
            stream.send(TAKEN)

    def close(self) -> None:
        """See `Contender`."""
        self._pair.close()
        release_region(self.region)


class Pickle:
    """Python's own."""

    def dump(self, array: NDArray[np.uint8]) -> bytes:
        """See `Form`."""
        return pickle.dumps(array, protocol=5)

    def load(self, text: bytearray) -> NDArray[np.uint8]:
        """See `Form`. Builds arrays and nothing else, whatever the bytes ask for."""
        loaded: NDArray[np.uint8] = _OnlyArrays(io.BytesIO(text)).load()
        return loaded


class TorchSave:
    """PyTorch's file format, in memory."""

    def __init__(self) -> None:
        self._torch = _load_torch()
        self._torch.set_num_threads(1)

    def dump(self, array: NDArray[np.uint8]) -> memoryview:
        """See `Form`. A clone: a view would be saved with all of the pool behind it."""
        file = io.BytesIO()
        self._torch.save(self._torch.from_numpy(array).clone(), file)
        return file.getbuffer()

    def load(self, text: bytearray) -> NDArray[np.uint8]:
        """See `Form`."""
        loaded: NDArray[np.uint8] = self._torch.load(io.BytesIO(text), weights_only=True).numpy()
        return loaded


class _OnlyArrays(pickle.Unpickler):  # noqa: S301 - it builds what is listed, nothing else
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as in pickle
        if (module, name) not in NEEDED_TO_LOAD:
            raise ProtocolError(f"the other process pickled a {module}.{name}")
        return super().find_class(module, name)


def _send(stream: socket.socket, where: NDArray[np.int64], body: bytes | memoryview) -> None:
    """One message; returns when the owner has put it into place."""
    for frame in (where.tobytes(), body):
        stream.sendall(len(frame).to_bytes(HEADER_BYTES, "little"))
        stream.sendall(frame)
    if stream.recv(1) != TAKEN:
        raise PeerLostError("the other process closed the connection")


def _receive(stream: socket.socket) -> bytearray:
    """One frame. Its length is the driver's word: it proved that it belongs here."""
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
