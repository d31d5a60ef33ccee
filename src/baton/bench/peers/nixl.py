"""NIXL as vLLM's connector drives it: all pages prepared once, indices for each request."""

from __future__ import annotations

import importlib
import secrets
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from baton.bench.contender import Traits
from baton.bench.pool import allocate_pool, view_bytes
from baton.bench.workload import place_pool
from baton.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from numpy.typing import NDArray

    from baton.bench.contender import CallWaiting, Surroundings
    from baton.bench.workload import Direction, Move
    from baton.transfer.interface import PageArray

PACKAGES: Final = ("nixl_cu12", "nixl_cu13")
HERE: Final = "NIXL_INIT_AGENT"
MEMORY: Final = "DRAM"
CHECKS_PER_LOOK: Final = 4096
TRANSFER_TIMEOUT_S: Final = 30.0
OPERATIONS: Final[Mapping[Direction, str]] = {"push": "WRITE", "pull": "READ"}


class Introduction(msgspec.Struct, frozen=True):
    """An agent's metadata, and where its pool begins."""

    agent: bytes
    base: int


class Nixl:
    """See `Contender`. No progress thread: with one, it is slower here (both share a core)."""

    def __init__(self, around: Surroundings, *, is_tcp: bool) -> None:
        api = _load()
        self._around = around
        self.traits = Traits(
            "UCX TCP" if is_tcp else "UCX",
            ("push", "pull"),
            "tuned socket" if is_tcp else "memcpy",
        )
        self.region = self.target = allocate_pool(("host",), around.num_pages)
        self._arrays = place_pool(around.num_pages)
        self._base = int(view_bytes(self.region).ctypes.data)
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = api.nixl_agent(f"bench-{secrets.token_hex(8)}", config)
        self._agent.create_backend("UCX", {"engine_config": "TLS=tcp"} if is_tcp else {})
        self._agent.register_memory([(self._base, len(self.region.memory), 0, "")], MEMORY)
        self._remote = ""
        self._remote_base = 0
        self._prepared: list[tuple[Any, Any]] = []

    def introduce(self) -> bytes:
        """See `Contender`."""
        return msgspec.msgpack.encode(Introduction(self._agent.get_agent_metadata(), self._base))

    def meet(self, introduction: bytes) -> None:
        """See `Contender`. The driver prepares every page of both pools."""
        told = msgspec.msgpack.decode(introduction, type=Introduction)
        self._remote, self._remote_base = self._agent.add_remote_agent(told.agent), told.base
        if self._around.role == "driver":
            self._agent.make_connection(self._remote)
            for array in self._arrays:
                ours = _describe(self._base, array)
                theirs = _describe(self._remote_base, array)
                self._prepared.append((
                    self._agent.prep_xfer_dlist(HERE, ours, MEMORY),
                    self._agent.prep_xfer_dlist(self._remote, theirs, MEMORY),
                ))

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Contender`. NIXL's planning is inside the call: each request has its pages."""
        operation = OPERATIONS[direction]
        if move.is_run:
            src, dst, num_bytes = move.ranges[0].tolist()
            ours, theirs = (src, dst) if direction == "push" else (dst, src)
            return lambda: self._move_run(operation, ours, theirs, num_bytes)
        src_pages, dst_pages = move.src_pages.astype(np.int32), move.dst_pages.astype(np.int32)
        ordered = (src_pages, dst_pages) if direction == "push" else (dst_pages, src_pages)
        return lambda: self._move_pages(operation, move.layer, ordered)

    def rest(self) -> None:
        """See `Contender`: the owner sees orders itself."""

    def serve(self, call: CallWaiting) -> None:
        """See `Contender`. Asking for notifications is what drives UCX without a thread."""
        while not call():
            self._agent.get_new_notifs()

    def close(self) -> None:
        """See `Contender`. The pool is NIXL's until the process ends."""

    def _move_run(self, operation: str, ours: int, theirs: int, num_bytes: int) -> None:
        agent = self._agent
        here = agent.get_xfer_descs([(self._base + ours, num_bytes, 0)], MEMORY)
        there = agent.get_xfer_descs([(self._remote_base + theirs, num_bytes, 0)], MEMORY)
        self._carry_out(agent.initialize_xfer(operation, here, there, self._remote))

    def _move_pages(
        self, operation: str, layer: int, pages: tuple[NDArray[np.int32], NDArray[np.int32]]
    ) -> None:
        here, there = self._prepared[layer]
        handle = self._agent.make_prepped_xfer(operation, here, pages[0], there, pages[1])
        self._carry_out(handle)

    def _carry_out(self, handle: Any) -> None:  # noqa: ANN401 - NIXL is untyped
        agent, clock = self._agent, self._around.clock
        deadline = clock.now() + TRANSFER_TIMEOUT_S
        state, num_checks = agent.transfer(handle), 0
        while state == "PROC":
            state = agent.check_xfer_state(handle)
            num_checks += 1
            if num_checks % CHECKS_PER_LOOK == 0 and clock.now() > deadline:
                raise TransferError(f"NIXL did not finish within {TRANSFER_TIMEOUT_S:g} s")
        if state != "DONE":
            raise TransferError(f"NIXL reports {state}")
        handle.release()


def _describe(base: int, array: PageArray) -> NDArray[np.uint64]:
    """All pages of an array, uint64 `[n, 3]`: address, length, device."""
    rows = np.zeros((array.num_pages, 3), np.uint64)
    rows[:, 0] = base + array.offset_bytes + np.arange(array.num_pages) * array.page_bytes
    rows[:, 1] = array.page_bytes
    return rows


def _load() -> ModuleType:
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError:
            continue
    raise ConfigError("not installed: pip install --no-deps nixl-cu12")
