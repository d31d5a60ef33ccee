from __future__ import annotations

import json

import pytest

from baton.gateway.protocol_adapters import (
    client_answer,
    client_error,
    decode_body,
    prefill_body,
    request_bodies,
)
from baton.gateway.request import NOT_FOR_ONE_TOKEN, parse_body


def body(**fields: object):
    return parse_body(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def test_what_is_needless_for_one_token_is_left_out():
    fields = dict.fromkeys(NOT_FOR_ONE_TOKEN, 1)
    assert json.loads(prefill_body(body(**fields, seed=3), "t")) == {
        "model": "m",
        "prompt": "p",
        "seed": 3,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"baton_ticket": "t", "do_remote_decode": True},
    }


def test_the_limit_that_wins_is_set_too():
    asked = json.loads(prefill_body(body(max_completion_tokens=None, max_tokens=7), "t"))
    assert (asked["max_tokens"], asked["max_completion_tokens"]) == (1, 1)


@pytest.mark.parametrize(
    "shaping",
    [
        {"tools": [{"type": "function", "function": {"name": "a"}}]},
        {"tool_choice": "required"},
        {"truncate_prompt_tokens": -1},
        {"add_special_tokens": False},
        {"chat_template_kwargs": {"thinking": True}},
        {"continue_final_message": True},
        {"reasoning_effort": "low"},
        {"cache_salt": "s"},
    ],
)
def test_what_shapes_the_prompt_or_its_blocks_is_the_same_for_both(shaping):
    (name,) = shaping
    prefill, decode = prefill_body(body(**shaping), "t"), decode_body(body(**shaping), "t")
    assert json.loads(prefill)[name] == json.loads(decode)[name] == shaping[name]


def test_decode_is_asked_what_the_client_asked():
    asked = json.loads(decode_body(body(stream=True, n=2, max_tokens=9), "t"))
    transfer = asked.pop("kv_transfer_params")
    assert asked == {"model": "m", "prompt": "p", "stream": True, "n": 2, "max_tokens": 9}
    assert transfer == {"baton_ticket": "t", "do_remote_prefill": True}


def test_between_baton_workers_one_body_serves_both():
    bodies = request_bodies(body(), "t", prefill="baton", decode="baton")
    assert bodies.prefill is bodies.decode
    assert bodies.prefill == body().encode_with_ticket("t")


def test_each_leg_is_asked_in_its_own_dialect():
    plain, b = body().encode_with_ticket("t"), body()
    to_vllm = request_bodies(b, "t", prefill="baton", decode="vllm")
    from_vllm = request_bodies(b, "t", prefill="vllm", decode="baton")
    assert (to_vllm.prefill, to_vllm.decode) == (plain, decode_body(b, "t"))
    assert (from_vllm.prefill, from_vllm.decode) == (prefill_body(b, "t"), plain)


def test_a_vllm_server_is_asked_to_compute_no_more_than_what_it_hands_over():
    bodies = request_bodies(body(), "t", prefill="vllm", decode="vllm", num_prefix_tokens=960)
    asked = json.loads(bodies.prefill)["kv_transfer_params"]
    assert asked == {"baton_ticket": "t", "do_remote_decode": True, "baton_prefix_tokens": 960}
    assert bodies.decode == decode_body(body(), "t")


def test_a_server_that_computes_is_asked_to_report_what_it_has_cached():
    plain, asked = body(vllm_xargs={"a": 1}), {"a": 1, "kv_cache_report_mode": "full"}
    bodies = request_bodies(plain, "t", prefill="vllm", decode="vllm", reports_cached=True)
    assert json.loads(bodies.prefill)["vllm_xargs"] == asked
    assert bodies.decode == decode_body(plain, "t"), "it may wait, and would report in each step"
    assert json.loads(body(vllm_xargs=None).for_report().encode())["vllm_xargs"] == {
        "kv_cache_report_mode": "full"
    }


def test_clients_get_an_answer_without_what_servers_hand_to_each_other():
    answer = b'{"id":"x","kv_transfer_params":{"a":1},"choices":[1.50],"ec_transfer_params":null}'
    assert client_answer(answer) == b'{"id":"x","choices":[1.50]}'


@pytest.mark.parametrize("answer", [b"", b"[]", b"not json", b'{"a":'])
def test_an_answer_that_is_no_object_is_left_alone(answer):
    assert client_answer(answer) == answer


def test_errors_in_openais_form_are_left_alone():
    answer = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
    assert client_error(400, answer) is answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            b'{"detail":"There was an error parsing the body"}',
            "There was an error parsing the body",
        ),
        (b'{"detail":[{"loc":["body"]}]}', '{"detail":[{"loc":["body"]}]}'),
        (b"Bad Request", "Bad Request"),
        (b"\xff" * 2000, "\ufffd" * 500),
        (b"", "the worker answered 422"),
    ],
)
def test_other_errors_get_it(answer, message):
    error = json.loads(client_error(422, answer))["error"]
    assert error == {
        "message": message, "type": "invalid_request_error", "param": None, "code": 422
    }  # fmt: skip
