"""One write of the same pages of several arrays: all of it lands, or none is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from baton.errors import TransferError
from baton.testing.transport_contract.kit import (
    NUM_PAGES,
    PAGE_BYTES,
    TransportKit,
    check_write,
    random_groups,
)
from baton.testing.transport_pair import TransportPair, whole_pages
from baton.transfer.interface import Arrived, WriteCompleted, WriteFailed

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from baton.kv.copies import CopyGroup

ALIKE = ((NUM_PAGES, PAGE_BYTES),) * 5
LARGE_PAGE_BYTES = 32_768
LARGE = ((512, LARGE_PAGE_BYTES),) * 4


class MultiArrayContract(TransportKit):
    """Layers whose pages are alike."""

    @pytest.fixture
    def alike(self) -> Generator[TransportPair]:
        """Two sides with five arrays alike, the writer's full of random bytes."""
        yield from self.make_pair(ALIKE)

    @pytest.fixture
    def large_alike(self) -> Generator[TransportPair]:
        """Two sides with four large arrays."""
        yield from self.make_pair(LARGE)

    def make_pair(self, shapes: Sequence[tuple[int, int]]) -> Generator[TransportPair]:
        """Two sides, the writer's region full of random bytes."""
        pair = TransportPair.of(self.make_side(shapes), self.make_side(shapes))
        pair.writer.fill(seed=1)
        yield pair
        pair.close()

    @pytest.mark.parametrize("seed", range(3))
    def test_several_arrays_at_once(self, alike: TransportPair, seed: int) -> None:
        remote, grant = alike.attach(), alike.open_grant(range(NUM_PAGES))
        groups = random_groups(np.random.default_rng(seed), PAGE_BYTES, PAGE_BYTES)
        if not alike.writer.transport.capabilities.multi_array:
            with pytest.raises(TransferError, match="3 arrays"):
                alike.writer.transport.submit(alike.write(remote, grant, groups, num_arrays=3))
            return
        check_write(alike, remote, grant, groups, array=1, num_arrays=3)
        check_write(alike, remote, grant, groups, num_arrays=5)

    def test_a_large_write_of_several_arrays(self, large_alike: TransportPair) -> None:
        self.skip_unless_multi_array(large_alike)
        remote, grant = large_alike.attach(), large_alike.open_grant(range(512))
        sources = np.random.default_rng(3).permutation(512)
        groups = [whole_pages(sources, range(512), LARGE_PAGE_BYTES)]
        transfer = large_alike.writer.transport.submit(
            large_alike.write(remote, grant, groups, num_arrays=4)
        )
        large_alike.pump(
            lambda: len(large_alike.seen(WriteCompleted)) == 1 == len(large_alike.seen(Arrived))
        )
        num_bytes = 4 * 512 * LARGE_PAGE_BYTES
        assert large_alike.seen(WriteCompleted) == [WriteCompleted(transfer, num_bytes)]
        for array in range(4):
            assert (
                large_alike.reader.pages(array) == large_alike.writer.pages(array)[sources]
            ).all()

    @pytest.mark.parametrize(("array", "num_arrays"), [(0, 6), (4, 2), (0, 0), (1, -1)])
    def test_arrays_that_are_not_there(
        self, alike: TransportPair, array: int, num_arrays: int
    ) -> None:
        remote, grant = alike.attach(), alike.open_grant(range(NUM_PAGES))
        wrong = alike.write(remote, grant, one_page(0), array=array, num_arrays=num_arrays)
        with pytest.raises(TransferError):
            alike.writer.transport.submit(wrong)

    def test_pages_outside_the_grant_are_refused_in_every_array(self, alike: TransportPair) -> None:
        self.skip_unless_multi_array(alike)
        remote, grant = alike.attach(), alike.open_grant([7])
        before = alike.reader.snapshot()
        alike.writer.transport.submit(alike.write(remote, grant, one_page(8), num_arrays=5))
        alike.pump(lambda: len(alike.seen(WriteFailed)) == 1)
        alike.poll_for()
        assert alike.seen(Arrived) == []
        assert alike.reader.snapshot() == before

    @staticmethod
    def skip_unless_multi_array(pair: TransportPair) -> None:
        """Others refuse such writes, as the first test shows."""
        if not pair.writer.transport.capabilities.multi_array:
            pytest.skip("this transport does not join")


def one_page(number: int) -> list[CopyGroup]:
    """The same page on both sides."""
    return [whole_pages([number], [number], PAGE_BYTES)]
