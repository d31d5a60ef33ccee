from __future__ import annotations

import pytest

from baton.telemetry.trace import RequestSpan, Stamp, compute_durations, summarize


def leg(name: str, **stamps: float) -> RequestSpan:
    return RequestSpan(
        request_id="r",
        worker="w",
        epoch="e",
        role=name,
        stamps={Stamp(key): at for key, at in stamps.items()},
    )


GATEWAY = leg("gateway", received=100.0, first_token=101.5, finished=103.0)
PREFILL_STAMPS = {
    "received": 10.0,
    "prefill_started": 10.2,
    "first_layer_ready": 10.3,
    "prefill_done": 11.0,
}


def decode_leg() -> RequestSpan:
    decode = leg(
        "decode",
        received=20.0,
        last_layer_landed=21.25,
        kv_ready=21.3,
        # What its own first decode step stamped: not prefill.
        prefill_done=21.5,
        first_layer_ready=21.45,
        decode_scheduled=21.4,
        first_token=21.3,
        finished=22.0,
    )
    decode.peer_stamps = {Stamp(key): at + 10.0 for key, at in PREFILL_STAMPS.items()}
    decode.transport, decode.num_bytes, decode.num_pages = "shared", 4096, 8
    return decode


def test_a_handoffs_durations_are_taken_on_one_clock_each() -> None:
    prefill = leg("prefill", **PREFILL_STAMPS)
    prefill.fallbacks = ["push: lost"]
    got = summarize(GATEWAY, decode_leg(), prefill)
    assert got.queue_s == pytest.approx(0.2)
    assert got.prefill_s == pytest.approx(0.8)
    assert got.first_layer_ready_s == pytest.approx(0.1)
    assert got.last_layer_landed_s == pytest.approx(1.05)
    assert got.exposed_transfer_s == pytest.approx(0.25)
    assert got.decode_queue_s == pytest.approx(0.1)
    assert got.first_token_s == pytest.approx(1.5)
    assert got.total_s == pytest.approx(3.0)
    assert (got.transport, got.num_bytes, got.num_pages) == ("shared", 4096, 8)
    assert got.fallbacks == ("push: lost",)


def test_a_handoff_is_summed_up_without_the_prefill_legs_trace() -> None:
    got = summarize(GATEWAY, decode_leg(), None)
    assert got.prefill_s == pytest.approx(0.8)
    assert got.first_layer_ready_s == pytest.approx(0.1)
    assert got.exposed_transfer_s == pytest.approx(0.25)


def test_a_colocated_request_transfers_nothing() -> None:
    alone = leg("colocated", first_token=11.1, finished=12.0, **PREFILL_STAMPS)
    got = summarize(None, alone, None)
    assert (got.prefill_s, got.total_s) == (pytest.approx(0.8), pytest.approx(2.0))
    assert got.last_layer_landed_s is None
    assert got.exposed_transfer_s is None


def test_a_decode_leg_that_recomputed_prefilled_itself() -> None:
    decode = leg("decode", received=20.0, prefill_started=21.0, prefill_done=23.0)
    decode.peer_stamps = {Stamp.PREFILL_STARTED: 19.0, Stamp.PREFILL_DONE: 19.5}
    assert compute_durations(decode).prefill_s == pytest.approx(2.0)


def test_what_was_not_recorded_is_unknown() -> None:
    got = summarize(None, leg("decode"), leg("prefill"))
    assert got.queue_s is None
    assert got.prefill_s is None
    assert got.last_layer_landed_s is None
    assert got.first_token_s is None
    assert got.outcome is None
