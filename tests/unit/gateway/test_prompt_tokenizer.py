"""The gateway's token ids are the worker's own, or none."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from baton.errors import ConfigError
from baton.gateway import prompt_tokenizer
from baton.gateway.prompt_tokenizer import PromptTokenizer
from baton.gateway.request import parse_body
from baton.models import DEMO_MODEL_PATH
from baton.testing.clocks import ManualClock
from baton.tokenizer import long_texts
from baton.worker.fields import parse_chat, parse_completion
from tests.unit.worker.scripted_engine import TOKENIZER
from tests.unit.worker.test_prompts import CountingTokenizer, reader

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = ThreadPoolExecutor(2)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SHORT = [{"role": "user", "content": "a"}]
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def room(num_tokens: int) -> Callable[[], int]:
    return lambda: num_tokens


def make(max_context_tokens: int = 8192) -> PromptTokenizer:
    return PromptTokenizer(DEMO_MODEL_PATH, ManualClock(), THREADS, room(max_context_tokens))


def ids_at_the_gateway(tokenizer: PromptTokenizer, fields: dict) -> list[int] | None:
    body = parse_body(json.dumps({"model": "demo"} | fields).encode())
    found = asyncio.run(tokenizer.tokenize(body))
    return None if found is None else found.tolist()


def ids_at_the_worker(path: str, fields: dict) -> list[int]:
    raw, at = json.dumps({"model": "demo"} | fields).encode(), reader(8192)
    if path == "chat":
        return asyncio.run(at.read_chat(parse_chat(raw))).prompt_ids.tolist()
    parsed = parse_completion(raw, at.max_prompt_tokens)
    return asyncio.run(at.read_completion(parsed)).prompt_ids.tolist()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "a b c"}),
        ("completions", {"prompt": "a b c", "add_special_tokens": False}),
        ("completions", {"prompt": [5, 6, 7]}),
        ("completions", {"prompt": "a long text of words " * 150}),
        ("chat", {"messages": [{"role": "user", "content": "hello"}]}),
        ("chat", {"messages": [{"role": "developer", "content": "be kind"}] * 2}),
        ("chat", {"messages": [{"role": "user", "content": PARTS}]}),
        ("chat", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}),
        (
            "chat",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": 1}},
        ),
    ],
)
def test_ids_are_the_workers(path, fields):
    tokenizer = make()
    expected = ids_at_the_worker(path, fields)
    assert ids_at_the_gateway(tokenizer, fields) == expected
    assert ids_at_the_gateway(tokenizer, fields) == expected  # remembered


def test_a_template_gets_the_effort_as_a_workers_does(tmp_path):
    shutil.copy(DEMO_MODEL_PATH / "tokenizer.json", tmp_path)
    source = "{{ reasoning_effort | default('-') }}|{{ enable_thinking | default('-') }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    tokenizer = PromptTokenizer(tmp_path, ManualClock(), THREADS, room(8192))
    for effort, kwargs, text in (
        (None, {}, "-|-"),
        ("high", {}, "high|True"),
        ("none", {}, "none|False"),
        ("low", {"enable_thinking": False, "reasoning_effort": "max"}, "low|False"),
    ):
        fields = {"messages": SHORT, "reasoning_effort": effort, "chat_template_kwargs": kwargs}
        expected = {"prompt": text, "add_special_tokens": False}
        assert ids_at_the_gateway(tokenizer, fields) == ids_at_the_worker("completions", expected)


def test_tools_calls_and_results_reach_the_template(tmp_path):
    shutil.copy(DEMO_MODEL_PATH / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]
    tokenizer = PromptTokenizer(tmp_path, ManualClock(), THREADS, room(8192))
    ids = ids_at_the_gateway(tokenizer, {"messages": messages, "tools": tools})
    text = json.dumps(tools) + 'useraassistant{"a": 1}toolb'
    assert ids == ids_at_the_worker("completions", {"prompt": text, "add_special_tokens": False})


def test_a_chat_whose_template_asks_for_the_time_is_rendered_each_time(tmp_path):
    shutil.copy(DEMO_MODEL_PATH / "tokenizer.json", tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ strftime_now('%S') }}{{ messages[0].content }}")
    clock = ManualClock()
    tokenizer = PromptTokenizer(tmp_path, clock, THREADS, room(8192))
    before = ids_at_the_gateway(tokenizer, {"messages": SHORT})
    assert ids_at_the_gateway(tokenizer, {"messages": SHORT}) == before
    clock.advance(7)
    assert ids_at_the_gateway(tokenizer, {"messages": SHORT}) != before


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a", "truncate_prompt_tokens": 4},
        {"prompt": ["a", "b"]},
        {"prompt": [2**40]},
        {},
        {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"},
        {"messages": [{"role": "user", "content": 7}]},
    ],
)
def test_what_cannot_be_known_has_none(fields):
    assert ids_at_the_gateway(make(), fields) is None


def test_what_is_remembered_is_bounded(monkeypatch):
    most = 2 * (prompt_tokenizer.ENTRY_TOKENS + 4)
    monkeypatch.setattr(prompt_tokenizer, "MAX_REMEMBERED_TOKENS", most)
    tokenizer = make()
    for first in range(100):
        ids_at_the_gateway(tokenizer, {"prompt": [first, 1, 2, 3]})
        assert tokenizer._num_remembered <= most
    assert len(tokenizer._remembered) == 2
    for first in range(100):  # other bodies, whose prompts have no token
        ids_at_the_gateway(tokenizer, {"prompt": [], "chat_template_kwargs": {"x": first}})
    assert len(tokenizer._remembered) == 2


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError):
        PromptTokenizer(tmp_path, ManualClock(), THREADS, room(8192))


def test_prompts_that_differ_are_not_taken_for_one_another():
    tokenizer = make()
    fields: list[dict[str, Any]] = [{"prompt": "ab"}, {"prompt": "a"}, {"prompt": [1, 2]}]
    found = [ids_at_the_gateway(tokenizer, each) for each in fields]
    assert found == [ids_at_the_worker("completions", each) for each in fields]


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("text", "num_chars"),
    [
        pytest.param("one word after another " * 40_000, 0, id="at no cost"),
        pytest.param("7 " * 25_000, long_texts.MIN_PIECE_CHARS, id="of one piece"),
    ],
)
@pytest.mark.parametrize("make_fields", [chat, lambda text: {"prompt": text}], ids=["chat", "text"])
def test_of_a_text_that_no_worker_has_room_for_the_beginning_is_tokenized_at_most(
    make_fields, text, num_chars
):
    tokenizer = make(4096)
    counting = tokenizer._tokenizer = CountingTokenizer()
    assert ids_at_the_gateway(tokenizer, make_fields(text)) is None
    assert counting.num_chars == num_chars
    assert ids_at_the_gateway(tokenizer, make_fields("short")) is not None


def test_the_ids_of_a_long_text_that_fits_are_those_of_the_whole():
    """It is first tokenized in pieces, within words."""
    text = "extraordinary circumstances " * 1200
    assert len(text) > 2 * long_texts.MIN_PIECE_CHARS
    whole = TOKENIZER.encode(text, add_special_tokens=True).tolist()
    assert len(whole) < 4096
    assert ids_at_the_gateway(make(4096), {"prompt": text}) == whole


def test_a_short_text_does_not_wait_for_long_ones(monkeypatch):
    monkeypatch.setattr(long_texts, "MAX_PIECE_CHARS", 4096)
    with ThreadPoolExecutor(1) as threads:
        tokenizer = PromptTokenizer(DEMO_MODEL_PATH, ManualClock(), threads, room(8192))
        counting = tokenizer._tokenizer = CountingTokenizer()

        async def tokenize(text: str) -> int:
            body = json.dumps({"model": "demo"} | chat(text)).encode()
            found = await tokenizer.tokenize(parse_body(body))
            assert (found is None) == (text != short)
            return counting.num_chars

        async def main() -> list[int]:
            return await asyncio.gather(*map(tokenize, (long, long, short)))

        long, short = "7 " * 25_000, "another 7 " * 400
        *of_long, of_short = asyncio.run(main())
    assert of_short < min(of_long)


def test_without_a_thread_there_are_no_ids(monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fields = {"prompt": "a long text of words " * 150}
    with ThreadPoolExecutor(1) as threads:
        tokenizer = PromptTokenizer(DEMO_MODEL_PATH, ManualClock(), threads, room(8192))
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            assert ids_at_the_gateway(tokenizer, fields) is None
        assert ids_at_the_gateway(tokenizer, fields) == ids_at_the_worker("completions", fields)
