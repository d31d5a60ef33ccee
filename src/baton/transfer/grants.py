"""The receiver's grants: sets of pages, and who may write into them.

`AdmittedGrants`: the receiver itself stores what arrives (`tcp`, `file`, `local`), so a closed
grant is quiescent at once.

`GrantLedger` (pure): the peer does the writing (`shared`, one-sided transports). Then a closed
grant is quiescent only once every writer that was sent it has answered that it stopped, or is
proved unable to write: it has unmapped the memory, or its process is dead. A broken connection
proves nothing.

    open ── close_grant ──► closing (waits for every writer that was sent it) ──► quiescent
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NewType

import numpy as np

from baton.errors import ProtocolError, TransferError
from baton.transfer.interface import Arrived, GrantQuiescent
from baton.transfer.region import are_pages_inside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.auth.certificates import PeerIdentity
    from baton.ids import Epoch, RegionHandle, TicketId, WorkerId
    from baton.transfer.base_transport import Reactor
    from baton.transfer.interface import PageArray, PagedRegion, ReadGrant, WriteGrant

MAX_SMALL: Final = 64
"""Indices that are quicker to handle as a list than as an array."""
_MAX_SPARSENESS: Final = 8
"""A set whose extent is more times its size is searched: marking each page between would let a peer
take memory by naming two pages. Up to here the marks are no larger than the indices."""


class PageSet:
    """Page indices that are asked "are all of these in you?" once for each write.

    Consecutive writes of one handoff, layer by layer, ask with the very same array, which never
    changes: it is recognised.
    """

    def __init__(self, pages: NDArray[np.int64]) -> None:
        if len(pages) <= MAX_SMALL:  # np.unique costs ten times as much for a few
            self._sorted = np.array(sorted(set(pages.tolist())), np.int64)
        else:
            self._sorted = np.unique(pages)
        self._covered: NDArray[np.int64] | None = None
        self._first, self._last = _extent(self._sorted) if len(self._sorted) else (0, -1)
        self._is_interval = self._last - self._first + 1 == len(self._sorted)
        self._is_in = None if self._is_interval else _mark(self._sorted)

    def __len__(self) -> int:
        return len(self._sorted)

    def covers(self, pages: NDArray[np.int64]) -> bool:
        """Whether every one of `pages` (any order, repeats allowed) is in the set."""
        if pages is self._covered or len(pages) == 0:
            return True
        if self._find_all(pages):
            self._covered = pages
            return True
        return False

    def _find_all(self, pages: NDArray[np.int64]) -> bool:
        low, high = _extent(pages)
        if low < self._first or high > self._last:
            return False
        if self._is_interval:
            return True
        if self._is_in is not None:
            return bool(self._is_in[pages - self._first].all())
        found = np.minimum(np.searchsorted(self._sorted, pages), len(self._sorted) - 1)
        return bool((self._sorted[found] == pages).all())


def _mark(ascending: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    """For each page from the first one on, whether it is in the set; None if few of them are."""
    first, num_pages = int(ascending[0]), int(ascending[-1] - ascending[0]) + 1
    if num_pages > _MAX_SPARSENESS * len(ascending):
        return None
    marks = np.zeros(num_pages, np.bool_)
    marks[ascending - first] = True
    return marks


def _extent(pages: NDArray[np.int64]) -> tuple[int, int]:
    if len(pages) == 1:
        page: int = pages.item()
        return page, page
    if len(pages) <= MAX_SMALL:
        listed = pages.tolist()
        return min(listed), max(listed)
    return int(pages.min()), int(pages.max())


_num_pages = attrgetter("num_pages")


def check_grant_pages(pages: NDArray[np.int64], arrays: Sequence[PageArray]) -> None:
    """Refuse a grant that reaches outside one of its region's arrays.

    Raises:
        TransferError: a page is out of range in some array.
    """
    num_pages = min(map(_num_pages, arrays))
    if not are_pages_inside(pages, num_pages):
        raise TransferError(f"a grant's page is out of range: the region has {num_pages} pages")


@dataclass(frozen=True, slots=True)
class GrantHolder:
    """A peer that attached: the epoch that it gave, and who it proved to be.

    `identity` is None where peers prove nothing: they are in this process.
    """

    epoch: Epoch
    identity: PeerIdentity | None = None

    def holds(self, epoch: Epoch, name: WorkerId | None) -> bool:
        """Whether a grant for this incarnation of a worker of this name is its own."""
        if self.epoch != epoch:
            return False
        identity = self.identity
        if name is None or identity is None or identity.name is None:
            return True
        return identity.may_be(name)


@dataclass(slots=True)
class _Admitted:
    """`writer`: who wrote last; it attached to one region, and needs no second look."""

    grant: WriteGrant
    pages: PageSet
    writer: GrantHolder | None = None


class AdmittedGrants:
    """Open grants of a transport that itself stores what peers send. Owner thread: its own."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._open: dict[TicketId, _Admitted] = {}

    def open(self, grant: WriteGrant, region: PagedRegion) -> None:
        """Admit writes.

        Raises:
            TransferError: a page is out of range, or the id is open already.
        """
        if grant.id in self._open:
            raise TransferError("this grant is open already")
        check_grant_pages(grant.pages, region.arrays)
        self._open[grant.id] = _Admitted(grant, PageSet(grant.pages))

    def close(self, grant: TicketId) -> bool:
        """Admit no more, and report that the grant is quiescent; False if it was not open."""
        if self._open.pop(grant, None) is None:
            return False
        self._reactor.report(GrantQuiescent(grant))
        return True

    def finish(self, grant: TicketId) -> None:
        """Admit no more, and report nothing. See `Transport.finish_grant`."""
        self._open.pop(grant, None)

    def find_refusal(
        self, grant: TicketId, writer: GrantHolder, region: PagedRegion, pages: NDArray[np.int64]
    ) -> str | None:
        """Why this writer may not write these pages, or None: it may."""
        admitted = self._open.get(grant)
        if admitted is None:
            return "the grant is not open"
        if admitted.writer is not writer:
            known = admitted.grant
            is_its_own = writer.holds(known.writer, known.writer_name)
            if known.region != region.handle or not is_its_own:
                return "the grant is for another writer or region"
            admitted.writer = writer
        return None if admitted.pages.covers(pages) else "a page is outside the grant"

    def report_arrived(self, grant: TicketId, notification: bytes) -> None:
        """A whole write is in place."""
        self._reactor.report(Arrived(grant, notification))


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What a peer asks for: pages of one array, under a grant."""

    grant: TicketId | None
    array: int
    pages: NDArray[np.int64]


@dataclass(slots=True)
class _Readable:
    grant: ReadGrant
    pages: dict[int, list[PageSet]] = field(default_factory=dict)


class ReadGrants:
    """What peers may read, array by array. Owner thread: the transport's."""

    def __init__(self) -> None:
        self._open: dict[TicketId, _Readable] = {}
        self._last: tuple[NDArray[np.int64], PageSet] | None = None

    def admit(
        self, grant: ReadGrant, region: PagedRegion, arrays: range, pages: NDArray[np.int64]
    ) -> None:
        """Let its reader read these pages of some arrays, too.

        Raises:
            TransferError: no such array, or a page is out of range.
        """
        if not (arrays.start >= 0 and arrays.stop <= len(region.arrays)):
            raise TransferError(f"the region lacks some of arrays {arrays.start} to {arrays[-1]}")
        readable = self._open.get(grant.id)
        if readable is None:
            readable = self._open[grant.id] = _Readable(grant)
        # Layers follow each other with the same pages: their set is made once.
        last = self._last
        if last is None or not np.array_equal(last[0], pages):
            check_grant_pages(pages, region.arrays)
            last = self._last = pages, PageSet(pages)
        page_set = last[1]
        for array in arrays:
            known = readable.pages.setdefault(array, [])
            if page_set not in known and not any(each.covers(pages) for each in known):
                known.append(page_set)

    def close(self, grant: TicketId) -> bool:
        """Whether it was open."""
        return self._open.pop(grant, None) is not None

    def find_refusal(
        self, asked: ReadRequest, reader: GrantHolder, region: RegionHandle
    ) -> str | None:
        """Why this reader may not read these pages of a region, or None: it may."""
        readable = None if asked.grant is None else self._open.get(asked.grant)
        if readable is None:
            return "no grant for it is open"
        admitted = readable.grant
        if admitted.region != region or not reader.holds(admitted.reader, admitted.reader_name):
            return "the grant is for another reader or region"
        page_sets = readable.pages.get(asked.array, [])
        if any(page_set.covers(asked.pages) for page_set in page_sets):
            return None
        return "a page is outside the grant"


WriterId = NewType("WriterId", int)
"""The receiver's name for one mapping of one region by one peer."""


@dataclass(slots=True)
class _Writer:
    holder: GrantHolder
    region: RegionHandle
    notified: set[TicketId] = field(default_factory=set)
    is_connected: bool = True


class GrantLedger:
    """Grants and the writers that were sent them. Owner thread: the transport's."""

    def __init__(self) -> None:
        self._open: dict[TicketId, WriteGrant] = {}
        self._closing: set[TicketId] = set()
        self._quiescent: list[TicketId] = []
        self._writers: dict[WriterId, _Writer] = {}

    def add_writer(
        self, writer: WriterId, holder: GrantHolder, region: RegionHandle
    ) -> list[WriteGrant]:
        """A writer gets the memory; the open grants that must be sent to it.

        A grant that was closed before is not among them, so nothing can land in it.
        """
        added = self._writers[writer] = _Writer(holder, region)
        grants = [grant for grant in self._open.values() if _concerns(grant, added)]
        added.notified.update(grant.id for grant in grants)
        return grants

    def open_grant(self, grant: WriteGrant) -> list[WriterId]:
        """Admit writes; the connected writers that must be notified.

        Raises:
            TransferError: the id is open, or closed and not quiescent yet.
        """
        if grant.id in self._open or grant.id in self._closing:
            raise TransferError("this grant is open already")
        self._open[grant.id] = grant
        writers: list[WriterId] = []
        for writer, state in self._writers.items():
            if state.is_connected and _concerns(grant, state):
                state.notified.add(grant.id)
                writers.append(writer)
        return writers

    def close_grant(self, grant: TicketId) -> list[WriterId]:
        """Admit no more; the connected writers that must be asked to stop. Unknown: none."""
        if self._open.pop(grant, None) is None:
            return []
        self._closing.add(grant)
        self._settle(grant)
        return [
            writer
            for writer, state in self._writers.items()
            if state.is_connected and grant in state.notified
        ]

    def finish_grant(self, grant: TicketId) -> bool:
        """Forget a grant whose writer has reported its last write; False where it must be asked.

        Of a writer whose connection is gone it is not known what else it does.
        """
        notified: list[_Writer] = []
        for state in self._writers.values():
            if grant in state.notified:
                if not state.is_connected:
                    return False
                notified.append(state)
        for state in notified:
            state.notified.discard(grant)
        self._open.pop(grant, None)
        return True

    def admits(self, writer: WriterId, grant: TicketId) -> bool:
        """Whether a notification from this writer for this grant counts."""
        return self.find_open(writer, grant) is not None

    def find_open(self, writer: WriterId, grant: TicketId) -> WriteGrant | None:
        """A grant that is open, and this writer's."""
        state = self._writers.get(writer)
        if state is None or grant not in state.notified:
            return None
        return self._open.get(grant)

    def confirm_closed(self, writer: WriterId, grant: TicketId) -> None:
        """The writer reports that it stopped.

        Raises:
            ProtocolError: it was not asked to.
        """
        state = self._writers[writer]
        if grant not in self._closing or grant not in state.notified:
            raise ProtocolError("a writer closed a grant that it was not asked to close")
        state.notified.discard(grant)
        self._settle(grant)

    def disconnect(self, writer: WriterId) -> bool:
        """Its connection is gone, its mapping perhaps not; whether its death matters still."""
        state = self._writers.get(writer)
        if state is None:
            return False
        state.is_connected = False
        if not state.notified:
            del self._writers[writer]
        return bool(state.notified)

    def release(self, writer: WriterId) -> None:
        """It is proved that this writer can store nothing any more. Unknown ids are ignored."""
        state = self._writers.pop(writer, None)
        if state is not None:
            for grant in state.notified & self._closing:
                self._settle(grant)

    def take_quiescent(self) -> list[TicketId]:
        """Grants that became quiescent since the last call, each once."""
        grants, self._quiescent = self._quiescent, []
        return grants

    def check_invariants(self) -> None:
        """Raise AssertionError if the book contradicts itself."""
        notified = {grant for state in self._writers.values() for grant in state.notified}
        if self._open.keys() & self._closing:
            raise AssertionError("a grant is open and closing")
        if self._closing - notified:
            raise AssertionError("a closing grant waits for no writer")
        if notified - self._closing - self._open.keys():
            raise AssertionError("a writer was sent a grant that does not exist")
        if any(not (state.notified or state.is_connected) for state in self._writers.values()):
            raise AssertionError("a writer that can do nothing is remembered")

    def _settle(self, grant: TicketId) -> None:
        if not any(grant in state.notified for state in self._writers.values()):
            self._closing.discard(grant)
            self._quiescent.append(grant)


def _concerns(grant: WriteGrant, writer: _Writer) -> bool:
    is_its_own = writer.holder.holds(grant.writer, grant.writer_name)
    return is_its_own and grant.region == writer.region
