"""Streams of several answers, cut and interleaved at random, against what each of them has."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.answer_merge import AnswerMerger, EventSplitter

texts = st.lists(st.text(max_size=4), min_size=1, max_size=5)


def stream_of(answer: list[str], number: int, *, usage: bool) -> bytes:
    """What a worker sends: all its choices have the index 0, and ids of their own."""
    head = {"id": f"cmpl-r-{number}", "object": "text_completion", "created": number, "model": "m"}
    events = [
        {**head, "choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None}
        for text in answer
    ]
    if usage:
        counted = {
            "prompt_tokens": 10,
            "completion_tokens": len(answer),
            "total_tokens": 10 + len(answer),
            "prompt_tokens_details": {"cached_tokens": 8},
        }
        events.append({**head, "choices": [], "usage": counted})
    lines = [*(json.dumps(e, ensure_ascii=number % 2 == 0) for e in events), "[DONE]"]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


@given(data=st.data(), answers=st.lists(texts, min_size=1, max_size=4), usage=st.booleans())
def test_any_interleaving_gives_each_choice_its_own_text_in_order(data, answers, usage):
    num_answers = data.draw(st.sampled_from([n for n in (1, 2, 3, 4) if len(answers) % n == 0]))
    merger = AnswerMerger("/v1/completions", "r", 5, num_answers)
    for prompt in range(len(answers) // num_answers):
        merger.note_prefill(prompt, b'{"usage":{"prompt_tokens_details":{"cached_tokens":1}}}')
    rest = {i: stream_of(a, i, usage=usage) for i, a in enumerate(answers)}
    splitters = {i: EventSplitter() for i in rest}
    sent = b""
    while rest:
        index = data.draw(st.sampled_from(sorted(rest)))
        length = data.draw(st.integers(1, 200))
        chunk, rest[index] = rest[index][:length], rest[index][length:]
        sent += b"".join(merger.rewrite(index, event) for event in splitters[index].push(chunk))
        if not rest[index]:
            del rest[index]
    sent += merger.end()

    *lines, done, nothing = sent.decode().split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {(e["id"], e["created"], e["model"]) for e in events} == {("cmpl-r", 5, "m")}
    if usage:
        last = events.pop()
        num_prompts, num_tokens = len(answers) // num_answers, sum(map(len, answers))
        assert last["choices"] == []
        assert last["usage"] == {
            "prompt_tokens": 10 * num_prompts,
            "completion_tokens": num_tokens,
            "total_tokens": 10 * num_prompts + num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_prompts},
        }
    for index, answer in enumerate(answers):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert [choice["text"] for choice in mine] == answer
    assert all(len(e["choices"]) == 1 for e in events)
