"""The spans of a request on one axis: shifted by the clocks, in order, compared with prediction."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.telemetry.clock_offset import ClockEstimate
from baton.telemetry.timeline import (
    Lane,
    LayerTransfer,
    WorkerTrace,
    compare_prediction,
    list_layers,
    make_timeline,
)
from baton.telemetry.trace import (
    MOST_CHUNKS,
    PredictedTimes,
    PrefillChunk,
    RequestSpan,
    Stamp,
    pack_token_gaps,
    read_token_gaps,
)

PREFILL_AHEAD_S, DECODE_AHEAD_S = 500.0, -40.0


def span(role: str, *, ahead_s: float = 0.0, **stamps: float) -> RequestSpan:
    """A span whose instants are given as seconds since the gateway's 100.0."""
    at = {Stamp(name): 100.0 + ahead_s + seconds for name, seconds in stamps.items()}
    return RequestSpan(request_id="r", worker=role, epoch="e", role=role, stamps=at)


def gateway() -> RequestSpan:
    return span(
        "gateway",
        received=0.0, admitted=0.01, tokenized=0.02, dequeued=0.05, placed=0.06,
        first_token=1.0, finished=2.0,
    )  # fmt: skip


def prefill(ahead_s: float = PREFILL_AHEAD_S) -> RequestSpan:
    made = span(
        "prefill", ahead_s=ahead_s,
        received=0.07, prefill_started=0.2, first_layer_ready=0.3, prefill_done=0.7,
    )  # fmt: skip
    made.tokenize_s = 0.01
    made.note_chunk(100.2 + ahead_s, 100.45 + ahead_s, 512)
    made.note_chunk(100.45 + ahead_s, 100.7 + ahead_s, 100)
    return made


def decode(ahead_s: float = DECODE_AHEAD_S) -> RequestSpan:
    made = span(
        "decode", ahead_s=ahead_s,
        received=0.08, pages_reserved=0.1, granted=0.11, first_layer_landed=0.4,
        last_layer_landed=0.8, kv_ready=0.82, decode_scheduled=0.83, first_token=0.9, finished=1.9,
    )  # fmt: skip
    made.peer = "prefill"
    made.peer_stamps = {
        stamp: at - PREFILL_AHEAD_S + ahead_s for stamp, at in prefill().stamps.items()
    }
    return made


def lanes_of(*, decode_clock: ClockEstimate | None = None) -> dict[str, Lane]:
    decode_clock = decode_clock or ClockEstimate(DECODE_AHEAD_S, 0.001)
    made = make_timeline(
        gateway(),
        WorkerTrace(decode(), decode_clock),
        WorkerTrace(prefill(), ClockEstimate(PREFILL_AHEAD_S, 0.002)),
    )
    return {lane.name: lane for lane in made}


def stages(lane: Lane) -> dict[str, tuple[float, float]]:
    return {each.name: (round(each.start_s, 6), round(each.end_s, 6)) for each in lane.stages}


def test_every_stage_is_on_the_gateways_axis() -> None:
    lanes = lanes_of()
    assert list(lanes) == ["gateway", "prefill", "transfer", "decode"]
    assert stages(lanes["gateway"]) == {
        "admit": (0.0, 0.01), "tokenize": (0.01, 0.02), "queue": (0.02, 0.05),
        "place": (0.05, 0.06), "wait": (0.06, 1.0), "answer": (1.0, 2.0),
    }  # fmt: skip
    assert stages(lanes["prefill"]) == {
        "tokenize": (0.07, 0.08), "queue": (0.08, 0.2), "prefill": (0.2, 0.7),
        "chunk of 512 tokens": (0.2, 0.45), "chunk of 100 tokens": (0.45, 0.7),
    }  # fmt: skip
    assert stages(lanes["transfer"]) == {
        "transfer": (0.3, 0.7), "exposed transfer": (0.7, 0.8),
    }  # fmt: skip
    assert stages(lanes["decode"]) == {
        "reserve": (0.08, 0.1), "accept": (0.8, 0.82), "queue": (0.82, 0.83),
        "first step": (0.83, 0.9), "decode": (0.9, 1.9),
    }  # fmt: skip
    assert lanes["prefill"].clock == ClockEstimate(PREFILL_AHEAD_S, 0.002)
    assert lanes["transfer"].worker == "prefill → decode"


@pytest.mark.parametrize("wrong_s", [3600.0, -3600.0])
def test_after_a_jump_of_its_clock_a_worker_is_put_at_the_placement(wrong_s: float) -> None:
    lanes = lanes_of(decode_clock=ClockEstimate(DECODE_AHEAD_S + wrong_s, 0.001))
    assert lanes["decode"].clock is None
    assert lanes["decode"].start_s == pytest.approx(0.06)
    assert lanes["prefill"].clock is not None
    assert lanes["prefill"].start_s == pytest.approx(0.07)


def test_without_a_prefill_workers_span_its_stages_are_the_peers_stamps() -> None:
    made = make_timeline(gateway(), WorkerTrace(decode(), ClockEstimate(DECODE_AHEAD_S, 0.0)), None)
    lane = next(lane for lane in made if lane.name == "prefill")
    assert lane.worker == "prefill"
    assert stages(lane) == {"queue": (0.07, 0.2), "prefill": (0.2, 0.7)}


def test_a_worker_that_did_both_has_no_transfer() -> None:
    alone = span("colocated", received=0.07, prefill_started=0.1, first_token=0.8, finished=1.9)
    made = make_timeline(gateway(), WorkerTrace(alone, ClockEstimate(0.0, 0.0)), None)
    assert [lane.name for lane in made] == ["gateway", "prefill", "decode"]
    assert stages(made[1])["prefill"] == (0.1, 0.8)


def test_a_request_that_was_never_placed_has_what_is_known() -> None:
    refused = span("gateway", received=0.0, admitted=0.1, finished=0.2)
    (lane,) = make_timeline(refused, None, None)
    assert [each.name for each in lane.stages] == ["admit", "answer"]
    assert make_timeline(span("gateway"), None, None) == ()


@given(
    st.dictionaries(st.sampled_from(list(Stamp)), st.floats(0, 5)),
    st.dictionaries(st.sampled_from(list(Stamp)), st.floats(0, 5)),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 2)), max_size=4),
    st.sampled_from(["decode", "colocated", "prefill"]),
)
def test_whatever_is_recorded_stages_of_a_lane_follow_one_another(own, peer, chunks, role) -> None:
    worker = span(role, **own)
    worker.peer_stamps = {stamp: 100 + at for stamp, at in peer.items()}
    worker.chunks = [PrefillChunk(100 + at, 100 + at + took, 1) for at, took in chunks]
    for lane in make_timeline(gateway(), WorkerTrace(worker, None), None):
        until = lane.start_s
        for each in lane.stages:
            assert each.start_s <= each.end_s + 1e-9
            assert lane.start_s <= each.start_s
            assert each.end_s <= lane.end_s + 1e-9
            if not each.is_part:
                assert each.start_s >= until
                until = each.end_s


def test_what_was_predicted_is_compared_with_what_happened() -> None:
    own = gateway()
    own.predicted = PredictedTimes(queue_s=0.1, load_s=0.0, prefill_s=0.4, handoff_s=0.05)
    lanes = make_timeline(
        own,
        WorkerTrace(decode(), ClockEstimate(DECODE_AHEAD_S, 0.0)),
        WorkerTrace(prefill(), ClockEstimate(PREFILL_AHEAD_S, 0.0)),
    )
    found = {
        each.part: (each.predicted_s, each.actual_s) for each in compare_prediction(own, lanes)
    }
    assert found["queue"] == (0.1, pytest.approx(0.14))
    assert found["prefill"] == (0.4, pytest.approx(0.5))
    assert found["handoff"] == (0.05, pytest.approx(0.3))
    assert found["ttft"] == (pytest.approx(0.55), pytest.approx(0.94))


def test_of_a_shared_prompt_both_workers_compute() -> None:
    own, second = gateway(), decode(0.0)
    own.predicted = PredictedTimes(queue_s=0.1, load_s=0.0, prefill_s=0.6, handoff_s=0.01)
    second.stamps |= {
        Stamp.PREFILL_STARTED: 100.35, Stamp.LAST_LAYER_LANDED: 100.7,
        Stamp.PREFILL_DONE: 100.79, Stamp.KV_READY: 100.8,
    }  # fmt: skip
    exact = ClockEstimate(0.0, 0.0)
    made = make_timeline(own, WorkerTrace(second, exact), WorkerTrace(prefill(0.0), exact))
    lanes = {lane.name: stages(lane) for lane in made}
    assert lanes["prefill"]["prefill"] == (0.2, 0.7)
    assert lanes["decode"]["prefill"] == (0.35, 0.79)
    assert lanes["decode"]["accept"] == (0.79, 0.8)
    found = {each.part: each.actual_s for each in compare_prediction(own, made)}
    assert found["prefill"] == pytest.approx(0.59)
    assert found["handoff"] == pytest.approx(0.21)


def test_without_workers_spans_the_parts_are_unknown_and_the_whole_is_not() -> None:
    own = gateway()
    own.predicted = PredictedTimes(queue_s=0.1, load_s=0.0, prefill_s=0.4, handoff_s=0.05)
    found = {each.part: each.actual_s for each in compare_prediction(own, ())}
    assert found["ttft"] == pytest.approx(0.94)
    assert found["queue"] is found["prefill"] is found["handoff"] is None


@pytest.mark.parametrize("clock", [ClockEstimate(DECODE_AHEAD_S, 0.001), None])
def test_of_an_answer_in_one_piece_the_workers_first_token_counts(
    clock: ClockEstimate | None,
) -> None:
    """The gateway sees the end alone: its time is not the time to first token."""
    own = gateway()
    del own.stamps[Stamp.FIRST_TOKEN]
    own.predicted = PredictedTimes(queue_s=0.1, load_s=0.0, prefill_s=0.4, handoff_s=0.05)
    ahead = WorkerTrace(prefill(), ClockEstimate(PREFILL_AHEAD_S, 0.0))
    lanes = make_timeline(own, WorkerTrace(decode(), clock), ahead)
    assert stages(lanes[0])["answer"] == (0.06, 2.0)
    found = {each.part: each.actual_s for each in compare_prediction(own, lanes)}
    if clock is None:
        assert found["ttft"] is found["handoff"] is None
    else:
        assert found["ttft"] == pytest.approx(0.84)
        assert found["handoff"] == pytest.approx(0.2)


def test_chunks_of_a_long_prompt_are_bounded_and_none_is_lost() -> None:
    made = span("prefill")
    for step in range(3 * MOST_CHUNKS):
        made.note_chunk(float(step), step + 1.0, 10)
    assert len(made.chunks) == MOST_CHUNKS
    assert sum(each.num_tokens for each in made.chunks) == 30 * MOST_CHUNKS
    assert made.chunks[-1].ended_at == 3 * MOST_CHUNKS


def test_token_gaps_are_read_as_they_were_packed() -> None:
    made = span("gateway")
    assert list(read_token_gaps(made)) == []
    made.token_gaps = pack_token_gaps(array("f", [0.5, 0.25]))
    assert made.token_gaps == b"\x00\x00\x00?\x00\x00\x80>"
    assert list(read_token_gaps(made)) == [0.5, 0.25]


def layers_of(ready: list[float], landed: list[float]) -> list[LayerTransfer]:
    """Instants as seconds since the gateway's 100.0, each on its worker's own clock."""
    sender, receiver = prefill(), decode()
    sender.layers_ready = [at and 100.0 + PREFILL_AHEAD_S + at for at in ready]
    receiver.layers_landed = [at and 100.0 + DECODE_AHEAD_S + at for at in landed]
    found = list_layers(
        gateway(),
        WorkerTrace(receiver, ClockEstimate(DECODE_AHEAD_S, 0.001)),
        WorkerTrace(sender, ClockEstimate(PREFILL_AHEAD_S, 0.002)),
    )
    return [
        LayerTransfer(each.layer, round(each.ready_s, 6), round(each.landed_s, 6)) for each in found
    ]


def test_a_layers_way_is_on_the_gateways_axis() -> None:
    assert layers_of([0.3, 0.4], [0.45, 0.8]) == [
        LayerTransfer(0, 0.3, 0.45), LayerTransfer(1, 0.4, 0.8),
    ]  # fmt: skip


def test_a_layer_without_both_instants_is_left_out() -> None:
    assert layers_of([0.3, 0.0, 0.5], [0.4, 0.5, 0.0]) == [LayerTransfer(0, 0.3, 0.4)]
    assert layers_of([0.3], []) == []


def test_a_layer_that_landed_before_it_was_computed_took_no_time() -> None:
    """The clocks of two hosts are known to within an error."""
    assert layers_of([0.3005], [0.3]) == [LayerTransfer(0, 0.3, 0.3)]
