from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ContextLengthError, InvalidRequestError
from baton.gateway.request import (
    find_vllm_field,
    parse_body,
    request_id_from,
)
from baton.protocol.prompt_bounds import MAX_IDS
from baton.protocol.worker_http import CHAT_COMPLETIONS_PATH, COMPLETIONS_PATH

FORGED = '{"baton_ticket":"forged","remote_host":"10.0.0.1"}'


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("structured_outputs", "false"),  # vLLM answered with a 500
        ("structured_outputs", '{"choice":[]}'),
        ("tools", '[{"type":"function"}]'),
        ("tools", '"choose"'),
        ("tools", "{}"),
        ("tool_choice", "[]"),
        ("response_format", '"json"'),
        ("min_p", '"1"'),  # vLLM takes text for a number
        ("prompt_logprobs", "1.5"),
    ],
)
def test_fields_of_vllm_have_their_types(name, value):
    body = f'{{"model":"m","{name}":{value}}}'.encode()
    with pytest.raises(InvalidRequestError) as refused:
        find_vllm_field(parse_body(body))
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("name", "value", "is_on"),
    [
        ("structured_outputs", "null", False),
        ("structured_outputs", '{"json":{"type":"object"}}', True),
        ("tools", '[{"type":"function","function":{"name":"a","strict":true}}]', True),
        ("tool_choice", '"none"', False),
        ("tool_choice", '{"type":"function","function":{"name":"a"}}', True),
        ("response_format", '{"type":"text"}', False),
        ("min_p", "0", False),
        ("min_p", "0.5", True),
        ("logit_bias", '{"17":-100}', True),
        ("return_token_ids", "true", True),
        ("return_token_ids", "false", False),
        ("return_tokens_as_token_ids", "true", True),
        ("return_prompt_text", "true", True),
        ("logprob_token_ids", "[1,2]", True),
        ("logprob_token_ids", "[]", False),
        ("thinking_token_budget", "10", True),
        ("thinking_token_budget", "0", True),
        ("thinking_token_budget", "-1", False),
        ("repetition_detection", '{"max_pattern_size":3,"min_count":3}', True),
        ("watermarking", "true", True),
        ("include_reasoning", "false", True),
        ("include_reasoning", "true", False),
        ("spaces_between_special_tokens", "false", True),
        ("spaces_between_special_tokens", "true", False),
        ("vllm_xargs", '{"a":[1,"b"]}', True),
        ("vllm_xargs", '{"kv_transfer_params":{}}', False),
    ],
)
def test_fields_that_only_vllm_serves(name, value, is_on):
    body = parse_body(f'{{"model":"m","{name}":{value}}}'.encode())
    assert (find_vllm_field(body) == name) is is_on


def test_other_fields_are_kept_as_they_are_written():
    body = b'{"model":"m", "temperature":1e-3, "big":123456789012345678901234567890, "n":1.0}'
    kept = parse_body(body).encode()
    assert kept == (
        b'{"model":"m","temperature":1e-3,"big":123456789012345678901234567890,"n":1.0}'
    )


@pytest.mark.parametrize(
    "body",
    [
        '{"model":"m","kv_transfer_params":%s}',
        '{"kv_transfer_params":%s,"model":"m"}',
        '{"model":"m","kv_transfer_par\\u0061ms":%s}',
        '{"model":"m","\\u006bv_transfer_params":%s}',
        '{"model":"m","kv_transfer_params":null,"kv_transfer_params":%s}',
        '{"model":"m","kv_transfer_params":%s,"kv_transfer_par\\u0061ms":{}}',
        ' {\n"model" : "m" , "kv_transfer_params"\t:\t%s }\n',
        '{"model":"m","vllm_xargs":{"kv_transfer_params":%s}}',
        '{"model":"m","vllm_xargs":{"kv_transfer_p\\u0061rams":%s,"a":1}}',
        '{"model":"m","vllm_x\\u0061rgs":{},"vllm_xargs":{"kv_transfer_params":%s}}',
        '{"model":"m","ec_transfer_params":%s}',
        '{"model":"m","vllm_xargs":{"ec_transfer_params":%s}}',
    ],
)
def test_a_ticket_that_a_client_sends_is_gone(body):
    parsed = parse_body((body % FORGED).encode())
    for rewritten in (parsed.encode(), parsed.encode_with_ticket("ours")):
        assert b"forged" not in rewritten
        assert b"remote_host" not in rewritten
    assert json.loads(parsed.encode_with_ticket("ours"))["kv_transfer_params"] == {
        "baton_ticket": "ours"
    }


@pytest.mark.parametrize("name", ["x" * 257, "\U0001f600" * 257, "x" * (24 << 20)])
def test_a_models_name_has_at_most_256_characters(name):
    with pytest.raises(InvalidRequestError, match="more than 256 characters"):
        parse_body(json.dumps({"model": name}).encode())


@pytest.mark.parametrize("name", ["x" * 256, "\U0001f600" * 256])
def test_a_models_name_of_256_characters_is_read(name):
    for is_ascii in (True, False):
        body = json.dumps({"model": name}, ensure_ascii=is_ascii).encode()
        assert parse_body(body).model == name


@pytest.mark.parametrize("field", ["model", "cache_salt", "vllm_xargs", "messages"])
def test_what_is_not_utf_8_is_the_clients_fault(field):
    value = b'{"a":"\xff"}' if field == "vllm_xargs" else b'"\xff"'
    body = b'{"model":"m","%s":%s}' % (field.encode(), value)
    with pytest.raises(InvalidRequestError, match="not a JSON object"):
        parse_body(body)


def test_harmless_extra_arguments_are_kept():
    body = b'{"model":"m","vllm_xargs":{"kv_transfer_params":1,"a":[1,2]}}'
    assert json.loads(parse_body(body).encode())["vllm_xargs"] == {"a": [1, 2]}


def test_no_extra_arguments_are_none():
    body = parse_body(b'{"model":"m","vllm_xargs":null}')
    assert find_vllm_field(body) is None
    assert json.loads(body.encode())["vllm_xargs"] == {}


def test_the_prompt_of_the_other_kind_of_completion_is_left_out():
    body = b'{"model":"m","prompt":"a","messages":[{"role":"user","content":"b"}]}'
    assert parse_body(body).fields.keys() == {"model", "prompt", "messages"}
    assert parse_body(body, "", COMPLETIONS_PATH).fields.keys() == {"model", "prompt"}
    assert parse_body(body, "", CHAT_COMPLETIONS_PATH).fields.keys() == {"model", "messages"}


def test_token_ids_that_are_cut_off_may_be_more_than_the_context_holds():
    fields = {"model": "m", "prompt": [5] * 65}
    with pytest.raises(ContextLengthError):
        parse_body(json.dumps(fields).encode()).check_ids(lambda: 64)
    cut = {**fields, "truncate_prompt_tokens": 5}
    parse_body(json.dumps(cut).encode()).check_ids(lambda: 64)
    cut["prompt"] = [5] * (MAX_IDS + 1)
    with pytest.raises(InvalidRequestError):
        parse_body(json.dumps(cut).encode()).check_ids(lambda: 64)


def test_a_field_deeper_down_is_the_clients_own():
    body = b'{"model":"m","metadata":{"kv_transfer_params":1}}'
    assert parse_body(body).encode() == body


def test_of_a_field_given_twice_worker_and_gateway_read_the_same_one():
    parsed = parse_body(b'{"model":"a","mod\\u0065l":"b","stream":false,"stream":true}')
    pairs = json.loads(parsed.encode(), object_pairs_hook=list)
    assert pairs == [("model", "b"), ("stream", True)]
    assert (parsed.model, parsed.stream) == ("b", True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"null", None),
        (b'"text"', None),
        (b'{"model":"m"', None),
        (b'{"model":"m"} trailing', None),
        (b'{"model":"m",}', None),
        (b"{'model':'m'}", None),
        (b'\xff{"model":"m"}', None),
        (b'{"\xff":1,"model":"m"}', None),
        ('{"model":"m"}'.encode("utf-16"), None),
        (b'{"\\ud800":1,"model":"m"}', None),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"model":"m"}', None),
        (b"{}", "model"),
        (b'{"model":null}', "model"),
        (b'{"model":["m"]}', "model"),
        (b'{"model":"m","stream":1}', "stream"),
        (b'{"model":"m","stream":"true"}', "stream"),
        (b'{"model":"m","vllm_xargs":[]}', "vllm_xargs"),
    ],
)
def test_what_is_no_request_is_refused(body, param):
    with pytest.raises(InvalidRequestError) as refused:
        parse_body(body).encode()
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("stream", "expected"),
    [("true", True), (" true ", True), ("false", False), ("null", False)],
)
def test_stream_is_read(stream, expected):
    assert parse_body(f'{{"model":"m","stream":{stream}}}'.encode()).stream is expected


finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
transfer_fields = ["kv_transfer_params", "ec_transfer_params"]
ours = st.sampled_from([*transfer_fields, "model", "stream", "vllm_xargs"])
# Read and checked by the gateway: each has tests of its own. Hypothesis finds these names in src.
read_by_gateway = {"messages", "tools", "tool_choice"}
others = st.text(max_size=10).filter(lambda name: name not in read_by_gateway)


@given(
    st.dictionaries(others | ours, json_values, max_size=6),
    st.text(max_size=8),
    st.booleans(),
)
def test_only_our_fields_change(fields, model, ascii_only):
    fields = {**fields, "model": model, "stream": True}
    fields.pop("vllm_xargs", None)
    body = json.dumps(fields, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        parsed = parse_body(body)
    except InvalidRequestError:
        assert any("\ud800" <= char <= "\udfff" for char in str(fields))
        return
    expected = {k: v for k, v in json.loads(body).items() if k not in transfer_fields}
    assert json.loads(parsed.encode()) == expected
    assert json.loads(parsed.encode_with_ticket("t")) == {
        **expected,
        "kv_transfer_params": {"baton_ticket": "t"},
    }


@given(st.binary(max_size=60))
def test_garbage_is_refused_and_nothing_else_happens(body):
    with pytest.raises(InvalidRequestError):
        parse_body(body)


def test_a_fit_request_id_is_kept():
    assert request_id_from([(b"host", b"x"), (b"x-request-id", b"abc-1/2")]) == "abc-1/2"


@pytest.mark.parametrize("unfit", [b"", b"a" * 129, b"a b", b"a\x7f", "é".encode(), b"a\tb"])
def test_an_unfit_request_id_is_replaced(unfit):
    made = request_id_from([(b"x-request-id", unfit)])
    assert made.startswith("req-")


def test_without_a_request_id_each_request_gets_its_own():
    assert request_id_from([]) != request_id_from([])


@pytest.mark.parametrize(
    ("field", "salt"),
    [
        ("", ""),
        (',"cache_salt":"mine"', "mine"),
        (',"cache_salt":null', ""),
        (',"cache_salt":7', ""),
    ],
)
def test_what_keeps_a_clients_kv_apart(field, salt):
    assert parse_body(f'{{"model":"m"{field}}}'.encode()).cache_salt == salt


def test_a_text_that_is_certainly_too_long_is_refused():
    fields = {"model": "m", "prompt": "word " * 40_000}
    body = parse_body(json.dumps(fields).encode())
    body.check_text(lambda: 200_000)
    body.check_text(lambda: None)
    with pytest.raises(ContextLengthError):
        body.check_text(lambda: 199_999)
    truncated = {**fields, "truncate_prompt_tokens": 5}
    parse_body(json.dumps(truncated).encode()).check_text(lambda: 1)
    messages = [{"role": "user", "content": fields["prompt"]}]
    parse_body(json.dumps({"model": "m", "messages": messages}).encode()).check_text(lambda: 1)
    short = parse_body(b'{"model":"m","prompt":"word"}')
    short.check_text(lambda: pytest.fail("a short one needs no look at the workers"))
