"""What became of an answer: only a finish reason and then [DONE], without an error, is success."""

import pytest

from baton.bench.load.stream import Answer, read_error

TOKEN = b'{"choices":[{"index":0,"text":"a","finish_reason":null}]}'
LAST = b'{"choices":[{"index":0,"text":"b","finish_reason":"length"}]}'
USAGE = (
    b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":2}}}'
)
DONE = b"[DONE]"
ERROR = b'{"error":{"message":"out of memory","type":"server_error","code":"x"}}'


def answer_of(*events):
    answer = Answer([])
    for now, event in enumerate(events):
        answer.push(event, float(now))
    return answer


def test_a_whole_answer():
    answer = answer_of(TOKEN, TOKEN, LAST, USAGE, DONE)
    assert answer.end() is None
    assert answer.token_at == [0.0, 1.0, 2.0]
    assert answer.ended_at == 2.0
    assert (answer.tokens.num_prompt, answer.tokens.num_output, answer.tokens.num_cached) == (
        5, 3, 2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("events", "kind", "reported"),
    [
        ((TOKEN, ERROR, DONE), "error_in_stream", "out of memory"),
        ((TOKEN, LAST, ERROR, DONE), "error_in_stream", "out of memory"),
        ((TOKEN, b'{"error":"dead"}'), "error_in_stream", "dead"),
        ((TOKEN, LAST.replace(b"length", b"error"), DONE), "error_in_stream", "'error'"),
        ((TOKEN, LAST.replace(b"length", b"abort"), DONE), "error_in_stream", "'abort'"),
        ((TOKEN, TOKEN), "truncated", "finish_reason"),
        ((TOKEN, TOKEN, DONE), "truncated", "finish_reason"),
        ((TOKEN, LAST), "truncated", "[DONE]"),
        ((), "truncated", "finish_reason"),
        ((TOKEN, b"{broken"), "protocol", "{broken"),
        ((TOKEN, b'{"choices": 3}'), "protocol", "choices"),
    ],
)
def test_what_is_no_answer(events, kind, reported):
    failure = answer_of(*events).end()
    assert failure is not None
    assert failure.kind == kind
    assert reported in failure.message


def test_null_errors_and_null_usage_are_none():
    whole = LAST[:-1] + b',"error":null,"usage":null}'
    assert answer_of(TOKEN, whole, DONE).end() is None


def test_nothing_counts_after_an_error():
    answer = answer_of(TOKEN, ERROR, LAST, DONE)
    assert answer.end() is not None
    assert answer.token_at == [0.0]


def test_a_chats_opening_is_no_token():
    opening = b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
    piece = b'{"choices":[{"delta":{"content":"a"},"finish_reason":null}]}'
    thought = b'{"choices":[{"delta":{"reasoning_content":"hm"},"finish_reason":null}]}'
    ending = b'{"choices":[{"delta":{},"finish_reason":"stop"}]}'
    answer = answer_of(opening, thought, piece, ending, DONE)
    assert answer.end() is None
    assert answer.token_at == [1.0, 2.0]
    assert answer.ended_at == 3.0


def test_a_completions_chunk_without_text_is_a_token():
    empty = b'{"choices":[{"index":0,"text":"","finish_reason":null}]}'
    assert answer_of(empty, LAST, DONE).token_at == [0.0, 1.0]


def test_a_tool_call_is_a_token():
    call = b'{"choices":[{"delta":{"tool_calls":[{"id":"1"}]},"finish_reason":null}]}'
    none = b'{"choices":[{"delta":{"tool_calls":[]},"finish_reason":"stop"}]}'
    assert answer_of(call, none, DONE).token_at == [0.0]


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        (b'{"error":{"message":"no such model"}}', "no such model"),
        (b'{"error":"text"}', "text"),
        (b'{"object":"error","message":"old vLLM"}', "old vLLM"),
        (b"<html>Bad gateway</html>", "<html>Bad gateway</html>"),
        (b"", "no reason given"),
        (b"\xff", "\ufffd"),
    ],
)
def test_errors_are_read_as_people_would(body, reported):
    assert read_error(body) == reported
