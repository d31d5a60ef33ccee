"""The cached tokens that a client sees of a prompt that was handed over."""

from __future__ import annotations

import json

from baton.gateway.cached_tokens import replace_cached_tokens
from baton.gateway.stream_record import RecordBudget, StreamRecord


def usage_event(cached: int | None = 900, num_prompt: int = 1000) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    usage = {"prompt_tokens": num_prompt, "prompt_tokens_details": details}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode()


def test_the_last_number_is_replaced_and_nothing_else() -> None:
    text = json.dumps({"text": json.dumps({"cached_tokens": 7})}).encode()
    assert replace_cached_tokens(text, 5) == text, "what an answer says is no usage"
    assert replace_cached_tokens(text + usage_event(), 64) == text + usage_event(64)


def test_a_usage_without_the_number_stays_without() -> None:
    assert replace_cached_tokens(usage_event(None), 5) == usage_event(None)


def test_no_more_than_the_prompt_was_cached() -> None:
    """A stream that went on had its prompt computed with tokens of the answer."""
    assert replace_cached_tokens(usage_event(0), 1010) == usage_event(1000)


def test_a_streams_usage_shows_what_its_prefill_worker_had_cached() -> None:
    record = StreamRecord(RecordBudget(1 << 20), 1 << 20)
    record.begin(has_ids=True)
    end = usage_event() + b"\n\ndata: [DONE]\n\n"
    assert record.take(end) == end, "not known"
    record.num_cached = 64
    assert record.take(end) == usage_event(64) + b"\n\ndata: [DONE]\n\n"
