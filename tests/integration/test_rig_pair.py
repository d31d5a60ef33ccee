"""One pair of real processes: bytes are compared, and what fails is said."""

import pytest

from baton.bench.link.node import COMMAND
from baton.bench.link.report import LinkEntry
from baton.clock import MachineClock
from baton.errors import TransferError
from baton.rig.backend import BackendSpec, ComputeDigest
from baton.rig.nodes import LocalNodes
from baton.rig.pages import PAGE_BYTES, Workload
from baton.rig.pair import NodePair, SampleBudget, WrongBytesError

NUM_PAGES = 64
WORKLOAD = Workload("scattered", 8 * PAGE_BYTES)


class LookingElsewhere(NodePair):
    """Compares what was sent with other bytes of the target."""

    def _ask(self, end, order, kind):
        if isinstance(order, ComputeDigest) and order.side == "dst":
            order = ComputeDigest(Workload("message", WORKLOAD.num_bytes), "dst")
        return super()._ask(end, order, kind)


@pytest.mark.parametrize("kind", [NodePair, LookingElsewhere])
def test_bytes_are_compared(kind):
    with kind(
        LinkEntry("limit", "memcpy", {}, "one"), NUM_PAGES, LocalNodes(MachineClock(), COMMAND)
    ) as pair:
        if kind is NodePair:
            pair.verify(WORKLOAD, "push")
        else:
            with pytest.raises(WrongBytesError, match="other bytes arrived"):
                pair.verify(WORKLOAD, "push")


class LyingDown(NodePair):
    """Compares what was lent with other bytes of the lender."""

    def _ask(self, end, order, kind):
        if isinstance(order, ComputeDigest):
            order = ComputeDigest(Workload("message", WORKLOAD.num_bytes), order.side)
        return super()._ask(end, order, kind)


@pytest.mark.parametrize("kind", [NodePair, LyingDown])
def test_what_is_seen_of_lent_pages_is_compared(kind):
    entry = LinkEntry("transport", "shared", {})
    with kind(entry, NUM_PAGES, LocalNodes(MachineClock(), COMMAND)) as pair:
        assert "reference" in pair.traits.directions
        if kind is NodePair:
            pair.verify(WORKLOAD, "reference")
        else:
            with pytest.raises(WrongBytesError, match="other bytes are seen"):
                pair.verify(WORKLOAD, "reference")


def test_what_a_process_cannot_do_is_said_in_its_words():
    entry = LinkEntry("peer", "carrier pigeon", {})
    with pytest.raises(TransferError, match="nothing called 'carrier pigeon'"):
        NodePair(entry, NUM_PAGES, LocalNodes(MachineClock(), COMMAND)).__enter__()


def test_a_node_of_the_rig_alone_knows_the_registered_transports():
    nodes = LocalNodes(MachineClock())
    with NodePair(BackendSpec("transport", "tcp", {}), NUM_PAGES, nodes) as pair:
        pair.verify(WORKLOAD, "push")
        pair.verify(WORKLOAD, "pull")
        assert len(pair.measure(WORKLOAD, "push", SampleBudget(0.01, 2, 5)).samples_s) >= 2
        with pytest.raises(TransferError, match="no operation 'dial'"):
            pair.call("owner", "dial")
    with pytest.raises(TransferError, match="transports only, no 'memcpy'"):
        NodePair(BackendSpec("limit", "memcpy", {}, "one"), NUM_PAGES, nodes).__enter__()
