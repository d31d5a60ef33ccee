import msgspec
import pytest

from baton.bench.architectures.transfer_check import (
    MOST_TRACES,
    FetchedTrace,
    RequestIds,
    measure_stages,
    prove,
)
from baton.telemetry.trace import TraceSummary


def make_trace(*, status=200, **changes):
    given = {
        field.name: None for field in msgspec.structs.fields(TraceSummary)
    } | {
        "request_id": "r", "mode": "push", "transport": "shared", "num_pages": 4,
        "num_bytes": 4096, "num_prompt_tokens": 100, "num_cached_tokens": 20,
        "num_received_tokens": 80, "num_output_tokens": 5, "fallbacks": (), "outcome": "ok",
    }  # fmt: skip
    return FetchedTrace("r", status, TraceSummary(**(given | changes)))


def test_what_decode_lacked_is_what_it_received():
    proof = prove([make_trace(), make_trace()], 2)
    assert proof.is_proved
    assert proof.problem is None
    assert (proof.num_needed_tokens, proof.num_received_tokens) == (160, 160)
    assert proof.num_bytes == 8192
    assert proof.modes == {"push": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_received_tokens": 0, "num_bytes": 0, "fallbacks": ("timeout: of a handoff",)},
        {"num_received_tokens": 40},
        {"num_bytes": 0},  # tokens are claimed, and nothing moved
        {"mode": "colocated", "num_received_tokens": 0, "num_bytes": 0},
    ],
)
def test_a_request_that_was_computed_anew_is_no_proof(changes):
    proof = prove([make_trace(), make_trace(**changes)], 2)
    assert not proof.is_proved
    assert "1 of 2 requests were not handed over" in proof.problem


def test_fallbacks_are_counted_by_cause():
    proof = prove([make_trace(num_received_tokens=0, fallbacks=("timeout: 3 s", "push: x"))], 1)
    assert proof.fallbacks == {"timeout": 1, "push": 1}


def test_vllm_computes_the_last_token_itself():
    assert prove([make_trace(num_received_tokens=79)], 1).is_proved
    assert not prove([make_trace(num_received_tokens=78)], 1).is_proved


def test_by_reference_nothing_need_be_copied():
    assert prove([make_trace(mode="reference", num_bytes=0)], 1).is_proved


def test_a_prompt_that_was_cached_needs_nothing():
    trace = make_trace(num_cached_tokens=99, num_received_tokens=0, num_bytes=0)
    assert prove([trace], 1).is_proved


def test_less_than_a_block_after_cached_ones_is_computed_by_decode():
    """As the embedded engine does with blocks of 16 tokens: nothing is sent for 15."""
    tail = {"num_received_tokens": 0, "num_bytes": 0, "transport": None, "num_prompt_tokens": 95}
    proof = prove([make_trace(num_cached_tokens=80, **tail)], 1)
    assert proof.is_proved
    assert proof.num_tails == 1
    assert not prove([make_trace(num_cached_tokens=0, **tail)], 1).is_proved
    assert not prove([make_trace(num_cached_tokens=80, fallbacks=("x: y",), **tail)], 1).is_proved
    whole = tail | {"num_prompt_tokens": 96}
    assert not prove([make_trace(num_cached_tokens=80, **whole)], 1).is_proved


def test_answers_without_a_trace_are_no_proof():
    proof = prove([make_trace(), None], 2)
    assert proof.problem == "1 of 2 left no trace"
    assert prove([], 0).problem == "no request was answered"


def test_requests_that_failed_are_left_out():
    assert prove([make_trace(), make_trace(status=503, num_received_tokens=0)], 1).is_proved
    assert prove([make_trace(), make_trace(outcome="cancelled", num_bytes=0)], 1).is_proved


def test_stages_are_medians_of_what_is_known():
    traces = [make_trace(queue_s=value) for value in (1.0, 3.0, 2.0)]
    assert measure_stages([*traces, None]).queue_s == 2.0
    assert measure_stages(traces).prefill_s is None


def test_names_are_counted():
    names = RequestIds("1P1D-1-c1")
    assert [next(names), next(names)] == ["1P1D-1-c1-0", "1P1D-1-c1-1"]
    assert names.given == ["1P1D-1-c1-0", "1P1D-1-c1-1"]


def test_of_more_requests_than_a_gateway_remembers_the_latest_prove_it():
    names = RequestIds("a")
    for _ in range(MOST_TRACES + 3):
        next(names)
    assert (names.given[0], names.given[-1]) == ("a-3", f"a-{MOST_TRACES + 2}")
    proof = prove([make_trace()] * 5, 8)
    assert (proof.is_proved, proof.num_requests) == (True, 5)
    assert prove([*[make_trace()] * 4, None], 8).problem == "1 of 5 left no trace"
