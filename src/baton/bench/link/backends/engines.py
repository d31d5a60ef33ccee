"""Transfer engines of other projects: Mooncake over TCP, and NIXL as vLLM's connector drives it.

Mooncake listens on all interfaces, so it runs in a network namespace. For NIXL all pages are
prepared once, and each request has indices; or each request itself is prepared, and posted again
and again. Pools are private memory in huge pages, where the kernel gives them: NIXL's copies
(CMA) pin pages.
"""

from __future__ import annotations

import importlib
import math
import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from baton.config.environment import change_environment
from baton.errors import ConfigError, TransferError
from baton.rig.backend import Backend, BackendContext, LimitName, StopRequested, Traits
from baton.rig.pages import Direction, Move, allocate_pool, layout_pool, view_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from numpy.typing import NDArray

    from baton.transfer.interface import PageArray

SETTINGS: Final = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384"}
"""By default it refuses a batch of more than some thousand descriptors (-1)."""


class MooncakeMetadata(msgspec.Struct, frozen=True):
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
        self._engine: Any = _load_mooncake().TransferEngine()
        _check(self._engine.initialize(self._host, "P2PHANDSHAKE", "tcp", ""), "initialize")
        _check(self._engine.register_memory(self._base, len(self.region.memory)), "register")
        self._remote, self._remote_base = "", 0

    def local_metadata(self) -> bytes:
        """See `Backend`."""
        endpoint = f"{self._host}:{self._engine.get_rpc_port()}"
        return msgspec.msgpack.encode(MooncakeMetadata(endpoint, self._base))

    def connect(self, metadata: bytes) -> None:
        """See `Backend`: the first transfer opens the connection."""
        remote = msgspec.msgpack.decode(metadata, type=MooncakeMetadata)
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


def _load_mooncake() -> Any:  # noqa: ANN401 - Mooncake is untyped
    change_environment(SETTINGS)  # read when the engine is built
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as exc:
        raise ConfigError("not installed: pip install mooncake-transfer-engine-non-cuda") from exc
    except ImportError as exc:
        raise ConfigError(f"it does not load: {exc} (Debian: libibverbs1, libnuma1)") from exc


PACKAGES: Final = ("nixl_cu12", "nixl_cu13")
HERE: Final = "NIXL_INIT_AGENT"
MEMORY: Final = "DRAM"
CHECKS_PER_CLOCK_READ: Final = 4096
TRANSFER_TIMEOUT_S: Final = 30.0
OPERATIONS: Final[Mapping[Direction, str]] = {"push": "WRITE", "pull": "READ"}


class NixlMetadata(msgspec.Struct, frozen=True):
    """An agent's metadata, and where its pool begins."""

    agent: bytes
    base: int


@dataclass(frozen=True, slots=True)
class NixlVariant:
    """How NIXL is set up. `is_reused`: a transfer is prepared once, and posted again each time."""

    used: str = "UCX"
    limit: LimitName = "memcpy"
    parameters: Mapping[str, str] = field(default_factory=dict)
    is_reused: bool = False


NO_ERRORS: Final = {"ucx_error_handling_mode": "none"}
"""With the default, `peer`, UCX excludes shared memory."""


class Nixl(Backend):
    """See `Backend`. No progress thread: with one, it is slower here (both share a core)."""

    def __init__(self, variant: NixlVariant, context: BackendContext) -> None:
        api = _load_nixl()
        self._context, self._is_reused = context, variant.is_reused
        self.traits = Traits(variant.used, ("push", "pull"), variant.limit)
        self.region = self.target = allocate_pool(("host",), context.num_pages)
        self._arrays = layout_pool(context.num_pages)
        self._base = int(view_bytes(self.region).ctypes.data)
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = api.nixl_agent(f"bench-{secrets.token_hex(8)}", config)
        self._agent.create_backend("UCX", dict(variant.parameters))
        self._agent.register_memory([(self._base, len(self.region.memory), 0, "")], MEMORY)
        self._remote = ""
        self._remote_base = 0
        self._prepared: list[tuple[Any, Any]] = []

    def local_metadata(self) -> bytes:
        """See `Backend`."""
        return msgspec.msgpack.encode(NixlMetadata(self._agent.get_agent_metadata(), self._base))

    def connect(self, metadata: bytes) -> None:
        """See `Backend`. The driver prepares every page of both pools."""
        remote = msgspec.msgpack.decode(metadata, type=NixlMetadata)
        self._remote, self._remote_base = self._agent.add_remote_agent(remote.agent), remote.base
        if self._context.role == "driver":
            self._agent.make_connection(self._remote)
            for array in self._arrays:
                ours = _describe_pages(self._base, array)
                theirs = _describe_pages(self._remote_base, array)
                self._prepared.append((
                    self._agent.prep_xfer_dlist(HERE, ours, MEMORY),
                    self._agent.prep_xfer_dlist(self._remote, theirs, MEMORY),
                ))

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Backend`. NIXL plans inside the call, unless the request is reused."""
        plan = self._plan_run(move, direction) if move.is_run else self._plan(move, direction)
        if self._is_reused:
            handle = plan()
            return lambda: self._complete(handle)

        def transfer() -> None:
            handle = plan()
            self._complete(handle)
            handle.release()

        return transfer

    def serve(self, stop: StopRequested) -> None:
        """See `Backend`. Without a thread, polling for notifications drives UCX."""
        while not stop():
            self._agent.get_new_notifs()

    def close(self) -> None:
        """See `Backend`. The engine uses the pool until the process ends."""

    def _plan_run(self, move: Move, direction: Direction) -> Callable[[], Any]:
        agent, operation = self._agent, OPERATIONS[direction]
        src, dst, num_bytes = move.ranges[0].tolist()
        ours, theirs = (src, dst) if direction == "push" else (dst, src)

        def plan() -> Any:  # noqa: ANN401 - NIXL is untyped
            here = agent.get_xfer_descs([(self._base + ours, num_bytes, 0)], MEMORY)
            there = agent.get_xfer_descs([(self._remote_base + theirs, num_bytes, 0)], MEMORY)
            return agent.initialize_xfer(operation, here, there, self._remote)

        return plan

    def _plan(self, move: Move, direction: Direction) -> Callable[[], Any]:
        src_pages, dst_pages = move.src_pages.astype(np.int32), move.dst_pages.astype(np.int32)
        ours, theirs = (src_pages, dst_pages) if direction == "push" else (dst_pages, src_pages)
        here, there = self._prepared[move.layer]
        operation, make = OPERATIONS[direction], self._agent.make_prepped_xfer
        return lambda: make(operation, here, ours, there, theirs)

    def _complete(self, handle: Any) -> None:  # noqa: ANN401 - NIXL is untyped
        agent, clock = self._agent, self._context.clock
        state, num_checks, deadline = agent.transfer(handle), 0, math.inf
        while state == "PROC":
            state = agent.check_xfer_state(handle)
            num_checks += 1
            if num_checks % CHECKS_PER_CLOCK_READ == 0:
                deadline = min(deadline, clock.now() + TRANSFER_TIMEOUT_S)
                if clock.now() > deadline:
                    raise TransferError(f"NIXL did not finish within {TRANSFER_TIMEOUT_S:g} s")
        if state != "DONE":
            raise TransferError(f"NIXL reports {state}")


nixl = partial(Nixl, NixlVariant())
nixl_shm = partial(Nixl, NixlVariant(parameters=NO_ERRORS))
nixl_reused = partial(Nixl, NixlVariant(parameters=NO_ERRORS, is_reused=True))
nixl_over_tcp = partial(Nixl, NixlVariant("UCX TCP", "tuned socket", {"engine_config": "TLS=tcp"}))


def _describe_pages(base: int, array: PageArray) -> NDArray[np.uint64]:
    """All pages of an array, uint64 `[n, 3]`: address, length, device."""
    rows = np.zeros((array.num_pages, 3), np.uint64)
    rows[:, 0] = base + array.offset_bytes + np.arange(array.num_pages) * array.page_bytes
    rows[:, 1] = array.page_bytes
    return rows


def _load_nixl() -> ModuleType:
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError:
            continue
    raise ConfigError("not installed: pip install --no-deps nixl-cu12")
