"""Mooncake's transfer engine over TCP, in a network namespace: it listens on all interfaces."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from baton.config.environment import change_environment
from baton.errors import ConfigError, TransferError
from baton.rig.backend import Backend, Traits
from baton.rig.pages import allocate_pool, view_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.rig.backend import BackendContext
    from baton.rig.pages import Direction, Move

SETTINGS: Final = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384"}
"""By default it refuses a batch of more than some thousand descriptors (-1)."""


class Metadata(msgspec.Struct, frozen=True):
    """An engine's address, and where its pool begins."""

    endpoint: str
    base: int


class Mooncake(Backend):
    """See `Backend`. Its own threads serve the owner's side."""

    def __init__(self, context: BackendContext) -> None:
        self._host = context.host
        self.traits = Traits("TCP", ("push", "pull"), "tuned socket")
        self.region = self.target = allocate_pool(("host",), context.num_pages)
        self._base = int(view_bytes(self.region).ctypes.data)
        self._engine: Any = _load().TransferEngine()
        _check(self._engine.initialize(self._host, "P2PHANDSHAKE", "tcp", ""), "initialize")
        _check(self._engine.register_memory(self._base, len(self.region.memory)), "register")
        self._remote, self._remote_base = "", 0

    def local_metadata(self) -> bytes:
        """See `Backend`."""
        endpoint = f"{self._host}:{self._engine.get_rpc_port()}"
        return msgspec.msgpack.encode(Metadata(endpoint, self._base))

    def connect(self, metadata: bytes) -> None:
        """See `Backend`: the first transfer opens the connection."""
        remote = msgspec.msgpack.decode(metadata, type=Metadata)
        self._remote, self._remote_base = remote.endpoint, remote.base

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Backend`."""
        engine, remote, ranges = self._engine, self._remote, move.ranges
        ours, theirs = (0, 1) if direction == "push" else (1, 0)
        here = (self._base + ranges[:, ours]).tolist()
        there = (self._remote_base + ranges[:, theirs]).tolist()
        lengths = ranges[:, 2].tolist()
        if move.is_run:
            run = engine.transfer_sync_write if direction == "push" else engine.transfer_sync_read
            return lambda: _check(run(remote, here[0], there[0], lengths[0]), direction)
        batch = (
            engine.batch_transfer_sync_write
            if direction == "push"
            else engine.batch_transfer_sync_read
        )
        return lambda: _check(batch(remote, here, there, lengths), direction)

    def close(self) -> None:
        """See `Backend`. The engine uses the pool until the process ends."""


def _check(code: int, what: str) -> None:
    if code != 0:
        raise TransferError(f"Mooncake: {what} gave {code}")


def _load() -> Any:  # noqa: ANN401 - Mooncake is untyped
    change_environment(SETTINGS)  # read when the engine is built
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as exc:
        raise ConfigError("not installed: pip install mooncake-transfer-engine-non-cuda") from exc
    except ImportError as exc:
        raise ConfigError(f"it does not load: {exc} (Debian: libibverbs1, libnuma1)") from exc
