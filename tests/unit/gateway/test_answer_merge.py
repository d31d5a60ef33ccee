from __future__ import annotations

import json

import pytest

from baton.gateway.answer_merge import AnswerMerger
from baton.gateway.errors import AnswerError, UpstreamError


def answer(number: int, text: str, usage: object = None) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "extra": [1]}
    whole = {"id": f"chatcmpl-r-{number}", "created": number, "model": "m", "choices": [choice]}
    return json.dumps({**whole, "usage": usage}).encode()


def usage(prompt: int, completion: int, cached: int, **more: object) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        **more,
    }


def test_choices_stand_in_order_and_usage_counts_each_prompt_once():
    merger = AnswerMerger("/v1/chat/completions", "r", 9, num_answers=2)
    merger.note_prefill(0, b'{"usage":{"prompt_tokens_details":{"cached_tokens":3}}}')
    merger.note_prefill(1, b'{"usage":{"prompt_tokens_details":null}}')
    details = {"completion_tokens_details": {"reasoning_tokens": 2}}
    answers = [
        answer(0, "a", usage(10, 1, 8, **details)),
        answer(1, "b", usage(10, 2, 8, **details)),
        answer(2, "c", usage(20, 4, 16)),
        answer(3, "d", usage(20, 8, 16)),
    ]
    whole = json.loads(merger.merge(answers))
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert "".join(c["message"]["content"] for c in whole["choices"]) == "abcd"
    assert whole["choices"][3]["extra"] == [1]
    assert (whole["id"], whole["created"], whole["model"]) == ("chatcmpl-r", 9, "m")
    assert whole["usage"] == {
        "prompt_tokens": 30,
        "completion_tokens": 15,
        "total_tokens": 45,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }


def test_an_answer_without_usage_has_none():
    merger = AnswerMerger("/v1/chat/completions", "r", 9, num_answers=2)
    assert json.loads(merger.merge([answer(0, "a"), answer(1, "b")]))["usage"] is None


def test_an_error_event_ends_the_request_as_it_is():
    merger = AnswerMerger("/v1/completions", "r", 9, num_answers=1)
    event = b'{"error":{"message":"no","code":"engine_failed"}}'
    with pytest.raises(AnswerError) as caught:
        merger.rewrite(1, event)
    assert caught.value.answer.event == b"data: " + event + b"\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("event", [b"", b"[]", b"{", b'{"choices":5}', b'{"choices":[],"usage":1}'])
def test_what_is_no_event_of_openais_is_the_workers_failure(event):
    with pytest.raises(UpstreamError):
        AnswerMerger("/v1/completions", "r", 9, num_answers=1).rewrite(0, event)
