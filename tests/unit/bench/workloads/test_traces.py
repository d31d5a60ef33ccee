"""Recorded traffic: three formats, broken lines named and counted."""

import msgspec
import pytest

from baton.bench.load.client import BodyWriter, RequestStyle
from baton.bench.workloads.synthetic import PromptWriter, TokenIds
from baton.bench.workloads.traces import TraceFile, read_trace
from baton.errors import ConfigError

MOONCAKE = [
    {"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [1, 2, 9]},
    {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [1, 4]},
    {"timestamp": 1000, "input_length": 700, "output_length": 0, "hash_ids": []},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
BATCH = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "x", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9},
}


@pytest.fixture
def write(tmp_path):
    def write(*lines, name="trace"):
        path = tmp_path / name
        texts = [
            each if isinstance(each, str) else msgspec.json.encode(each).decode() for each in lines
        ]
        path.write_text("\n".join(texts) + "\n")
        return path

    return write


def asks_of(workload):
    return [conversation.turns[0] for conversation in workload.generate()]


def test_mooncake_by_arrival_with_shared_blocks(write):
    workload = read_trace(TraceFile(write(*MOONCAKE)))
    assert workload.has_arrivals
    assert [conversation.arrival_s for conversation in workload.generate()] == [0.0, 0.0, 2.0]
    requests = asks_of(workload)
    assert [ask.num_prompt_tokens for ask in requests] == [700, 700, 1030]
    assert [ask.num_output_tokens for ask in requests] == [5, 1, 7]
    ids = [PromptWriter("s").write_ids(ask.prompt, TokenIds()) for ask in requests]
    assert ids[0][:512] == ids[2][:512]  # the same hash id
    assert ids[0][512:700] != ids[2][512:700]
    assert ids[1][:512] != ids[0][:512]  # no ids: its own tokens
    assert workload.largest.num_prompt_tokens == 1030
    assert workload.largest.prompt.parts[0].key == "probe"


def test_divided_lengths_keep_what_prompts_share(write):
    workload = read_trace(TraceFile(write(*MOONCAKE), length_divisor=16))
    assert workload.block_tokens == 32
    requests = asks_of(workload)
    assert [ask.num_prompt_tokens for ask in requests] == [32 + 12, 44, 32 + 32 + 1]
    assert [ask.num_output_tokens for ask in requests] == [1, 1, 1]
    ids = [PromptWriter("s").write_ids(ask.prompt, TokenIds()) for ask in requests]
    assert ids[0][:32] == ids[2][:32]
    assert ids[0][32:44] != ids[2][32:44]
    assert workload.largest.num_prompt_tokens == 65


def test_what_changes_the_requests_is_in_the_description(write):
    path = write(*MOONCAKE)
    assert read_trace(TraceFile(path)).description == "3 requests (mooncake)"
    changed = read_trace(TraceFile(path, speed=2.5, length_divisor=16))
    expected = "3 requests (mooncake), 2.5 times as fast, lengths divided by 16"
    assert changed.description == expected


def test_lengths_of_texts_are_not_divided(write):
    with pytest.raises(ConfigError, match="texts"):
        read_trace(TraceFile(write(BATCH), length_divisor=2))


def test_azure(write):
    workload = read_trace(TraceFile(write(AZURE.strip()), speed=2.0))
    conversations = list(workload.generate())
    assert [conversation.arrival_s for conversation in conversations] == [
        0.0,
        pytest.approx(4.314579 / 2, abs=1e-5),
    ]
    assert [conversation.turns[0].num_prompt_tokens for conversation in conversations] == [374, 396]
    assert [conversation.turns[0].num_output_tokens for conversation in conversations] == [44, 109]


def test_openai_batches_keep_their_text_and_get_this_model(write):
    workload = read_trace(TraceFile(write(BATCH)))
    assert not workload.has_arrivals
    writer = BodyWriter(RequestStyle("served", "completions", TokenIds()), PromptWriter("s"))
    prepared = writer.prepare(asks_of(workload)[0])
    body = msgspec.json.decode(prepared.body)
    assert prepared.endpoint == "chat"
    assert body["model"] == "served"
    assert body["messages"][0]["content"] == "hello"
    assert body["max_tokens"] == 9
    assert "ignore_eos" not in body
    assert body["stream"] is True


def test_broken_lines_are_named_and_the_others_are_used(write):
    lines = [MOONCAKE[0]] * 300 + ["{broken", {"timestamp": 1, "input_length": -5}]
    workload = read_trace(TraceFile(write(*lines)))
    assert workload.num_requests == 300
    (warning,) = workload.warnings
    assert "2 broken lines" in warning
    assert "line 301" in warning
    assert "line 302" in warning


def test_more_broken_lines_than_may_be_are_an_error_that_names_them(write):
    path = write(*[MOONCAKE[0]] * 5, "{broken")
    with pytest.raises(ConfigError, match="line 6"):
        read_trace(TraceFile(path))
    assert read_trace(TraceFile(path, max_broken_share=0.5)).num_requests == 5


@pytest.mark.parametrize(
    "line",
    [
        {"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []},
        {"timestamp": 1, "input_length": 10**12, "output_length": 1, "hash_ids": []},
        {"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": []},
        {"timestamp": 1, "input_length": 5, "output_length": -1, "hash_ids": []},
        {"input_length": 5, "output_length": 1, "hash_ids": []},
        {"timestamp": 1e400, "input_length": 5, "output_length": 1, "hash_ids": []},
        "[1, 2]",
        {**BATCH, "url": "/v1/embeddings"},
        {**BATCH, "body": {"max_tokens": 3}},
        {**BATCH, "body": {"messages": [], "max_tokens": "many"}},
        "a,b,c",
        "TIMESTAMP,ContextTokens,GeneratedTokens\nnever,3,4",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,4",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46",
    ],
)
def test_what_is_no_request(write, line):
    with pytest.raises(ConfigError, match="broken"):
        read_trace(TraceFile(write(line), max_broken_share=1.0))


def test_an_empty_file_and_one_that_is_not_there(write, tmp_path):
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(TraceFile(write("")))
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(TraceFile(tmp_path / "nothing"))
    with pytest.raises(ConfigError):
        read_trace(TraceFile(tmp_path))


def test_a_format_that_is_not_the_files_is_an_error(write):
    with pytest.raises(ConfigError, match="--trace-format"):
        read_trace(TraceFile(write(*MOONCAKE), format="openai"))
