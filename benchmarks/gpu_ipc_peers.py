"""What `gpu_ipc.py` compares: Baton's `cuda_ipc`, and NIXL over UCX, each as owner and as driver.

An owner describes its pool, and is served by its process all the time. A driver starts transfers
between its own pool and the owner's. Without a GPU both use memory of this host.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np
import torch

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.errors import TransferError
from baton.ids import Epoch, new_epoch, new_region_handle, new_ticket_id
from baton.kv.copies import CopyGroup, PageCopies
from baton.transfer.interface import (
    TRANSPORTS,
    Arrived,
    DeviceMemory,
    PagedRegion,
    PageRead,
    PageWrite,
    ReadCompleted,
    RegionDescriptor,
    RemoteAttached,
    TransportContext,
    WriteCompleted,
    WriteGrant,
    as_reader,
)
from baton.transfer.region import compute_region_bytes, place_arrays
from baton.transfer.transports.nixl.agent import load_nixl

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import host_device

if TYPE_CHECKING:
    from baton.transfer.interface import Transport

PAGE_BYTES = 32 << 10
SPANS = np.array([[0, 0, PAGE_BYTES]])
NOTIFICATION = b"n"
WAIT_S = 10.0
NIXL_PARAMETERS = {
    "nixl": {},
    "nixl_without_error_handling": {"ucx_error_handling_mode": "none"},
}
"""The second as Baton's transport sets it for one host."""
BATON_OPTIONS = {
    "cuda_ipc": {},
    "cuda_ipc_32_multiprocessors": {"multiprocessors": 32},
    "cuda_ipc_copy_engines": {"multiprocessors": 0},
}

Direction = Literal["write", "read"]
IsDone = Callable[[], bool]


@dataclass(frozen=True)
class Pool:
    """Pages of one process: `region` as Baton knows them, `pages` as torch does."""

    region: PagedRegion
    pages: torch.Tensor

    @classmethod
    def make(cls, device: torch.device, num_pages: int) -> Pool:
        """Zeroed, in one piece."""
        shapes = [(num_pages, PAGE_BYTES)]
        if device.type == "cpu":
            region = replace(host_device.allocate_region(shapes), is_public=True)
            flat = torch.frombuffer(region.memory, dtype=torch.uint8)
        else:
            arrays = place_arrays(shapes)
            flat = torch.zeros(compute_region_bytes(arrays), dtype=torch.uint8, device=device)
            memory = DeviceMemory(device.index, flat.data_ptr(), (flat,))
            region = PagedRegion(
                new_region_handle(), "cuda", memoryview(b""), arrays, is_public=True, device=memory
            )
        return cls(region, flat[: num_pages * PAGE_BYTES].view(num_pages, PAGE_BYTES))

    def fill(self, seed: int) -> None:
        """Random bytes; all of them are in place when it returns."""
        generator = torch.Generator(self.pages.device).manual_seed(seed)
        self.pages.random_(0, 256, generator=generator)
        if self.pages.is_cuda:
            torch.cuda.synchronize()


class Move(msgspec.Struct, frozen=True):
    """Pages of the driver and of the owner, int64, in pairs."""

    ours: np.ndarray
    theirs: np.ndarray


class Welcome(msgspec.Struct, frozen=True):
    """What a driver tells an owner first."""

    key_hex: str
    writer: Epoch
    grant: bytes

    @classmethod
    def make(cls) -> Welcome:
        """Of a driver that begins."""
        return cls(ClusterKey.generate().secret.hex(), new_epoch(), new_ticket_id())


class Owner(Protocol):
    """The side whose pages are written and read."""

    def describe(self) -> bytes:
        """What a driver needs."""
        ...

    def serve(self) -> int:
        """Do what is to be done now; how many notifications came."""
        ...


class BatonSide:
    """A transport with one exposed region."""

    def __init__(self, pool: Pool, name: str, key_hex: str, epoch: Epoch) -> None:
        is_gpu = pool.pages.is_cuda
        build = TRANSPORTS.build if is_gpu else host_device.build_transport
        credentials = Credentials.of(ClusterKey.from_hex(key_hex))
        context = TransportContext(credentials, epoch, "127.0.0.1", MachineClock())
        self._region = pool.region
        self._transport: Transport = build("cuda_ipc", BATON_OPTIONS[name] if is_gpu else {})(
            context
        )
        self._descriptor = self._transport.expose(pool.region)


class BatonOwner(BatonSide):
    """See `Owner`."""

    def __init__(self, pool: Pool, name: str, welcome: Welcome) -> None:
        super().__init__(pool, name, welcome.key_hex, new_epoch())
        pages = np.arange(len(pool.pages))
        grant = WriteGrant(welcome.grant, pool.region.handle, welcome.writer, pages)
        self._transport.open_grant(grant)

    def describe(self) -> bytes:
        """See `Owner`."""
        return msgspec.json.encode(self._descriptor)

    def serve(self) -> int:
        """See `Owner`."""
        return sum(isinstance(event, Arrived) for event in self._transport.poll())


class BatonDriver(BatonSide):
    """Starts writes and reads."""

    def __init__(self, pool: Pool, name: str, welcome: Welcome, described: bytes) -> None:
        super().__init__(pool, name, welcome.key_hex, welcome.writer)
        self._grant = welcome.grant
        owner = msgspec.json.decode(described, type=RegionDescriptor)
        self._remote = self._transport.attach(owner)
        wait_until(lambda: self._has_happened(RemoteAttached))

    def start(self, move: Move, direction: Direction) -> IsDone:
        """As an agent does: one request of whole pages."""
        ends = (move.ours, move.theirs) if direction == "write" else (move.theirs, move.ours)
        copies = PageCopies(0, (CopyGroup(*ends, SPANS),))
        handle = self._region.handle
        if direction == "write":
            write = PageWrite(self._remote, self._grant, handle, copies, NOTIFICATION)
            self._transport.submit(write)
            return lambda: self._has_happened(WriteCompleted)
        as_reader(self._transport).read(PageRead(self._remote, handle, copies))
        return lambda: self._has_happened(ReadCompleted)

    def _has_happened(self, kind: type) -> bool:
        events = self._transport.poll()
        for event in events:
            if not isinstance(event, kind):
                raise TransferError(f"unexpected: {event}")
        return bool(events)


class NixlMetadata(msgspec.Struct, frozen=True):
    """An agent's metadata, and where its pool begins."""

    agent: bytes
    address: int
    num_pages: int


class NixlSide:
    """An agent that knows one pool. It has no progress thread: its process polls all the time."""

    def __init__(self, pool: Pool, name: str) -> None:
        nixl = load_nixl()
        is_gpu = pool.pages.is_cuda
        self._kind, self._device = ("VRAM", pool.pages.device.index) if is_gpu else ("DRAM", 0)
        self._address, self._num_pages = pool.pages.data_ptr(), len(pool.pages)
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = nixl.nixl_agent(f"bench-{secrets.token_hex(8)}", config)
        self._agent.create_backend("UCX", dict(NIXL_PARAMETERS[name]))
        whole = (self._address, self._num_pages * PAGE_BYTES, self._device, "")
        self._agent.register_memory([whole], self._kind)

    def describe(self) -> bytes:
        """See `Owner`."""
        metadata = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(NixlMetadata(metadata, self._address, self._num_pages))


class NixlOwner(NixlSide):
    """See `Owner`."""

    def serve(self) -> int:
        """See `Owner`."""
        return sum(map(len, self._agent.get_new_notifs().values()))


class NixlDriver(NixlSide):
    """Prepares all pages of both pools once; a request names them by index, as vLLM's does."""

    def __init__(self, pool: Pool, name: str, described: bytes) -> None:
        super().__init__(pool, name)
        owner = msgspec.msgpack.decode(described, type=NixlMetadata)
        remote = self._agent.add_remote_agent(owner.agent)
        self._ours = self._prepare("NIXL_INIT_AGENT", self._address, self._num_pages)
        self._theirs = self._prepare(remote, owner.address, owner.num_pages)

    def start(self, move: Move, direction: Direction) -> IsDone:
        """See `BatonDriver`."""
        agent, notification = self._agent, NOTIFICATION if direction == "write" else b""
        ours, theirs = (each.astype(np.int32) for each in (move.ours, move.theirs))
        handle = agent.make_prepped_xfer(
            direction.upper(), self._ours, ours, self._theirs, theirs, notification
        )
        state = agent.transfer(handle)

        def is_done() -> bool:
            nonlocal state
            if state == "PROC":
                state = agent.check_xfer_state(handle)
            if state == "PROC":
                return False
            if state != "DONE":
                raise TransferError(f"NIXL reports {state}")
            handle.release()
            return True

        return is_done

    def _prepare(self, agent: str | bytes, address: int, num_pages: int) -> object:
        rows = np.zeros((num_pages, 3), np.uint64)
        rows[:, 0] = address + np.arange(num_pages) * PAGE_BYTES
        rows[:, 1], rows[:, 2] = PAGE_BYTES, self._device
        return self._agent.prep_xfer_dlist(agent, rows, self._kind)


def open_owner(name: str, pool: Pool, welcome: Welcome) -> Owner:
    """In the owner's process."""
    return BatonOwner(pool, name, welcome) if name in BATON_OPTIONS else NixlOwner(pool, name)


def open_driver(
    name: str, pool: Pool, welcome: Welcome, described: bytes
) -> BatonDriver | NixlDriver:
    """In the driver's process."""
    if name in BATON_OPTIONS:
        return BatonDriver(pool, name, welcome, described)
    return NixlDriver(pool, name, described)


def wait_until(is_done: IsDone) -> None:
    """Poll all the time.

    Raises:
        TransferError: it does not happen.
    """
    deadline = time.perf_counter() + WAIT_S
    while not is_done():
        if time.perf_counter() > deadline:
            raise TransferError(f"nothing happened for {WAIT_S:g} s")
