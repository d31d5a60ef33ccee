"""What every transport must do. Inherit `TransportContract` in a test module to run it.

Two transports live in one process and are polled when their descriptors say so; `pytest` collects
the tests from the subclass, which says how to build one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest

from baton.authority.key import ClusterKey
from baton.clock import MachineClock
from baton.errors import TransferError
from baton.ids import Epoch, new_epoch, new_region_handle, new_ticket_id
from baton.kv.copies import PageCopies
from baton.testing.transport_pair import (
    Side,
    TransportPair,
    is_about,
    spans_of_pages,
    whole_pages,
)
from baton.transfer.interface import (
    MAX_NOTICE_BYTES,
    TRANSPORTS,
    Arrived,
    Attached,
    PageArray,
    PageWrite,
    RemoteLost,
    TransportContext,
    Window,
    WindowQuiescent,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.region import allocate_shared_region

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from numpy.typing import NDArray

    from baton.ids import RegionHandle, TicketId
    from baton.kv.copies import CopyGroup
    from baton.transfer.interface import PagedRegion, RemoteId, Transport, WriteSource

PAGE_BYTES = 8192
NUM_PAGES = 64
SHAPES = ((NUM_PAGES, PAGE_BYTES), (NUM_PAGES, 1536))
OTHER_SHAPES = ((NUM_PAGES, 3 * PAGE_BYTES), (NUM_PAGES, 640))
"""A region whose pages have other sizes, larger in one array and smaller in the other."""
LARGE_BYTES = 64 << 20


class TransportContract:
    """The suite. A subclass names an installed `kind`, or overrides `make_transport`."""

    kind: ClassVar[str]
    options: ClassVar[Mapping[str, object]] = {}
    key: ClassVar[ClusterKey] = ClusterKey.generate()

    def make_transport(self, context: TransportContext) -> Transport:
        """A fresh transport."""
        return TRANSPORTS.build(self.kind, self.options)(context)

    def allocate(self, shapes: Sequence[tuple[int, int]]) -> PagedRegion:
        """Memory of a kind that the transport can expose."""
        return allocate_shared_region(shapes)

    def make_side(
        self, shapes: Sequence[tuple[int, int]] = SHAPES, *, key: ClusterKey | None = None
    ) -> Side:
        """A fresh transport with a zeroed region."""
        epoch = new_epoch()
        context = TransportContext(key or self.key, epoch, "127.0.0.1", MachineClock())
        return Side.start(self.make_transport(context), epoch, self.allocate(shapes))

    @pytest.fixture
    def pair(self) -> Generator[TransportPair]:
        """Two sides with regions alike, the writer's full of random bytes."""
        num_fds = count_open_fds()
        pair = TransportPair.of(self.make_side(), self.make_side())
        pair.writer.fill(seed=1)
        yield pair
        pair.close()
        assert count_open_fds() == num_fds, "a descriptor was left open"

    # What is moved, and where it lands.

    def test_scattered_pages_land_where_they_should(self, pair: TransportPair) -> None:
        remote, rng = pair.attach(), np.random.default_rng(2)
        pages = rng.permutation(NUM_PAGES)[:40]
        window = pair.open_window(pages)
        sources = rng.permutation(NUM_PAGES)[:40]
        self.write_and_check(pair, remote, window, [whole_pages(sources, pages, PAGE_BYTES)])

    def test_neighbouring_pages_land_where_they_should(self, pair: TransportPair) -> None:
        remote, window = pair.attach(), pair.open_window(range(NUM_PAGES))
        groups = [whole_pages(range(5, 25), range(30, 50), PAGE_BYTES)]
        self.write_and_check(pair, remote, window, groups)

    @pytest.mark.parametrize("seed", range(4))
    def test_spans_move_between_pages_of_other_sizes(self, seed: int) -> None:
        pair = TransportPair.of(self.make_side(), self.make_side(OTHER_SHAPES))
        pair.writer.fill(seed)
        remote, window = pair.attach(), pair.open_window(range(NUM_PAGES))
        rng = np.random.default_rng(seed)
        for array, (src_bytes, dst_bytes) in enumerate([(8192, 24576), (1536, 640)]):
            groups = random_groups(rng, src_bytes, dst_bytes)
            self.write_and_check(pair, remote, window, groups, array=array)
        pair.close()

    def test_a_write_of_no_pages_is_a_notice(self, pair: TransportPair) -> None:
        remote, window = pair.attach(), pair.open_window([])
        self.write_and_check(pair, remote, window, [])

    def test_a_large_write(self) -> None:
        shapes = [(LARGE_BYTES // 32_768, 32_768)]
        pair = TransportPair.of(self.make_side(shapes), self.make_side(shapes))
        pair.writer.fill(seed=3)
        remote, num_pages = pair.attach(), shapes[0][0]
        window = pair.open_window(range(num_pages))
        sources = np.random.default_rng(3).permutation(num_pages)
        groups = [whole_pages(sources, range(num_pages), 32_768)]
        transfer = pair.writer.transport.submit(pair.write(remote, window, groups))
        pair.pump(lambda: len(pair.seen(WriteCompleted)) == 1 == len(pair.seen(Arrived)))
        assert pair.seen(WriteCompleted) == [WriteCompleted(transfer, LARGE_BYTES)]
        assert (pair.reader.pages() == pair.writer.pages()[sources]).all()
        pair.close()

    def test_both_directions_at_once(self, pair: TransportPair) -> None:
        back = TransportPair.of(pair.reader, pair.writer)
        remote, remote_back = pair.attach(), back.attach()
        window, window_back = pair.open_window(range(32)), back.open_window(range(32, 64))
        pair.reader.pages()[:] = 7
        source = pair.writer.pages()[32:].copy()
        for _ in range(20):
            there = pair.write(
                remote, window, [whole_pages(range(32, 64), range(32), PAGE_BYTES)]
            )
            pair.writer.transport.submit(there)
            again = back.write(
                remote_back, window_back, [whole_pages(range(32, 64), range(32, 64), PAGE_BYTES)]
            )
            pair.reader.transport.submit(again)
            source = source  # the writer's pages 32.. become 7s only after both have arrived
            pair.pump(lambda: len(pair.seen(WriteCompleted)) == len(pair.seen(Arrived)))
        ...
