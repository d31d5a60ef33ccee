"""What is seen of a peer's pages in place, where a transport lends (`Capabilities.lends`).

The side that attaches is the pair's `writer`: here it looks. The pair's `reader` owns the pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from baton.errors import PeerLostError, TransferError
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, TransportKit, check_write
from baton.testing.transport_pair import TransportPair, whole_pages
from baton.transfer.interface import RemoteId, RemoteLost, WindowQuiescent

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

ALL_PAGES = [whole_pages(range(NUM_PAGES), range(NUM_PAGES), PAGE_BYTES)]


class LendingContract(TransportKit):
    """Views, of transports that lend; others refuse."""

    @pytest.fixture
    def lending(self) -> Generator[TransportPair]:
        """Two regions alike, full of different bytes; skipped where a transport does not lend."""
        pair = TransportPair.of(self.make_side(), self.make_side())
        try:
            if not pair.writer.transport.capabilities.lends:
                pytest.skip("this transport does not lend")
            pair.writer.fill(seed=1)
            pair.reader.fill(seed=2)
            yield pair
        finally:
            pair.close()

    def test_a_transport_that_does_not_lend_says_so(self, pair: TransportPair) -> None:
        if pair.writer.transport.capabilities.lends:
            pytest.skip("this transport lends")
        with pytest.raises(TransferError, match="does not lend"):
            pair.writer.transport.view(pair.attach(), 0)

    @pytest.mark.parametrize("array", [0, 1])
    def test_a_view_shows_the_owners_pages(self, lending: TransportPair, array: int) -> None:
        seen = lending.writer.transport.view(lending.attach(), array)
        assert (seen.dtype, seen.shape) == (np.dtype("u1"), lending.reader.pages(array).shape)
        assert (seen == lending.reader.pages(array)).all()

    def test_a_view_is_no_copy_and_the_owner_hears_nothing(self, lending: TransportPair) -> None:
        seen = lending.writer.transport.view(lending.attach(), 0)
        for value in range(1, 4):
            lending.reader.pages()[:] = value
            assert (seen == value).all()
        lending.settle()
        assert not lending.reader_events

    def test_a_view_cannot_be_written(self, lending: TransportPair) -> None:
        seen = lending.writer.transport.view(lending.attach(), 0)
        before = lending.reader.snapshot()
        for attempt in WRITING_ATTEMPTS:
            with pytest.raises((ValueError, TypeError, BufferError)):
                attempt(seen)
        assert lending.reader.snapshot() == before

    def test_writes_and_reads_go_on_beside_a_view(self, lending: TransportPair) -> None:
        remote, window = lending.attach(), lending.open_window(range(NUM_PAGES))
        seen = lending.writer.transport.view(remote, 0)
        check_write(lending, remote, window, ALL_PAGES)
        assert (seen == lending.writer.pages()).all()

    @pytest.mark.parametrize("array", [-1, 2, 1 << 40])
    def test_an_array_that_is_not_there_is_not_shown(
        self, lending: TransportPair, array: int
    ) -> None:
        remote = lending.attach()
        with pytest.raises(TransferError, match="no array"):
            lending.writer.transport.view(remote, array)

    def test_nothing_is_shown_of_an_unknown_attaching_or_detached_remote(
        self, lending: TransportPair
    ) -> None:
        transport = lending.writer.transport
        attaching = transport.attach(lending.reader.descriptor)
        for remote in (RemoteId(99), attaching):
            with pytest.raises(TransferError, match="not attached"):
                transport.view(remote, 0)
        detached = lending.attach()
        transport.detach(detached)
        with pytest.raises(TransferError, match="not attached"):
            transport.view(detached, 0)

    def test_nothing_is_shown_of_an_owner_that_left(self, lending: TransportPair) -> None:
        remote, transport = lending.attach(), lending.writer.transport
        transport.view(remote, 0)
        lending.reader.transport.close()
        lending.pump(lambda: bool(lending.seen(RemoteLost)))
        with pytest.raises(PeerLostError):
            transport.view(remote, 0)

    @pytest.mark.parametrize("end", ["detach", "close"])
    def test_a_view_that_is_kept_stays_readable(self, lending: TransportPair, end: str) -> None:
        remote, transport = lending.attach(), lending.writer.transport
        seen, had = transport.view(remote, 0), lending.reader.pages().copy()
        if end == "detach":
            transport.detach(remote)
            lending.settle(0.01)
        else:
            transport.close()
        assert (seen == had).all()

    def test_a_view_that_is_kept_keeps_no_window_from_quiescence(
        self, lending: TransportPair
    ) -> None:
        remote, window = lending.attach(), lending.open_window(range(NUM_PAGES))
        seen = lending.writer.transport.view(remote, 0)
        check_write(lending, remote, window, ALL_PAGES)
        lending.reader.transport.close_window(window)
        lending.writer.transport.detach(remote)
        lending.pump(lambda: lending.seen(WindowQuiescent) == [WindowQuiescent(window)])
        again = lending.attach()
        assert (lending.writer.transport.view(again, 0) == seen).all()


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
