"""Two agents over `tcp`: the sender reports what its kernel sent, whoever moves the bytes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from baton.auth.credentials import Credentials
from baton.handoff import segment_reports
from baton.telemetry.transfer_report import SegmentCounts
from baton.transfer.links.choice import NullObserver
from tests.integration.handoff_nodes import CLOCK, make_handoff, node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.handoff.messages import TransferOp
    from baton.telemetry.transfers import PeerSegments

NUM_TOKENS = 400
MESSAGE_BYTES = 30_000


class Sent(NullObserver):
    """Sums by transport, peer and distance."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, str], SegmentCounts] = {}

    def sent(self, transport: str, segments: Sequence[PeerSegments]) -> None:
        for each in segments:
            key = transport, each.peer, each.distance
            self.counts[key] = self.counts.get(key, SegmentCounts()).plus(each.counts)

    def num_bytes(self, peer: str) -> int:
        return sum(sent.num_bytes for (_, name, _), sent in self.counts.items() if name == peer)


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_kv_is_counted_by_the_worker_that_sends_it(
    op: TransferOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_reports, "INTERVAL_S", 0.05)
    key = Credentials.generate()
    by_prefill, by_decode = Sent(), Sent()
    with node("p", kinds=("tcp",), key=key, observer=by_prefill) as prefill:
        with node("d", kinds=("tcp",), key=key, op=op, observer=by_decode) as decode:
            prefill.scribble(3)
            handoff = make_handoff(prefill, decode, num_tokens=NUM_TOKENS)
            handoff.start_receive()
            handoff.start_send()
            handoff.wait_until_granted()
            handoff.compute(NUM_TOKENS)
            handoff.prefill_done(None)
            handoff.check_landed(None)
            num_kv_bytes = handoff.receiving.trace.num_bytes
            assert num_kv_bytes > 4 * MESSAGE_BYTES
        # The peer is gone, and the last of what was sent is counted after its connections ended.
        deadline = CLOCK.now() + 20.0
        while by_prefill.num_bytes("d") < num_kv_bytes:
            assert CLOCK.now() < deadline, by_prefill.counts
            threading.Event().wait(0.02)
        resent = sum(sent.num_retransmitted for sent in by_prefill.counts.values()) * 65_536
        assert by_prefill.num_bytes("d") < num_kv_bytes + MESSAGE_BYTES + resent
        assert {key[:2] for key in by_prefill.counts} == {("tcp", "d")}
        assert by_decode.num_bytes("p") < MESSAGE_BYTES
