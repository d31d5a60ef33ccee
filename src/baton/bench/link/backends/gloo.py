"""gloo, as `torch.distributed` drives it: send and receive of tensors, gathered and scattered."""

from __future__ import annotations

import importlib
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from baton.config.environment import change_environment
from baton.errors import ConfigError
from baton.rig.backend import Backend, BackendContext, StopRequested, Traits
from baton.rig.pages import Direction, Move, allocate_pool, view_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

DRIVER, OWNER = 0, 1
TIMEOUT: Final = timedelta(seconds=30)
PAGES_AT_ONCE: Final = 128
"""4 MiB of pages in a message: one layer of a request."""
STOP: Final = -1


class Gloo(Backend):
    """See `Backend`. A header of (first, count, page bytes) goes before each transfer."""

    def __init__(self, context: BackendContext) -> None:
        self._torch = _load_torch()
        self._torch.set_num_threads(1)
        self._dist: Any = None
        self._context = context
        self.traits = Traits("TCP", ("push",), "tuned socket")
        self.region = self.target = allocate_pool(("host",), context.num_pages)
        self._pool = self._torch.from_numpy(view_bytes(self.region))
        self._store = ""

    def local_metadata(self) -> bytes:
        """See `Backend`. A file is the rendezvous: torch's own store listens on every address."""
        if self._context.role == "driver":
            return b""
        self._store = str(Path(tempfile.mkdtemp(prefix="baton-bench-")) / "store")
        return self._store.encode()

    def connect(self, metadata: bytes) -> None:
        """See `Backend`. The owner joins when it serves: both have to join at the same time."""
        if self._context.role == "driver":
            self._store = metadata.decode()
            self._join(DRIVER)

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Backend`."""
        del direction
        if move.is_run:
            src, dst, num_bytes = move.ranges[0].tolist()
            return lambda: self._send_run(src, dst, num_bytes)
        return lambda: self._send_pages(move)

    def stop_serving(self) -> None:
        """See `Backend`. The owner waits inside gloo, so the request goes through gloo."""
        self._send(self._torch.tensor([STOP, 0, 0]), OWNER)

    def serve(self, stop: StopRequested) -> None:
        """See `Backend`."""
        del stop  # the driver sends STOP through gloo
        if self._dist is None:
            self._join(OWNER)
        header = self._torch.zeros(3, dtype=self._torch.int64)
        while True:
            self._receive(header, DRIVER)
            first, count, page_bytes = header.tolist()
            if first == STOP:
                return
            if page_bytes:
                self._receive_pages(first, count, page_bytes)
            else:
                self._receive(self._pool[first : first + count], DRIVER)
            self._send(self._torch.zeros(1, dtype=self._torch.uint8), DRIVER)

    def close(self) -> None:
        """See `Backend`."""
        if self._dist is not None:
            self._dist.destroy_process_group()
        if self._context.role == "owner" and self._store:
            store = Path(self._store)
            store.unlink(missing_ok=True)
            store.parent.rmdir()
        del self._pool
        super().close()

    def _join(self, rank: int) -> None:
        change_environment({"GLOO_SOCKET_IFNAME": "lo"})
        self._dist = importlib.import_module("torch.distributed")
        self._dist.init_process_group(
            "gloo",
            init_method=f"file://{self._store}",
            world_size=2,
            rank=rank,
            timeout=TIMEOUT,
        )

    def _send(self, tensor: Any, rank: int) -> None:  # noqa: ANN401 - torch is untyped for us
        self._dist.send(tensor, rank)

    def _receive(self, tensor: Any, rank: int) -> None:  # noqa: ANN401
        self._dist.recv(tensor, rank)

    def _wait_for_ack(self) -> None:
        self._receive(self._torch.zeros(1, dtype=self._torch.uint8), OWNER)

    def _send_run(self, src: int, dst: int, num_bytes: int) -> None:
        self._send(self._torch.tensor([dst, num_bytes, 0]), OWNER)
        self._send(self._pool[src : src + num_bytes], OWNER)
        self._wait_for_ack()

    def _send_pages(self, move: Move) -> None:
        array = move.array
        pages = self._pages(array.offset_bytes, array.page_bytes)
        src, dst = (self._torch.from_numpy(each) for each in (move.src_pages, move.dst_pages))
        self._send(self._torch.tensor([array.offset_bytes, len(dst), array.page_bytes]), OWNER)
        self._send(dst, OWNER)
        for first in range(0, len(src), PAGES_AT_ONCE):
            self._send(pages.index_select(0, src[first : first + PAGES_AT_ONCE]), OWNER)
        self._wait_for_ack()

    def _receive_pages(self, offset: int, count: int, page_bytes: int) -> None:
        pages = self._pages(offset, page_bytes)
        dst = self._torch.from_numpy(np.zeros(count, np.int64))
        self._receive(dst, DRIVER)
        for first in range(0, count, PAGES_AT_ONCE):
            some = dst[first : first + PAGES_AT_ONCE]
            packed = self._torch.empty(len(some), page_bytes, dtype=self._torch.uint8)
            self._receive(packed, DRIVER)
            pages.index_copy_(0, some, packed)

    def _pages(self, offset: int, page_bytes: int) -> Any:  # noqa: ANN401
        num_bytes = self._context.num_pages * page_bytes
        return self._pool[offset : offset + num_bytes].view(-1, page_bytes)


def _load_torch() -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ImportError as exc:
        raise ConfigError("torch is not installed: pip install torch") from exc
