"""Spans of several tickets, and of several ranks, as one."""

from __future__ import annotations

from baton.telemetry.trace import RequestSpan, Stamp
from baton.telemetry.trace_merge import merge_parts, merge_ranks


def rank(number: int) -> RequestSpan:
    """Rank 1 is later than rank 0 by a tenth of a second, in all that it does."""
    late_s = number / 10
    span = RequestSpan(request_id="r", worker=f"d/{number}", epoch="e", role="decode")
    span.stamps = {
        Stamp.RECEIVED: 1.0 + late_s,
        Stamp.FIRST_LAYER_LANDED: 2.0 + late_s,
        Stamp.LAST_LAYER_LANDED: 3.0 + late_s,
        Stamp.KV_READY: 3.1 + late_s,
    }
    span.peer_stamps = {Stamp.FIRST_LAYER_READY: 1.5 + late_s, Stamp.PREFILL_DONE: 2.5 + late_s}
    span.transport = span.expected_transport = "shared"
    span.num_bytes, span.num_pages, span.verify_s = 100, 4, 0.1 + late_s
    span.layers_landed = [2.0 + late_s, 3.0 + late_s]
    span.layers_ready = [1.5 + late_s, 0.0]
    span.verified("shared", 100, is_intact=number == 0)
    return span


def test_a_server_has_the_bytes_of_all_ranks_and_waits_for_the_last() -> None:
    merged = merge_ranks("d", [rank(0), rank(1)])
    assert merged.worker == "d"
    assert merged.stamps == {
        Stamp.RECEIVED: 1.0,
        Stamp.FIRST_LAYER_LANDED: 2.1,
        Stamp.LAST_LAYER_LANDED: 3.1,
        Stamp.KV_READY: 3.1 + 0.1,
    }
    assert merged.peer_stamps == {Stamp.FIRST_LAYER_READY: 1.5, Stamp.PREFILL_DONE: 2.6}
    assert (merged.num_bytes, merged.num_pages, merged.verify_s) == (200, 8, 0.2)
    assert merged.layers_landed == [2.1, 3.1]
    assert merged.layers_ready == [1.5, 0.0]


def test_what_was_verified_for_each_ticket_counts() -> None:
    whole = RequestSpan(request_id="r", worker="d", epoch="e", role="decode")
    merge_parts(whole, [rank(0), rank(1)])
    assert whole.verified_bytes == {"shared": 200}
    assert whole.digest_failures == {"shared": 1}


def test_a_rank_that_used_another_transport_than_expected_prevails() -> None:
    slow = rank(1)
    slow.transport = "tcp"
    for spans in ([rank(0), slow], [slow, rank(0)]):
        merged = merge_ranks("d", [span.snapshot() for span in spans])
        assert (merged.expected_transport, merged.transport) == ("shared", "tcp")


def test_a_fallback_of_any_rank_is_named_once() -> None:
    spans = [rank(0), rank(1), rank(1)]
    for span in spans[1:]:
        span.fallbacks.append("computed locally: the link broke")
    assert merge_ranks("d", spans).fallbacks == ["computed locally: the link broke"]
