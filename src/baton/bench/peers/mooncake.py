"""Mooncake's transfer engine over TCP. It listens on all interfaces: run it where there is one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from baton.bench.contender import Traits
from baton.bench.pool import allocate_pool, view_bytes
from baton.config.environment import change_environment
from baton.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.bench.contender import CallWaiting, Surroundings
    from baton.bench.workload import Direction, Move

SETTINGS: Final = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384"}
"""By default it refuses a batch of more than some thousand descriptors (-1)."""


class Introduction(msgspec.Struct, frozen=True):
    """An engine's address, and where its pool begins."""

    endpoint: str
    base: int


class Mooncake:
    """See `Contender`. Its own threads do the owner's part."""

    def __init__(self, around: Surroundings) -> None:
        self._host = around.host
        self.traits = Traits("TCP", ("push", "pull"), "tuned socket")
        self.region = self.target = allocate_pool(("host",), around.num_pages)
        self._base = int(view_bytes(self.region).ctypes.data)
        self._engine: Any = _load().TransferEngine()
        _check(self._engine.initialize(self._host, "P2PHANDSHAKE", "tcp", ""), "initialize")
        _check(self._engine.register_memory(self._base, len(self.region.memory)), "register")
        self._remote, self._remote_base = "", 0

    def introduce(self) -> bytes:
        """See `Contender`."""
        endpoint = f"{self._host}:{self._engine.get_rpc_port()}"
        return msgspec.msgpack.encode(Introduction(endpoint, self._base))

    def meet(self, introduction: bytes) -> None:
        """See `Contender`: it connects with the first transfer."""
        told = msgspec.msgpack.decode(introduction, type=Introduction)
        self._remote, self._remote_base = told.endpoint, told.base

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Contender`."""
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

    def rest(self) -> None:
        """See `Contender`."""

    def serve(self, call: CallWaiting) -> None:
        """See `Contender`: nothing to do in this thread."""

    def close(self) -> None:
        """See `Contender`. The pool is the engine's until the process ends."""


def _check(code: int, what: str) -> None:
    if code != 0:
        raise TransferError(f"Mooncake: {what} gave {code}")


def _load() -> Any:  # noqa: ANN401 - Mooncake is untyped
    change_environment(SETTINGS)  # it is read when the engine is made
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as exc:
        raise ConfigError("not installed: pip install mooncake-transfer-engine-non-cuda") from exc
    except ImportError as exc:
        raise ConfigError(f"it does not load: {exc} (Debian: libibverbs1, libnuma1)") from exc
