"""KV views: how one worker shows its KV to peers.

An engine whose pages only its own kind can read (`KVLayout.order` "opaque") has a second view for
everybody else: pages in canonical order, in staging memory of its own. Two workers use the first
pair of views, in the dialer's order of preference, between which KV can be exchanged.

`StagingPool` gives staging pages to handoffs in the order of asking, as many as each needs at once.
A view without staging has none to give: an order's blocks are its pages.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    runtime_checkable,
)

import numpy as np

from baton.config.cluster_key import is_loopback
from baton.encodings.interface import RAW
from baton.errors import ConfigError, HandoffError
from baton.kv.copies import BlockTable, PagedSequence
from baton.kv.geometry import check_page_size, page_geometry
from baton.record import Record
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from baton.auth.credentials import Credentials
    from baton.auth.ticket import WorkerRef
    from baton.clock import Clock
    from baton.handoff.interface import HandoffEvent, StreamPosition
    from baton.handoff.messages import TransferOp
    from baton.handoff.options import WriteLease
    from baton.handoff.peer_transports import PeerTransportTable
    from baton.handoff.peers import Peer, PeerTable
    from baton.handoff.verify import VerificationPolicy
    from baton.ids import TicketId
    from baton.kv.device_digest import DigestKind
    from baton.kv.layout import KVLayout
    from baton.transfer.interface import DeviceAccess, PagedRegion, Transport
    from baton.transfer.peer_mappings import PeerMappings

STAGING_STAGE = "staging"
KEPT_FOR: Final = 128
"""Handoffs of one direction after which it may have the half of the other, which is not used."""

Side: TypeAlias = Literal["receive", "send"]
_OTHER: Final[dict[Side, Side]] = {"receive": "send", "send": "receive"}


class Holder(Record, frozen=True):
    """A handoff that holds staging pages, or waits for some."""

    side: Side
    ticket: TicketId


class _Request(NamedTuple):
    """What a handoff waits for; `at` numbers them in the order of asking, in both directions."""

    at: int
    num_pages: int


class StagingPool:
    """Who holds which pages of one staging memory, and who waits. Owner: the agent's thread.

    First come, first served, in each direction: small handoffs do not overtake a large one. While
    a worker sends and receives, each direction has a half of the pages that the other cannot take:
    else two such workers could each fill theirs with what they receive, and wait for what the other
    cannot send. A direction keeps its half until `KEPT_FOR` handoffs of the other were served
    without it: with a gap in what it sends, a worker would at once be full of what it receives.

    A handoff larger than a half is served while no other holds a page. Those of the other direction
    that asked later wait for it; sends, only once no pages are received to, since what is received
    comes from a peer that may wait for them.
    """

    def __init__(self, num_pages: int) -> None:
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._held: dict[Holder, NDArray[np.int64]] = {}
        self._waiting: dict[Side, OrderedDict[Holder, _Request]] = {
            side: OrderedDict() for side in _OTHER
        }
        self._kept_for = dict.fromkeys(_OTHER, 0)
        self._num_asked = 0
        self._served: list[Holder] = []

    @property
    def num_free(self) -> int:
        """Pages that no handoff holds."""
        return int(self._is_free.sum())

    @property
    def num_waiting(self) -> int:
        """Handoffs that wait their turn."""
        return sum(map(len, self._waiting.values()))

    def try_reserve(self, holder: Holder, num_pages: int) -> NDArray[np.int64] | None:
        """The pages of a handoff, int64 `[num_pages]`; None while it waits (`take_granted`).

        Asking again gives the same answer, not more pages.

        Raises:
            HandoffError: there will never be that many.
        """
        if num_pages > len(self._is_free):
            raise HandoffError(
                f"the handoff needs {num_pages} staging pages where there are {len(self._is_free)}",
                stage=STAGING_STAGE,
            )
        waiting = self._waiting[holder.side]
        if holder not in self._held and holder not in waiting:
            self._num_asked += 1
            waiting[holder] = _Request(self._num_asked, num_pages)
            self._serve()
            if holder in self._held:
                self._served.remove(holder)
        return self._held.get(holder)

    def release(self, holder: Holder) -> None:
        """A handoff is over: nothing can land in its pages, and none reads them. Idempotent."""
        self._waiting[holder.side].pop(holder, None)
        pages = self._held.pop(holder, None)
        if pages is not None:
            self._is_free[pages] = True
            self._kept_for[holder.side] = KEPT_FOR
        if holder in self._served:
            self._served.remove(holder)
        self._serve()

    def take_granted(self) -> list[Holder]:
        """Who waited and holds pages since the last call."""
        served, self._served = self._served, []
        return served

    def waits_for_received(self, num_pages: int) -> bool:
        """Whether a send of so many pages, asked for now, might wait for what is received.

        The peer that sends it may wait for this send's pages there: without end.
        """
        received = [len(pages) for holder, pages in self._held.items() if holder.side == "receive"]
        num_left = len(self._is_free) - sum(received)
        is_receiving = bool(received or self._waiting["receive"])
        return is_receiving and num_pages > min(num_left, len(self._is_free) // 2)

    def check_invariants(self) -> None:
        """Raise AssertionError where a page has two holders or is lost, or a wait is needless."""
        held = np.concatenate([np.empty(0, dtype=np.int64), *self._held.values()])
        if len(np.unique(held)) != len(held) or self._is_free[held].any():
            raise AssertionError("a staging page is held twice, or held and free")
        if len(held) + self.num_free != len(self._is_free):
            raise AssertionError("a staging page was lost")
        for side, waiting in self._waiting.items():
            if self._held.keys() & waiting.keys():
                raise AssertionError("a handoff holds pages and waits for some")
            first = self._first(side)
            if first is not None and first.num_pages <= self._num_for(side, first):
                raise AssertionError("the first in line waits though there is room")
        if self.num_waiting and not self._held:
            raise AssertionError("handoffs wait though no page is held")

    def _first(self, side: Side) -> _Request | None:
        return next(iter(self._waiting[side].values()), None)

    def _num_for(self, side: Side, first: _Request) -> int:
        """The most pages that the first in line of one direction can have now."""
        other, num_held = _OTHER[side], dict.fromkeys(_OTHER, 0)
        for holder, pages in self._held.items():
            num_held[holder.side] += len(pages)
        before, share = self._first(other), len(self._is_free) // 2
        is_other_used = before is not None or num_held[other] or self._kept_for[other]
        if not self._held or not is_other_used:
            return self.num_free
        is_behind = before is not None and before.num_pages > share and before.at < first.at
        if is_behind and (side == "receive" or not num_held["receive"]):
            return 0
        return min(self.num_free, share - num_held[side])

    def _serve(self) -> None:
        """Serve the first of each direction, and the next, while there is room for it."""
        is_served = True
        while is_served:
            firsts = [(first, side) for side in _OTHER if (first := self._first(side)) is not None]
            served = [side for first, side in sorted(firsts) if self._serve_first(side, first)]
            is_served = bool(served)

    def _serve_first(self, side: Side, first: _Request) -> bool:
        if first.num_pages > self._num_for(side, first):
            return False
        holder, _ = self._waiting[side].popitem(last=False)
        # The lowest free ones: adjacent pages are copied in one go.
        pages = np.flatnonzero(self._is_free)[: first.num_pages].astype(np.int64)
        self._is_free[pages] = False
        self._held[holder] = pages
        self._served.append(holder)
        self._kept_for[_OTHER[side]] = max(0, self._kept_for[_OTHER[side]] - 1)
        return True


def make_staging_pool(view: KVView) -> StagingPool | None:
    """All pages of the view's region, if it is staging memory."""
    if view.staging is None:
        return None
    return StagingPool(min(array.num_pages for array in view.region.arrays))


class Staging(Protocol):
    """Copies whole pages between an engine's own blocks and a view's region, converting them.

    Called on the agent's thread, while the engine may compute in other blocks. Both index arrays
    are int64 `[n]`: engine block `blocks[i]` corresponds to page `staged[i]` of the view's region.
    A view with staging has the engine's block size, and orders that use it start at a block's
    first token.

    What is returned is None where the pages are in place. Else the copy has only begun: its pages,
    on both sides, may not change until the position behind it is reached. Copies in one direction
    end in the order in which they were begun. Each begins, on the GPU, after `after`.
    """

    def gather(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        staged: NDArray[np.int64],
        after: StreamPosition | None = None,
        /,
    ) -> StreamPosition | None:
        """Engine's blocks → staged pages, of one layer of the view.

        Raises:
            TransferError: it cannot be begun.
        """
        ...

    def scatter(
        self,
        layer: int,
        staged: NDArray[np.int64],
        blocks: NDArray[np.int64],
        after: StreamPosition | None = None,
        /,
    ) -> StreamPosition | None:
        """Staged pages → engine's blocks, of one layer of the view.

        Raises:
            TransferError: it cannot be begun.
        """
        ...


@runtime_checkable
class ShowsTokens(Staging, Protocol):
    """A `Staging` over pages in this host's memory: the store's entries are copied past it."""

    def token_planes(self, layer: int, /) -> Sequence[NDArray[Any]]:
        """The engine's own blocks of one layer of the view: `[block, token, head, dim]` a plane.

        Views, in canonical order whatever order memory has.
        """
        ...


@dataclass(frozen=True, slots=True)
class KVView:
    """One KV view. Without `staging`, an order's blocks are pages of `region` themselves.

    With `peer_mappings` its engine exports blocks, and attends over imported ones (`reference`).
    A region in a device's memory is neither staged nor exported.
    """

    layout: KVLayout
    region: PagedRegion
    staging: Staging | None = None
    peer_mappings: PeerMappings | None = None

    @property
    def device_access(self) -> DeviceAccess | None:
        """How to digest pages that are in a device's memory; None where they are in the host's."""
        return None if self.region.device is None else self.region.device.access

    @property
    def digest(self) -> DigestKind:
        """How this view's pages are digested."""
        return "xxh3" if self.region.device is None else "sum128"


class MappedPages(Record, frozen=True):
    """Page `pages.blocks[i]` of the view's region stands for `blocks.blocks[i]` of the engine's.

    Without staging both are the same, and nothing is copied. Both tables have the same `first`.
    `layer_pages` are the view's (`RegisteredView`): none on a device.
    """

    view: KVView
    layer_pages: list[NDArray[np.uint8]]
    pages: BlockTable
    blocks: BlockTable

    @property
    def sequence(self) -> PagedSequence:
        """The handoff's KV as it lies in the view's region."""
        return PagedSequence(self.view.layout, self.pages)

    def gather(
        self, layers: range, start: int, stop: int, after: StreamPosition | None
    ) -> StreamPosition | None:
        """The engine's blocks of tokens `[start, stop)` of some layers → pages of the view.

        Returns where they are in place (None: already): behind the last copy; without staging,
        where the engine's GPU has computed them.
        """
        if self.view.staging is None:
            return after
        blocks, pages = self.blocks_of(start, stop).blocks, self.pages_of(start, stop).blocks
        copies = [self.view.staging.gather(layer, blocks, pages, after) for layer in layers]
        return copies[-1]

    def scatter(
        self, layers: range, start: int, stop: int, after: StreamPosition | None
    ) -> StreamPosition | None:
        """Pages of the view that hold tokens `[start, stop)` of some layers → the engine's.

        See `gather`. Without staging they are there: nothing was written to them before `after`.
        """
        if self.view.staging is None:
            return None
        blocks, pages = self.blocks_of(start, stop).blocks, self.pages_of(start, stop).blocks
        copies = [self.view.staging.scatter(layer, pages, blocks, after) for layer in layers]
        return copies[-1]

    def pages_of(self, start: int, stop: int) -> BlockTable:
        """The pages that hold tokens `[start, stop)`."""
        return self.pages.slice_tokens(start, stop, self.view.layout.block_size)

    def blocks_of(self, start: int, stop: int) -> BlockTable:
        """The engine's blocks that hold tokens `[start, stop)`."""
        return self.blocks.slice_tokens(start, stop, self.view.layout.block_size)


@dataclass(frozen=True, slots=True)
class RegisteredView:
    """A KV view as the agent works with it, with its staging pool if it has one.

    `layer_pages[layer]` are the region's pages, uint8 `[num_blocks, page_bytes]`, until `close`;
    none where they are in a device's memory.
    """

    view: KVView
    staging_pool: StagingPool | None
    layer_pages: list[NDArray[np.uint8]]

    @classmethod
    def open(cls, view: KVView) -> RegisteredView:
        """At first, no handoff holds a page of it.

        Raises:
            InvalidLayoutError: the region's pages have other sizes than the layout's.
            ConfigError: they are in a device's memory, and nothing digests them there.
        """
        region = view.region
        for layer, array in enumerate(region.arrays):
            check_page_size(array.page_bytes, page_geometry(view.layout, layer))
        if region.device is None:
            pages = [view_pages(region.memory, array) for array in region.arrays]
            return cls(view, make_staging_pool(view), pages)
        if region.device.access is None:
            raise ConfigError(
                "KV in a GPU's memory can be handed off only where its digests are computed there"
            )
        return cls(view, None, [])

    def close(self) -> None:
        """Look at the region's memory no more: it can be given back. Idempotent."""
        self.layer_pages.clear()

    @property
    def is_staged(self) -> bool:
        """Whether its pages are not the engine's own."""
        return self.staging_pool is not None

    @property
    def is_gathered(self) -> bool:
        """Whether pages are reported before they are in place: staged ones, and those of a GPU."""
        return self.staging_pool is not None or self.view.region.device is not None

    @property
    def page_tokens(self) -> int:
        """KV moves in multiples of that many tokens: whole pages, where only those make sense."""
        moves_whole_pages = self.is_staged or self.view.layout.order == "opaque"
        return self.view.layout.block_size if moves_whole_pages else 1

    def try_map_pages(self, holder: Holder, blocks: BlockTable) -> MappedPages | None:
        """Pages for all of these blocks of the engine's; None while none are free.

        Raises:
            HandoffError: there will never be so many.
        """
        if self.staging_pool is None:
            return MappedPages(self.view, self.layer_pages, blocks, blocks)
        pages = self.staging_pool.try_reserve(holder, len(blocks.blocks))
        if pages is None:
            return None
        staged = BlockTable(blocks.first, pages)
        return MappedPages(self.view, self.layer_pages, staged, blocks)

    def release(self, holder: Holder) -> None:
        """A handoff is over. Idempotent."""
        if self.staging_pool is not None:
            self.staging_pool.release(holder)

    def take_granted(self) -> list[Holder]:
        """Whose turn has come since the last call."""
        return [] if self.staging_pool is None else self.staging_pool.take_granted()


@dataclass(frozen=True)
class AgentContext:
    """The parts of one agent. `emit` queues an event for the engine.

    `op` is the operation that this worker prefers as a receiver. All views have as many layers.
    `lease_s` is how long this worker, as a sender, holds what was computed without a renewal;
    `write_lease`, how long it may write to others at all (None: without limit).
    """

    me: WorkerRef
    credentials: Credentials
    clock: Clock
    views: tuple[RegisteredView, ...]
    preferred_op: TransferOp
    peers: PeerTable
    peer_transports: PeerTransportTable
    transports: tuple[Transport, ...]
    timeout_s: float
    lease_s: float
    verification: VerificationPolicy
    emit: Callable[[HandoffEvent], None]
    write_lease: WriteLease | None

    @cached_property
    def num_layers(self) -> int:
        """Layers of the model's KV."""
        return self.views[0].view.layout.num_layers

    @cached_property
    def no_digest_transports(self) -> tuple[str, ...]:
        """Over which a peer's writes need no digests."""
        return self.verification.no_digest_transports(self.transports)

    def is_on_this_host(self, peer: Peer) -> bool:
        """Whether a dialed peer is on this host, by its address or by a transport that is up."""
        own, theirs = (
            ref.address.rpartition(":")[0] if ref is not None else ""
            for ref in (self.me, peer.dialed)
        )
        return is_loopback(theirs) or own == theirs or self.peer_transports.shares_host(peer)

    def view_to(self, peer: Peer, encoding: str = RAW) -> RegisteredView:
        """The KV view of this worker that a peer sees; the peer has sent its Hello.

        Raises:
            ProtocolError: the two have no views in common for that encoding.
        """
        return self.views[peer.views_for(encoding).ours]
