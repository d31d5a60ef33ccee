from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.engines.interface import FinishReason, NewToken, SamplingParams
from baton.handoff.interface import SampledToken, TokenLogprob
from baton.ids import RequestId
from baton.worker.logprobs import LOWEST, chat_logprobs, completion_logprobs
from baton.worker.output_processor import OutputProcessor, TextChunk
from baton.worker.prompts import Generation
from tests.unit.worker.scripted_engine import TOKENIZER, token_ids

END = 1


def generation(stops: tuple[str, ...] = (), **sampling: int) -> Generation:
    return Generation(
        prompt_ids=np.array([5, 6], dtype=np.int32),
        sampling=SamplingParams(**{"max_tokens": 99} | sampling),
        stops=stops,
        skip_special_tokens=True,
        stream=False,
        include_usage=False,
        cache_salt="",
        ticket=None,
    )


def push_text(
    answer: OutputProcessor, text: str, finish: FinishReason | None = None
) -> list[TextChunk]:
    tokens = token_ids(text)
    chunks = []
    for index, token in enumerate(tokens):
        last = index == len(tokens) - 1
        sampled = SampledToken(token, -float(index))
        chunks.append(answer.push(NewToken(RequestId("r"), sampled, 0, finish if last else None)))
        if chunks[-1].finish is not None:
            break
    return chunks


def shown(chunks: list[TextChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_a_stop_string_across_tokens_ends_the_answer_before_it() -> None:
    answer = OutputProcessor(generation(("ly, and",)), TOKENIZER)
    chunks = push_text(answer, "She smiled sadly, and left")
    assert shown(chunks) == "She smiled sad"
    assert chunks[-1].finish is FinishReason.STOP
    assert answer.num_tokens < len(token_ids("She smiled sadly, and left"))


def test_text_held_for_a_stop_string_is_shown_at_the_end() -> None:
    answer = OutputProcessor(generation(("sadly, but",)), TOKENIZER)
    chunks = push_text(answer, "She smiled sadly,", FinishReason.LENGTH)
    assert shown(chunks) == "She smiled sadly,"
    assert chunks[-1].finish is FinishReason.LENGTH


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    text = "no no no no"
    answer = OutputProcessor(generation(("no",), min_tokens=len(token_ids("no no")) + 1), TOKENIZER)
    chunks = push_text(answer, text)
    assert shown(chunks) == "no no "
    assert chunks[-1].finish is FinishReason.STOP


def test_a_hidden_end_token_is_counted_but_not_shown() -> None:
    answer = OutputProcessor(generation(num_logprobs=0), TOKENIZER)
    chunks = push_text(answer, "Yes.")
    end = NewToken(RequestId("r"), SampledToken(END, -0.1), 7, FinishReason.STOP, hidden=True)
    chunks.append(answer.push(end))
    assert shown(chunks) == "Yes."
    assert answer.num_tokens == len(token_ids("Yes.")) + 1
    assert answer.num_cached_tokens == 7
    assert END not in [e.token.token_id for chunk in chunks for e in chunk.entries]


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_entries_belong_to_the_text_that_is_shown(text: str, stops: list[str]) -> None:
    answer = OutputProcessor(generation(tuple(stops), num_logprobs=0), TOKENIZER)
    chunks = push_text(answer, text, FinishReason.LENGTH)
    released = ""
    for chunk in chunks:
        released += chunk.text
        assert all(e.text_offset <= len(released) for e in chunk.entries)
    entries = [e for chunk in chunks for e in chunk.entries]
    assert [e.token.token_id for e in entries] == token_ids(text)[: len(entries)]
    if chunks and chunks[-1].finish is FinishReason.LENGTH:
        assert len(entries) == len(token_ids(text))
    if chunks and chunks[-1].finish is FinishReason.STOP:
        assert all(e.text_offset < len(released) for e in entries)


def test_logprobs_in_the_shape_of_chat() -> None:
    answer = OutputProcessor(generation(num_logprobs=1), TOKENIZER)
    token = token_ids("é")[0]
    top = (TokenLogprob(token_ids("a")[0], -0.25),)
    update = NewToken(RequestId("r"), SampledToken(token, float("-inf"), top), 0)
    finish = FinishReason.LENGTH
    (entry,) = answer.push(NewToken(update.request, update.token, 0, finish)).entries
    (content,) = chat_logprobs([entry], TOKENIZER).content
    assert content.logprob == LOWEST
    assert bytes(content.bytes) == TOKENIZER.token_bytes(token)
    assert [(t.token, t.logprob, t.bytes) for t in content.top_logprobs] == [("a", -0.25, [97])]


def test_logprobs_in_the_shape_of_completions() -> None:
    answer = OutputProcessor(generation(num_logprobs=1), TOKENIZER)
    chunks = push_text(answer, "a\U0001f60a", FinishReason.LENGTH)
    got = completion_logprobs([e for p in chunks for e in p.entries], TOKENIZER)
    assert got.tokens[0] == "a"
    assert got.tokens[1].startswith("bytes:\\xf0")
    assert got.text_offset[:2] == [0, 1]
    assert got.top_logprobs[0] == {"a": got.token_logprobs[0]}
