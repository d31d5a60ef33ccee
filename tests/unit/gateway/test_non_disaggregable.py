from __future__ import annotations

import pytest

from baton.gateway.request import find_non_disaggregable_field, parse_body
from baton.router.placement import NonDisaggregableField


def field_of(fields: str) -> NonDisaggregableField | None:
    return find_non_disaggregable_field(parse_body(f'{{"model":"m",{fields}}}'.encode()))


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
        ('"use_beam_search":true', NonDisaggregableField.USE_BEAM_SEARCH),
        ('"echo":true', NonDisaggregableField.ECHO),
        ('"prompt_logprobs":0', NonDisaggregableField.PROMPT_LOGPROBS),
        ('"prompt_embeds":"abc"', NonDisaggregableField.PROMPT_EMBEDS),
    ],
)
def test_some_are_served_whole(fields, field):
    assert field_of(fields) is field
