from __future__ import annotations

import pytest

from baton.gateway.request import parse_body
from baton.gateway.undivided import undivided_field
from baton.router.placement import Undivided


def field_of(fields: str) -> Undivided | None:
    return undivided_field(parse_body(f'{{"model":"m",{fields}}}'.encode()))


@pytest.mark.parametrize(
    "fields",
    [
        '"prompt":"p"',
        '"messages":[{"role":"user","content":"n"}]',
        '"n":1,"best_of":1,"echo":false,"use_beam_search":false',
        '"n":null,"best_of":null,"echo":null,"prompt_logprobs":null,"prompt_embeds":null',
        '"prompt":[1,2,3]',
        '"prompt":[ 1, 2]',
        '"prompt":["one"]',
        '"prompt":[[1,2]]',
        '"prompt":[]',
        '"prompt":null',
        '"prompt":{}',
        '"logprobs":5,"top_logprobs":2',
    ],
)
def test_most_requests_can_be_handed_over(fields):
    assert field_of(fields) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ('"n":2', Undivided.N),
        ('"n":"2"', Undivided.N),
        ('"best_of":2', Undivided.BEST_OF),
        ('"use_beam_search":true', Undivided.USE_BEAM_SEARCH),
        ('"echo":true', Undivided.ECHO),
        ('"prompt_logprobs":0', Undivided.PROMPT_LOGPROBS),
        ('"prompt_embeds":"abc"', Undivided.PROMPT_EMBEDS),
        ('"prompt":["one","two"]', Undivided.PROMPTS),
        ('"prompt":[[1],[2]]', Undivided.PROMPTS),
        ('"prompt":[' + " " * 100 + '"one","two"]', Undivided.PROMPTS),
    ],
)
def test_some_are_served_whole(fields, field):
    assert field_of(fields) is field
