from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from baton.engines.interface import SamplingDefaults
from baton.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from baton.models import DEMO_MODEL_PATH
from baton.testing.clocks import ManualClock
from baton.tokenizer.chat_template import ChatTemplate, load_chat_template
from baton.worker.fields import parse_chat, parse_completion
from baton.worker.prompts import (
    DEFAULT_COMPLETION_TOKENS,
    NUM_THREADS,
    Generation,
    PromptReader,
)
from tests.unit.worker.scripted_engine import (
    TOKENIZER,
    VOCAB_SIZE,
    ScriptedEngine,
    silent,
    token_ids,
)

THREADS = ThreadPoolExecutor(NUM_THREADS)
BEGIN = TOKENIZER.encode("", add_special_tokens=True)[0]


def reader(max_context_tokens: int = 1024, max_default_tokens: int = 4096) -> PromptReader:
    return PromptReader(
        served_model_name="demo",
        tokenizer=TOKENIZER,
        template=load_chat_template(DEMO_MODEL_PATH, ManualClock()),
        info=ScriptedEngine(silent, max_context_tokens=max_context_tokens).info,
        max_default_tokens=max_default_tokens,
        threads=THREADS,
    )


def completion(at: PromptReader | None = None, **fields: Any) -> Generation:
    body = json.dumps({"model": "demo", "prompt": "a b"} | fields).encode()
    at = at or reader()
    return asyncio.run(at.read_completion(parse_completion(body, at.max_prompt_tokens)))


def chat(at: PromptReader | None = None, **fields: Any) -> Generation:
    messages = [{"role": "user", "content": "hello"}]
    body = json.dumps({"model": "demo", "messages": messages} | fields).encode()
    return asyncio.run((at or reader()).read_chat(parse_chat(body)))


def test_a_prompt_may_be_text_or_token_ids() -> None:
    assert completion().prompt_ids.tolist() == [BEGIN, *token_ids("a b")]
    assert completion(add_special_tokens=False).prompt_ids.tolist() == token_ids("a b")
    assert completion(prompt=[5, 6, 7]).prompt_ids.tolist() == [5, 6, 7]


def test_a_long_prompt_is_the_same_on_a_thread() -> None:
    text = "word " * 900
    assert completion(reader(4096), prompt=text, max_tokens=1).prompt_ids.tolist() == [
        BEGIN,
        *token_ids(text),
    ]


def test_a_chat_is_rendered_by_the_models_template() -> None:
    got = TOKENIZER.decode(chat().prompt_ids.tolist(), skip_special_tokens=False)
    assert got == "<|begin|><|user|>hello<|end|><|assistant|>"


def test_text_parts_and_the_developer_role_are_understood() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    got = TOKENIZER.decode(chat(messages=messages).prompt_ids.tolist(), skip_special_tokens=False)
    assert got == "<|begin|><|system|>be kind<|end|><|user|>one\ntwo<|end|><|assistant|>"


def test_defaults_are_openais() -> None:
    got = completion()
    assert got.sampling.max_tokens == DEFAULT_COMPLETION_TOKENS
    assert (got.sampling.temperature, got.sampling.top_p, got.sampling.top_k) == (1.0, 1.0, 0)
    assert got.sampling.seed is None
    assert got.sampling.num_logprobs is None
    assert (got.stream, got.include_usage, got.stops) == (False, False, ())


def test_a_chats_answer_may_fill_the_context_up_to_a_bound() -> None:
    num_prompt = len(chat().prompt_ids)
    assert chat(reader(64)).sampling.max_tokens == 64 - num_prompt
    assert chat(reader(64, max_default_tokens=9)).sampling.max_tokens == 9
    assert chat(max_tokens=3, max_completion_tokens=4).sampling.max_tokens == 4


def test_a_completions_answer_may_fill_what_is_left_of_the_context() -> None:
    assert completion(reader(64), prompt=[5] * 60).sampling.max_tokens == 4
    assert completion(reader(64), prompt=[5] * 40).sampling.max_tokens == DEFAULT_COMPLETION_TOKENS


def test_more_tokens_than_there_is_room_for_are_as_many_as_there_is_room_for() -> None:
    assert completion(reader(64), prompt=[5] * 60, max_tokens=5).sampling.max_tokens == 4
    assert completion(reader(64), prompt=[5] * 63, max_tokens=64).sampling.max_tokens == 1
    num_prompt = len(chat().prompt_ids)
    assert chat(reader(64), max_completion_tokens=64).sampling.max_tokens == 64 - num_prompt


def test_an_answer_longer_than_the_kv_is_cut_and_one_longer_than_the_context_is_refused() -> None:
    """A prefill worker with little KV gets the `max_tokens` that its decode worker can answer."""
    info = msgspec.structs.replace(reader(64).info, model_context_tokens=256)
    at = replace(reader(), info=info)
    assert completion(at, prompt=[5] * 60, max_tokens=256).sampling.max_tokens == 4
    assert chat(at, max_tokens=65).sampling.max_tokens == 64 - len(chat().prompt_ids)
    whole = completion(at, prompt=[5] * 60, max_tokens=256, min_tokens=256).sampling
    assert (whole.min_tokens, whole.max_tokens) == (4, 4)
    with pytest.raises(ContextLengthError, match="holds 256 tokens; the prompt has 60 and 257"):
        completion(at, prompt=[5] * 60, max_tokens=257)
    with pytest.raises(ContextLengthError, match="holds 64 tokens; the prompt has 64"):
        completion(at, prompt=[5] * 64, max_tokens=1)


def test_the_models_sampling_defaults_are_used_where_a_request_names_none() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20)
    at = replace(reader(), info=msgspec.structs.replace(reader().info, sampling_defaults=defaults))
    for read in (completion, chat):
        got = read(at).sampling
        assert (got.temperature, got.top_p, got.top_k) == (0.6, 0.9, 20)
        got = read(at, temperature=0, top_p=1, top_k=0).sampling
        assert (got.temperature, got.top_p, got.top_k) == (0, 1, 0)
        assert read(at, top_k=-1).sampling.top_k == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "-|-"),
        ({"reasoning_effort": "high"}, "high|True"),
        ({"reasoning_effort": "none"}, "none|False"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "low|F"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "max"}}, "low|T"),
        ({"chat_template_kwargs": {"reasoning_effort": "max"}}, "max|-"),
    ],
)
def test_a_template_gets_the_effort_as_in_vllm(fields: dict[str, object], expected: str) -> None:
    source = "{{ reasoning_effort | default('-') }}|{{ enable_thinking | default('-') }}"
    at = replace(reader(), template=ChatTemplate(source, {}, ManualClock()))
    text = TOKENIZER.decode(chat(at, **fields).prompt_ids.tolist(), skip_special_tokens=False)
    assert text.startswith(expected)


def test_the_block_pool_bounds_the_context_too() -> None:
    pool_tokens = 64 * 16
    assert chat(reader(100_000)).sampling.max_tokens == pool_tokens - len(chat().prompt_ids)


@pytest.mark.parametrize(("seed", "expected"), [(5, 5), (-1, 2**63 - 1), (-(2**63), 0)])
def test_seeds_are_not_negative_inside(seed: int, expected: int) -> None:
    assert completion(seed=seed).sampling.seed == expected


def test_one_stop_is_a_list_of_one() -> None:
    assert completion(stop="x").stops == ("x",)
    assert completion(stop=["x", "y"]).stops == ("x", "y")


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_can_be_switched_off_in_two_ways(top_k: int) -> None:
    assert completion(top_k=top_k).sampling.top_k == 0


def test_logprobs_of_both_apis() -> None:
    assert completion(logprobs=0).sampling.num_logprobs == 0
    assert chat(logprobs=True).sampling.num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).sampling.num_logprobs == 5
    assert chat(logprobs=False).sampling.num_logprobs is None


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": [1, "a"]},
        {"prompt": []},
        {"prompt": [VOCAB_SIZE]},
        {"prompt": [-1]},
        {"prompt": [10**30]},
        {"prompt": "", "add_special_tokens": False},
    ],
)
def test_prompts_that_are_no_one_prompt_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**fields)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}],
            "messages[0].tool_calls",
        ),
        ([{"role": "wizard", "content": "a"}], "messages"),
    ],
)
def test_messages_that_the_model_cannot_read_are_refused(
    messages: list[dict[str, object]], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(messages=messages)
    assert caught.value.param == param
    assert "expected `null`" not in str(caught.value)


def test_top_logprobs_need_logprobs() -> None:
    with pytest.raises(InvalidRequestError, match="send logprobs=true") as caught:
        chat(top_logprobs=3)
    assert caught.value.param == "top_logprobs"


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens is 5, above max_tokens") as caught:
        completion(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


def test_another_model_is_refused_with_the_one_that_is_served() -> None:
    with pytest.raises(ModelNotFoundError, match="'gpt-9' is not served here; served: demo"):
        completion(model="gpt-9")


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"prompt": [5] * 64}, ("holds 64", "has 64")),
        ({"prompt": [5] * 60, "max_tokens": 65}, ("60", "65")),
        ({"prompt": [5] * 600, "max_tokens": 5}, ("600", "64")),
    ],
)
def test_what_does_not_fit_the_context_is_refused_with_the_numbers(
    fields: dict[str, object], numbers: tuple[str, ...]
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        completion(reader(64), **fields)
    assert caught.value.code == "context_length_exceeded"
    assert all(number in str(caught.value) for number in numbers)


def test_a_model_without_a_template_cannot_chat() -> None:
    base = reader()
    bare = PromptReader(
        served_model_name="demo",
        tokenizer=TOKENIZER,
        template=None,
        info=base.info,
        max_default_tokens=9,
        threads=THREADS,
    )
    with pytest.raises(InvalidRequestError, match="use /v1/completions"):
        chat(bare)


class CountingTokenizer:
    """Counts what was encoded."""

    longest_token_chars = TOKENIZER.longest_token_chars

    def __init__(self) -> None:
        self.num_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        self.num_chars += len(text)
        return TOKENIZER.encode(text, add_special_tokens=add_special_tokens)


def test_of_a_text_far_too_long_only_a_part_is_tokenized() -> None:
    counting = CountingTokenizer()
    limited = replace(reader(64), tokenizer=counting)
    with pytest.raises(ContextLengthError, match="the prompt has more than 64"):
        completion(limited, prompt="one word after another " * 10_000)
    assert counting.num_chars < 20_000  # of 230,000


def test_a_long_text_of_few_tokens_is_served() -> None:
    words = "e" * 400  # the demo's tokenizer has long pieces of no kind: so many are too many
    long = len(token_ids(words))
    assert len(completion(reader(2 * long), prompt=words).prompt_ids) == long + 1


def test_who_leaves_while_queued_costs_nothing_more() -> None:
    counting = CountingTokenizer()
    at = replace(reader(), tokenizer=counting, threads=(threads := ThreadPoolExecutor(1)))
    body = json.dumps({"model": "demo", "prompt": "word " * 900}).encode()
    fields = parse_completion(body, 1024)
    gate = threading.Event()

    async def leave() -> None:
        threads.submit(gate.wait)
        reading = asyncio.create_task(at.read_completion(fields))
        await asyncio.sleep(0.05)
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    try:
        asyncio.run(leave())
    finally:
        gate.set()
        threads.shutdown(wait=True)
    assert counting.num_chars == 0


def test_a_prompt_that_the_gateway_tokenized_is_taken_as_it_is() -> None:
    known = {"kv_transfer_params": {"baton_prompt": [5, 6, 7]}}
    assert completion(**known).prompt_ids.tolist() == [5, 6, 7]
    assert chat(**known).prompt_ids.tolist() == [5, 6, 7]
    with pytest.raises(InvalidRequestError, match="token id"):
        completion(kv_transfer_params={"baton_prompt": [2**30]})
    with pytest.raises(ContextLengthError):
        completion(kv_transfer_params={"baton_prompt": [5] * 2000})
