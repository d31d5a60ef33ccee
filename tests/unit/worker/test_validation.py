from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from baton.errors import InvalidRequestError
from baton.worker import fields as worker_fields
from baton.worker.fields import parse_chat

if TYPE_CHECKING:
    from baton.protocol.request_fields import CompletionFields

MESSAGES = [{"role": "user", "content": "hello"}]


def parse_completion(body: bytes) -> CompletionFields:
    return worker_fields.parse_completion(body, max_context_tokens=64)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"model": 3}, "model", "the name of a model"),
        ({"prompt": {"text": "a"}}, "prompt", "one prompt"),
        ({"max_tokens": "ten"}, "max_tokens", "a whole number of at least 1"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": 1.5}, "max_tokens", "a whole number"),
        ({"max_tokens": 10**30}, "max_tokens", "a whole number"),
        ({"temperature": -0.1}, "temperature", "from 0 (greedy) to 2"),
        ({"temperature": 2.1}, "temperature", "from 0 (greedy) to 2"),
        ({"temperature": True}, "temperature", "from 0 (greedy) to 2"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_p": 1.01}, "top_p", "at most 1"),
        ({"top_k": -2}, "top_k", "0 or -1 for off"),
        ({"min_tokens": -1}, "min_tokens", "at least 0"),
        ({"seed": 2**63}, "seed", "fits 64 bits"),
        ({"stop": ""}, "stop", "a non-empty string"),
        ({"stop": ["a", ""]}, "stop[1]", "a non-empty string"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "a list of token ids"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"logprobs": True}, "logprobs", "from 0 to 20"),
        ({"stream": "yes"}, "stream", "expected `bool | null`"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "bool"),
        ({"kv_transfer_params": {"baton_ticket": 1}}, "kv_transfer_params.baton_ticket", "str"),
    ],
)
def test_a_wrong_field_is_named_with_a_reason_and_a_remedy(
    fields: dict[str, object], param: str, says: str
) -> None:
    body = json.dumps({"model": "demo", "prompt": "a"} | fields).encode()
    with pytest.raises(InvalidRequestError) as caught:
        parse_completion(body)
    assert caught.value.param == param
    assert caught.value.code == "invalid_value"
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
            "messages[0].content[0].type",
        ),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields: dict[str, object], param: str) -> None:
    body = json.dumps({"model": "demo", "messages": MESSAGES} | fields).encode()
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat(body)
    assert caught.value.param == param


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="prompt: this field is required") as caught:
        parse_completion(b'{"model":"demo"}')
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b'{"model":"\xff"}', b'{"model":NaN}', b"{'model':1}", b'{"a":' * 5000],
)
def test_what_is_not_json_is_said_so(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not valid JSON") as caught:
        parse_completion(body)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("body", [b"[]", b"null", b"3", b'"a"'])
def test_json_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="expected `object`"):
        parse_chat(body)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"best_of": 3},
        {"echo": True},
        {"suffix": "end"},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": 1}},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -1},
        {"repetition_penalty": 1.1},
        {"min_p": 0.1},
        {"guided_regex": "a+"},
        {"structured_outputs": {"json": {}}},
        {"use_beam_search": True},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"modalities": ["text", "audio"]},
        {"return_token_ids": True},
        {"return_tokens_as_token_ids": True},
        {"return_prompt_text": True},
        {"logprob_token_ids": [1]},
        {"thinking_token_budget": 10},
        {"repetition_detection": {"max_pattern_size": 3, "min_count": 3}},
        {"watermarking": True},
        {"include_reasoning": False},
        {"spaces_between_special_tokens": False},
        {"vllm_xargs": {"a": 1}},
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, object]) -> None:
    body = json.dumps({"model": "demo", "prompt": "a", "messages": MESSAGES} | fields).encode()
    for parse in (parse_completion, parse_chat):
        with pytest.raises(InvalidRequestError) as caught:
            parse(body)
        assert caught.value.code == "unsupported_parameter"
        assert [caught.value.param] == list(fields)


def test_fields_that_say_off_or_that_change_nothing_are_taken() -> None:
    off = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "suffix": None,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "modalities": ["text"],
        "return_token_ids": False,
        "thinking_token_budget": None,
        "include_reasoning": True,
        "spaces_between_special_tokens": True,
        "vllm_xargs": {},
        "user": "somebody",
        "metadata": {"a": ["b"]},
        "store": False,
        "temperature": None,
        "max_tokens": None,
        "stop": None,
        "stream_options": None,
    }
    body = json.dumps({"model": "demo", "prompt": "a", "messages": MESSAGES} | off).encode()
    assert parse_completion(body).prompt == "a"
    assert parse_chat(body).messages[0].content == "hello"


def test_what_is_too_long_is_refused_before_it_is_built() -> None:
    too_many = json.dumps({"model": "demo", "prompt": [1] * 65}).encode()
    with pytest.raises(InvalidRequestError, match="holds 64 tokens; the prompt has 65"):
        parse_completion(too_many)
    assert len(parse_completion(too_many.replace(b"[1, ", b"[", 1)).prompt) == 64
    message = {"role": "user", "content": 'says "role", and then "role"'}
    for num_messages in (4096, 4097):
        body = json.dumps({"model": "demo", "messages": [message] * num_messages}).encode()
        if num_messages == 4096:
            assert len(parse_chat(body).messages) == num_messages
            continue
        with pytest.raises(InvalidRequestError, match="4097 messages"):
            parse_chat(body)
