"""What is seen of a peer's pages in place, where a transport shows them (`Capabilities.views`).

The side that attaches is the pair's `writer`: here it looks. The pair's `reader` owns the pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from baton.errors import PeerLostError, TransferError
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, TransportKit, check_write
from baton.testing.transport_pair import TransportPair, whole_pages
from baton.transfer.interface import GrantQuiescent, RemoteId, RemoteLost

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

ALL_PAGES = [whole_pages(range(NUM_PAGES), range(NUM_PAGES), PAGE_BYTES)]


class ViewContract(TransportKit):
    """Views, of transports that have them; others refuse."""

    @pytest.fixture
    def viewing(self) -> Generator[TransportPair]:
        """Two regions alike, full of different bytes; skipped where there are no views."""
        pair = TransportPair.of(self.make_side(), self.make_side())
        try:
            if not pair.writer.transport.capabilities.views:
                pytest.skip("this transport does not show pages in place")
            pair.writer.fill(seed=1)
            pair.reader.fill(seed=2)
            yield pair
        finally:
            pair.close()

    def test_a_transport_that_has_no_views_says_so(self, pair: TransportPair) -> None:
        if pair.writer.transport.capabilities.views:
            pytest.skip("this transport shows pages in place")
        with pytest.raises(TransferError, match="does not show"):
            pair.writer.transport.view(pair.attach(), 0)

    @pytest.mark.parametrize("array", [0, 1])
    def test_a_view_shows_the_owners_pages(self, viewing: TransportPair, array: int) -> None:
        seen = viewing.writer.transport.view(viewing.attach(), array)
        assert (seen.dtype, seen.shape) == (np.dtype("u1"), viewing.reader.pages(array).shape)
        assert (seen == viewing.reader.pages(array)).all()

    def test_a_view_is_no_copy_and_the_owner_gets_no_event(self, viewing: TransportPair) -> None:
        seen = viewing.writer.transport.view(viewing.attach(), 0)
        for value in range(1, 4):
            viewing.reader.pages()[:] = value
            assert (seen == value).all()
        viewing.poll_for()
        assert not viewing.reader_events

    def test_a_view_cannot_be_written(self, viewing: TransportPair) -> None:
        seen = viewing.writer.transport.view(viewing.attach(), 0)
        before = viewing.reader.snapshot()
        for attempt in WRITING_ATTEMPTS:
            with pytest.raises((ValueError, TypeError, BufferError)):
                attempt(seen)
        assert viewing.reader.snapshot() == before

    def test_writes_and_reads_go_on_beside_a_view(self, viewing: TransportPair) -> None:
        remote, grant = viewing.attach(), viewing.open_grant(range(NUM_PAGES))
        seen = viewing.writer.transport.view(remote, 0)
        check_write(viewing, remote, grant, ALL_PAGES)
        assert (seen == viewing.writer.pages()).all()

    @pytest.mark.parametrize("array", [-1, 2, 1 << 40])
    def test_an_array_that_is_not_there_is_not_shown(
        self, viewing: TransportPair, array: int
    ) -> None:
        remote = viewing.attach()
        with pytest.raises(TransferError, match="no array"):
            viewing.writer.transport.view(remote, array)

    def test_nothing_is_shown_of_an_unknown_attaching_or_detached_remote(
        self, viewing: TransportPair
    ) -> None:
        transport = viewing.writer.transport
        attaching = transport.attach(viewing.reader.descriptor)
        for remote in (RemoteId(99), attaching):
            with pytest.raises(TransferError, match="not attached"):
                transport.view(remote, 0)
        detached = viewing.attach()
        transport.detach(detached)
        with pytest.raises(TransferError, match="not attached"):
            transport.view(detached, 0)

    def test_nothing_is_shown_of_an_owner_that_left(self, viewing: TransportPair) -> None:
        remote, transport = viewing.attach(), viewing.writer.transport
        transport.view(remote, 0)
        viewing.reader.transport.close()
        viewing.pump(lambda: bool(viewing.seen(RemoteLost)))
        with pytest.raises(PeerLostError):
            transport.view(remote, 0)

    @pytest.mark.parametrize("end", ["detach", "close"])
    def test_a_view_that_is_kept_stays_readable(self, viewing: TransportPair, end: str) -> None:
        remote, transport = viewing.attach(), viewing.writer.transport
        seen, had = transport.view(remote, 0), viewing.reader.pages().copy()
        if end == "detach":
            transport.detach(remote)
            viewing.poll_for(0.01)
        else:
            transport.close()
        assert (seen == had).all()

    def test_a_view_that_is_kept_keeps_no_grant_from_quiescence(
        self, viewing: TransportPair
    ) -> None:
        remote, grant = viewing.attach(), viewing.open_grant(range(NUM_PAGES))
        seen = viewing.writer.transport.view(remote, 0)
        check_write(viewing, remote, grant, ALL_PAGES)
        viewing.reader.transport.close_grant(grant)
        viewing.writer.transport.detach(remote)
        viewing.pump(lambda: viewing.seen(GrantQuiescent) == [GrantQuiescent(grant)])
        again = viewing.attach()
        assert (viewing.writer.transport.view(again, 0) == seen).all()


def _make_writable(seen: NDArray[np.uint8]) -> None:
    seen.flags.writeable = True


def _store(seen: NDArray[np.uint8]) -> None:
    seen[3] = 0


def _store_behind(seen: NDArray[np.uint8]) -> None:
    """Through what the view stands on."""
    behind: Any = seen
    while isinstance(behind, np.ndarray):
        behind = behind.base
    memoryview(behind).cast("B")[:1] = b"x"


WRITING_ATTEMPTS: list[Callable[[NDArray[np.uint8]], None]] = [
    _store,
    _make_writable,
    _store_behind,
]
