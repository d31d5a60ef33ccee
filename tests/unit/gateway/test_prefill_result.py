from __future__ import annotations

import json

import pytest

from baton.gateway.fallbacks import FallbackCause
from baton.gateway.protocol_adapters import (
    PrefillDone,
    PrefillFailed,
    TicketStale,
    read_prefill_result,
)


def told(**result: object) -> bytes:
    return json.dumps({"id": "x", "kv_transfer_params": {"baton": result}}).encode()


def error(code: object, message: str = "why") -> bytes:
    return json.dumps({"error": {"message": message, "type": "t", "code": code}}).encode()


def test_a_baton_worker_answers_when_all_is_well():
    assert read_prefill_result("baton", 200, b'{"object":"baton.prefill"}') == PrefillDone(
        num_cached=0
    )


def test_vllm_offers():
    assert read_prefill_result("vllm", 200, told(status="offered")) == PrefillDone()


@pytest.mark.parametrize("protocol", ["baton", "vllm"])
@pytest.mark.parametrize(
    ("status", "code", "result"),
    [
        (409, "stale_ticket", TicketStale()),
        (502, "handoff_declined", PrefillDone()),
        (502, "handoff_failed", FallbackCause.HANDOFF_FAILED),
        (503, "overloaded", FallbackCause.PREFILL_OVERLOADED),
        (503, 503, FallbackCause.PREFILL_OVERLOADED),
        (400, 400, FallbackCause.PREFILL_REJECTED),
        (403, "invalid_ticket", FallbackCause.PREFILL_REJECTED),
        (500, 500, FallbackCause.PREFILL_FAILED),
        (500, None, FallbackCause.PREFILL_FAILED),
    ],
)
def test_errors_of_either_dialect_are_told_apart(protocol, status, code, result):
    expected = result
    if isinstance(result, FallbackCause):
        said = "why" if code is None else f"{code}: why"
        expected = PrefillFailed(result, f"answered {status} ({said})")
    assert read_prefill_result(protocol, status, error(code)) == expected


@pytest.mark.parametrize("answer", [b"", b"<html>", b'{"error":"Unauthorized"}', b"[]", b"{}"])
def test_an_error_of_no_known_shape_is_an_error_still(answer):
    assert read_prefill_result("vllm", 401, answer) == PrefillFailed(
        FallbackCause.PREFILL_REJECTED, "answered 401 ()"
    )


def test_a_long_error_is_cut():
    result = read_prefill_result("vllm", 500, error(500, "x" * 10_000))
    assert isinstance(result, PrefillFailed)
    assert len(result.reason) < 600


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("invalid_ticket", FallbackCause.PREFILL_REJECTED),
        ("replayed_ticket", FallbackCause.PREFILL_REJECTED),
        ("unsupported_request", FallbackCause.PREFILL_REJECTED),
        ("handoff_failed", FallbackCause.HANDOFF_FAILED),
        ("new in another version", FallbackCause.PREFILL_FAILED),
        (None, FallbackCause.PREFILL_FAILED),
    ],
)
def test_vllm_refuses(code, cause):
    result = read_prefill_result("vllm", 200, told(status="refused", code=code, reason="the clock"))
    assert isinstance(result, PrefillFailed)
    assert result.cause is cause
    assert "the clock" in result.reason


def test_vllm_refuses_a_stale_ticket():
    assert (
        read_prefill_result("vllm", 200, told(status="refused", code="stale_ticket"))
        == TicketStale()
    )


@pytest.mark.parametrize(
    "answer",
    [b'{"id":"x"}', b'{"kv_transfer_params":null}', b'{"kv_transfer_params":{}}',
     b'{"kv_transfer_params":{"baton":{}}}', b"[]", b""],
)  # fmt: skip
def test_an_answer_without_the_connectors_word_is_a_failure(answer):
    result = read_prefill_result("vllm", 200, answer)
    assert isinstance(result, PrefillFailed)
    assert result.cause is FallbackCause.PREFILL_FAILED


def test_vllm_reports_what_it_had_cached_where_it_was_told_to():
    answer = json.loads(told(status="offered"))
    for details, num_cached in (({"cached_tokens": 128}, 128), ({}, None), (None, None)):
        answer["usage"] = {"prompt_tokens": 200, "prompt_tokens_details": details}
        result = read_prefill_result("vllm", 200, json.dumps(answer).encode())
        assert result == PrefillDone(num_cached=num_cached)
