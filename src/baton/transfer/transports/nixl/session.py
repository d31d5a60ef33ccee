"""One NIXL agent with its UCX backend, for one peer."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np

from baton.errors import TransferError
from baton.net.framing import decode
from baton.transfer.region import compute_region_bytes
from baton.transfer.transports.nixl.agent import HERE, Agent, Selection, map_errors
from baton.transfer.transports.nixl.lists import (
    MAX_LIST_ITEMS,
    PreparedLists,
    Spans,
    compute_items,
    compute_rows,
    compute_strided_rows,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from baton.ids import RegionHandle
    from baton.kv.copies import CopyGroup, PageCopies
    from baton.transfer.interface import PageArray, PagedRegion, RegionDescriptor
    from baton.transfer.onesided.session import Direction
    from baton.transfer.transports.nixl.agent import AgentName, Handle, Operation


class NixlOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `nixl` transport.

    `lanes`: how UCX may reach peers. `host`: memory of this host only, no listener. `network`:
    RDMA and TCP. UCX does not authenticate peers: a host that reaches its ports can write this
    process' memory, so `network` belongs on a network where all hosts are trusted.
    `device`: UCX's name of the network device to use (`mlx5_0:1`, `eth0`), for `network`; None
    means the interface that has the bind address, or `advertise_host` where that is none. For
    several set `UCX_NET_DEVICES`, which wins.
    `advertise_host`: the address that peers are sent, where the bound one is none (`0.0.0.0`).
    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    `max_connections`: of peers to this worker at once; what exceeds them is refused. Each has an
    agent here: 5 MiB for lanes `host`, 1 MiB for `network`, and six descriptors.
    """

    lanes: Literal["host", "network"] = "host"
    device: Annotated[str, msgspec.Meta(pattern=r"^[\w.:-]+$")] | None = None
    advertise_host: str | None = None
    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    max_connections: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1024


_Half: TypeAlias = "tuple[NDArray[np.int64], Spans]"

MAX_ADDRESS: Final = 1 << 57
MAX_AGENT_BYTES: Final = 1 << 15

_OPERATIONS: Final[Mapping[Direction, Operation]] = {"write": "WRITE", "read": "READ"}


class NixlMetadata(msgspec.Struct, frozen=True):
    """What the peer's agent must know: NIXL's words, and where the region begins in them."""

    agent: Annotated[bytes, msgspec.Meta(max_length=MAX_AGENT_BYTES)]
    base: int


_metadata = msgspec.msgpack.Decoder(NixlMetadata)


@dataclass(slots=True, eq=False)
class NixlHandle:
    """A posted transfer: one NIXL handle for each group that is still under way."""

    handles: list[Handle]


@dataclass(frozen=True, slots=True)
class _Target:
    """The peer's region in the agent's terms."""

    agent: AgentName
    base: int
    arrays: tuple[PageArray, ...]


@dataclass(frozen=True, slots=True)
class _Side:
    """What a group names on one side: `pages` of an array that lies at `base` in `agent`'s memory.

    `agent` is `HERE` or the peer's name; `key` identifies the array among all of this engine.
    """

    agent: AgentName
    key: tuple[RegionHandle | None, int]
    base: int
    array: PageArray
    pages: NDArray[np.int64]
    spans: Spans

    @property
    def num_items(self) -> int:
        """Descriptors that a prepared list would have."""
        return self.spans.count_items(self.array)

    def rows(self) -> NDArray[np.uint64]:
        """All that is named, spelt out."""
        return compute_rows(self.base, self.array, self.spans, self.pages)


class NixlSession:
    """See `OneSidedSession`."""

    needs_serving = True

    def __init__(self, parameters: Mapping[str, str], *, peer_process_writes: bool) -> None:
        self.peer_process_writes = peer_process_writes
        self._name = f"baton-{secrets.token_hex(8)}"
        self._agent: Agent | None = Agent(self._name, parameters)
        self._bases: dict[RegionHandle, int] = {}
        self._target: _Target | None = None
        self._lists = PreparedLists()
        self._handles: set[NixlHandle] = set()

    def prepare(self, region: PagedRegion) -> None:
        """See `OneSidedSession`."""

    def get_metadata(self, region: PagedRegion) -> bytes:
        """See `OneSidedSession`."""
        base = self._register(region)
        return msgspec.msgpack.encode(NixlMetadata(self._alive().describe(), base))

    def load_metadata(self, metadata: bytes, descriptor: RegionDescriptor) -> None:
        """See `OneSidedSession`. NIXL checks that the peer registered the memory of the arrays."""
        decoded = decode(_metadata, metadata)
        if not 0 < decoded.base <= MAX_ADDRESS - compute_region_bytes(descriptor.arrays):
            raise TransferError("the peer's region begins at no address")
        name = self._alive().load_metadata(decoded.agent)
        if name in {self._name, self._name.encode()}:
            raise TransferError("the peer took this agent's name")
        self._target = _Target(name, decoded.base, descriptor.arrays)

    def post(self, direction: Direction, region: PagedRegion, copies: PageCopies) -> NixlHandle:
        """See `OneSidedSession`. Where UCX needs no help (one host's memory) it copies here."""
        agent, target, base = self._alive(), self._target, self._register(region)
        if target is None:
            raise TransferError("this agent has not met its peer")
        handle = NixlHandle([])
        self._handles.add(handle)
        index = copies.layer
        for group in copies.groups:
            if group.num_bytes:
                ours, theirs = _split(direction, group)
                here = _Side(HERE, (region.handle, index), base, region.arrays[index], *ours)
                there = _Side(
                    target.agent, (None, index), target.base, target.arrays[index], *theirs
                )
                handle.handles.append(self._make(_OPERATIONS[direction], here, there))
                agent.start(handle.handles[-1])
        return handle

    def is_done(self, handle: NixlHandle) -> bool:
        """See `OneSidedSession`."""
        agent = self._alive()
        while handle.handles:
            if not agent.is_done(handle.handles[-1]):
                return False
            with map_errors():
                handle.handles.pop().release()
        self._handles.discard(handle)
        return True

    def serve(self) -> None:
        """See `OneSidedSession`."""
        self._alive().drive()

    def close(self) -> None:
        """See `OneSidedSession`. UCX' sockets, queue pairs and memory keys go with the agent."""
        if self._agent is None:
            return
        for handle in self._handles:
            while handle.handles:
                with suppress(TransferError), map_errors():  # a failed one may refuse
                    handle.handles.pop().release()
        self._handles.clear()
        self._lists.clear()
        self._agent = None

    def _alive(self) -> Agent:
        if self._agent is None:
            raise TransferError("this NIXL agent is closed")
        return self._agent

    def _register(self, region: PagedRegion) -> int:
        """The region's address; NIXL knows it from now on."""
        base = self._bases.get(region.handle)
        if base is None:
            base = int(np.frombuffer(region.memory, np.uint8).ctypes.data)
            self._alive().register(base, len(region.memory))
            self._bases[region.handle] = base
        return base

    def _make(self, operation: Operation, here: _Side, there: _Side) -> Handle:
        """A NIXL transfer, not posted yet."""
        agent = self._alive()
        if max(here.num_items, there.num_items) > MAX_LIST_ITEMS:
            return agent.spell_out(operation, here.rows(), there.rows(), there.agent)
        return agent.choose(operation, self._select(here), self._select(there))

    def _select(self, side: _Side) -> Selection:
        def prepare() -> Handle:
            rows = compute_strided_rows(side.base, side.array, side.spans)
            return self._alive().prepare(side.agent, rows)

        prepared = self._lists.find((*side.key, side.spans.key), side.num_items, prepare)
        items = compute_items(side.pages, side.array.num_pages, len(side.spans.starts))
        return Selection(prepared, items)


def _split(direction: Direction, group: CopyGroup) -> tuple[_Half, _Half]:
    """What a group names on this side, and at the peer: pages and spans of each."""
    lengths = group.spans[:, 2]
    source = (group.src_pages, Spans(group.spans[:, 0], lengths))
    target = (group.dst_pages, Spans(group.spans[:, 1], lengths))
    return (source, target) if direction == "write" else (target, source)
