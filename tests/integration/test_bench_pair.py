"""One pair of real processes: bytes are compared, and what fails is said."""

import pytest

from baton.bench.ends import LocalEnds
from baton.bench.orders import Fingerprint
from baton.bench.pair import Pair, WrongBytesError
from baton.bench.plan import Entrant
from baton.bench.workload import PAGE_BYTES, Workload
from baton.clock import MachineClock
from baton.errors import TransferError

NUM_PAGES = 64
WORKLOAD = Workload("scattered", 8 * PAGE_BYTES)


class LookingElsewhere(Pair):
    """Compares what was sent with other bytes of the target."""

    def _ask(self, end, order, kind):
        if isinstance(order, Fingerprint) and order.side == "dst":
            order = Fingerprint(Workload("message", WORKLOAD.num_bytes), "dst")
        return super()._ask(end, order, kind)


@pytest.mark.parametrize("kind", [Pair, LookingElsewhere])
def test_bytes_are_compared(kind):
    with kind(Entrant("limit", "memcpy", {}, "one"), NUM_PAGES, LocalEnds(MachineClock())) as pair:
        if kind is Pair:
            pair.verify(WORKLOAD, "push")
        else:
            with pytest.raises(WrongBytesError, match="other bytes arrived"):
                pair.verify(WORKLOAD, "push")


class LyingDown(Pair):
    """Compares what was lent with other bytes of the lender."""

    def _ask(self, end, order, kind):
        if isinstance(order, Fingerprint):
            order = Fingerprint(Workload("message", WORKLOAD.num_bytes), order.side)
        return super()._ask(end, order, kind)


@pytest.mark.parametrize("kind", [Pair, LyingDown])
def test_what_is_seen_of_lent_pages_is_compared(kind):
    entrant = Entrant("transport", "shared", {})
    with kind(entrant, NUM_PAGES, LocalEnds(MachineClock())) as pair:
        assert "lend" in pair.traits.directions
        if kind is Pair:
            pair.verify(WORKLOAD, "lend")
        else:
            with pytest.raises(WrongBytesError, match="other bytes are seen"):
                pair.verify(WORKLOAD, "lend")


def test_what_a_process_cannot_do_is_said_in_its_words():
    entrant = Entrant("peer", "carrier pigeon", {})
    with pytest.raises(TransferError, match="nothing called 'carrier pigeon'"):
        Pair(entrant, NUM_PAGES, LocalEnds(MachineClock())).__enter__()
