from __future__ import annotations

import json

import pytest

from baton.errors import InvalidRequestError
from baton.gateway.answer_plan import AnswerPlan, plan_answers
from baton.gateway.request import parse_body

MAX_ANSWERS = 8


def plan(**fields: object) -> AnswerPlan:
    return plan_answers(parse_body(json.dumps({"model": "m", **fields}).encode()), MAX_ANSWERS)


def bodies(planned: AnswerPlan) -> list[list[dict[str, object]]]:
    return [
        [json.loads(planned.body(i, k).encode()) for k in range(planned.num_answers)]
        for i in range(len(planned.prompts))
    ]


@pytest.mark.parametrize(
    "prompt", ["one", "", [], [1, 2, 3], [-1], [None], None, {}, 5, 'a \\" , " b']
)
def test_one_prompt_stays_as_it_is(prompt):
    assert bodies(plan(prompt=prompt)) == [[{"model": "m", "prompt": prompt}]]


@pytest.mark.parametrize(
    "prompts",
    [
        ["one"],
        ["\\"] * 8,
        ["p"] * 8,
        ['"' * 99, "\\\\"],
        ["a", "b", 'ü"\\'],
        [[1, 2], [3]],
        [[]],
        [""],
        ['a","', '","b', '","'] * 2,
    ],
)
def test_each_prompt_of_a_list_is_a_request_of_its_own(prompts):
    planned = plan(prompt=prompts, max_tokens=3)
    assert [b["prompt"] for (b,) in bodies(planned)] == prompts
    assert planned.num_total == len(prompts)


def test_n_answers_have_a_seed_each_and_no_field_that_would_multiply_them():
    (answers,) = bodies(plan(prompt="p", n=3, best_of=3, seed=7))
    assert answers == [{"model": "m", "prompt": "p", "seed": 7 + k} for k in range(3)]
    (answers,) = bodies(plan(messages=[], prompt=["not", "read"], n=2, seed=2**63 - 1))
    assert [a["seed"] for a in answers] == [2**63 - 1, -(2**63)]
    (answers,) = bodies(plan(prompt="p", n=2))
    assert answers == [{"model": "m", "prompt": "p"}] * 2


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"n": 0}, "n", "invalid_value"),
        ({"n": -1}, "n", "invalid_value"),
        ({"n": "2"}, "n", "invalid_value"),
        ({"n": 1.5}, "n", "invalid_value"),
        ({"n": 10**30}, "n", "invalid_value"),
        ({"n": [2]}, "n", "invalid_value"),
        ({"best_of": 0}, "best_of", "invalid_value"),
        ({"best_of": 3}, "best_of", "unsupported_parameter"),
        ({"n": 2, "best_of": 3}, "best_of", "unsupported_parameter"),
        ({"n": 9}, "n", "too_many_answers"),
        ({"n": 3, "prompt": ["a"] * 3}, "n", "too_many_answers"),
        ({"prompt": ["a"] * 9}, "prompt", "too_many_answers"),
        ({"prompt": [[1]] * 9}, "prompt", "too_many_answers"),
        ({"prompt": ["a"] * 1000}, "prompt", "too_many_answers"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
        ({"prompt": ["a", [1]]}, "prompt", "invalid_value"),
        ({"prompt": [[1], "a"]}, "prompt", "invalid_value"),
        ({"prompt": [[1], [[2]]]}, "prompt", "invalid_value"),
        ({"prompt": [["a"]]}, "prompt", "invalid_value"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, param, code):
    with pytest.raises(InvalidRequestError) as caught:
        plan(**{"prompt": "p", **fields})
    assert (caught.value.param, caught.value.code) == (param, code)


def test_what_only_one_engine_can_read_is_left_to_it():
    for fields in ({"use_beam_search": True, "n": 4}, {"prompt_embeds": ["x", "y"], "n": 2}):
        assert bodies(plan(**fields)) == [[{"model": "m", **fields}]]
    (answers,) = bodies(plan(prompt="p", use_beam_search=False, n=2))
    assert len(answers) == 2
