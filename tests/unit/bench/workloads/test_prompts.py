"""Prompts are made up, the same ones everywhere for the same seed, as long as they should be."""

from itertools import islice

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.load.client import BodyWriter, RequestStyle
from baton.bench.workloads.requests import Segment, Segments, count_context
from baton.bench.workloads.synthetic import (
    NAMES,
    Calibration,
    PromptWriter,
    TokenIds,
    WorkloadOptions,
    calibrate,
    choose_workload,
)
from baton.errors import ConfigError
from tests.examples import examples

IDS = TokenIds()


def ids_of(seed, *parts):
    return PromptWriter(seed).write_ids(Segments(parts), IDS)


def test_the_same_seed_is_the_same_prompt_on_every_machine():
    assert ids_of("s", Segment("a", 4)) == [1397, 630, 618, 420]  # never to change


@settings(max_examples=examples(15))
@given(st.text(max_size=8), st.text(max_size=8), st.integers(1, 300), st.integers(1, 300))
def test_equal_keys_begin_alike(seed, key, few, many):
    few, many = sorted((few, many))
    short, long = ids_of(seed, Segment(key, few)), ids_of(seed, Segment(key, many))
    assert long[:few] == short
    assert len(long) == many
    assert all(IDS.first <= each < IDS.end for each in long)


def test_other_seeds_and_other_keys_are_other_prompts():
    assert ids_of("s", Segment("a", 16)) != ids_of("t", Segment("a", 16))
    assert ids_of("s", Segment("a", 16)) != ids_of("s", Segment("b", 16))


def test_words_are_as_many_as_the_servers_counts_say():
    prompt = Segments((Segment("a", 100), Segment("b", 50)))
    words = PromptWriter("s").write_words(prompt, Calibration(2.0, 10.0)).split()
    assert len(words) == (100 - 10) / 2 + 50 / 2


def test_an_overhead_larger_than_the_first_part_goes_on_in_the_next():
    prompt = Segments((Segment("a", 4), Segment("b", 50)))
    words = PromptWriter("s").write_words(prompt, Calibration(1.0, 10.0)).split()
    assert len(words) == 1 + (50 - 6)


def test_calibration_is_a_line_through_two_prompts():
    assert calibrate((10, 110), (25, 225)) == Calibration(2.0, 5.0)
    assert calibrate((10, 110), (25, 25)) is None


@pytest.mark.parametrize("name", NAMES)
def test_every_workload_is_the_same_again_and_its_largest_is_the_largest(name):
    workload = choose_workload(name, WorkloadOptions())
    first, again = (list(islice(workload.generate(), 12)) for _ in range(2))
    assert first == again
    most = max(count_context(ask) for conversation in first for ask in conversation.turns)
    assert count_context(workload.largest) == most


def test_shared_prefixes_are_used_equally_often_and_in_no_fixed_order():
    """In a fixed one, workers that take turns would get the same prefixes again and again."""
    options = WorkloadOptions(num_prefixes=4, num_prefix_tokens=8, num_input_tokens=4)
    conversations = list(islice(choose_workload("shared-prefix", options).generate(), 40))
    ids = [
        PromptWriter("s").write_ids(conversation.turns[0].prompt, IDS)
        for conversation in conversations
    ]
    prefixes = [tuple(each[:8]) for each in ids]
    rounds = [tuple(prefixes[at : at + 4]) for at in range(0, 40, 4)]
    assert all(set(each) == set(prefixes) for each in rounds)
    assert len(set(prefixes)) == 4
    assert len(set(rounds)) > 5
    assert len({tuple(each[8:]) for each in ids}) == 40


def test_a_turn_repeats_everything_before_it():
    options = WorkloadOptions(
        num_turns=3, num_prefix_tokens=8, num_input_tokens=4, num_output_tokens=5
    )
    (conversation,) = islice(choose_workload("multi-turn", options).generate(), 1)
    ids = [PromptWriter("s").write_ids(turn.prompt, IDS) for turn in conversation.turns]
    assert [len(each) for each in ids] == [12, 21, 30]
    assert ids[1][:12] == ids[0]
    assert ids[2][:21] == ids[1]


def test_a_pause_is_in_the_description():
    described = [
        choose_workload("multi-turn", WorkloadOptions(pause_s=pause_s)).description
        for pause_s in (None, 0.0, 30.0)
    ]
    assert described == [described[0], described[0], f"{described[0]}, 30 s apart"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nothing", WorkloadOptions()),
        ("fixed", WorkloadOptions(num_input_tokens=0)),
        ("fixed", WorkloadOptions(num_turns=2)),
        ("multi-turn", WorkloadOptions(pause_s=-1.0)),
    ],
)
def test_wishes_that_make_no_sense(name, options):
    with pytest.raises(ConfigError):
        choose_workload(name, options)


def test_a_body_asks_for_an_exact_length_as_a_stream_with_counts():
    writer = BodyWriter(RequestStyle("m", "completions", IDS), PromptWriter("s"))
    ask = choose_workload("balanced", WorkloadOptions()).largest
    body = msgspec.json.decode(writer.prepare(ask).body)
    assert (body["model"], body["stream"], body["max_tokens"]) == ("m", True, 128)
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert len(body["prompt"]) == 512


def test_a_chat_has_words():
    writer = BodyWriter(RequestStyle("m", "chat", Calibration(1.0, 0.0)), PromptWriter("s"))
    body = msgspec.json.decode(
        writer.prepare(choose_workload("balanced", WorkloadOptions()).largest).body
    )
    assert len(body["messages"][0]["content"].split()) == 512
