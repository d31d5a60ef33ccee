"""Schedules, when to stop, and whether the client was the bottleneck."""

from itertools import islice, pairwise

import msgspec
import numpy as np
import pytest

from baton.bench.load.client import open_target
from baton.bench.load.plan import Open, arrival_times
from baton.bench.load.runner import ClientLoad, judge_client, limit_requests, warm_up_requests
from baton.bench.load.sender import NUM_FAILED, Breaker
from baton.bench.workloads.synthetic import PRESETS, Lengths, MultiTurn, fixed_lengths, multi_turn
from baton.errors import ConfigError
from tests.unit.bench.load.records import cut, failed, whole

CALM = ClientLoad(0.1, 0.01, 0.001, 0.002, 0.01, 0.001, ())


def first_times(load, num, seed=0):
    return list(islice(arrival_times(load, seed), num))


def test_constant_and_burst_arrivals():
    assert first_times(Open(4.0, "constant"), 3) == [0.0, 0.25, 0.5]
    assert first_times(Open(4.0, "burst", 2), 5) == [0.0, 0.0, 0.5, 0.5, 1.0]


def test_poisson_arrivals_have_their_rate_and_their_spread():
    times = first_times(Open(50.0), 20_000)
    gaps = np.array([b - a for a, b in pairwise(times)])
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.05)
    assert times == first_times(Open(50.0), 20_000)
    assert times[:5] != first_times(Open(50.0), 5, seed=1)


def test_a_server_that_is_gone_stops_a_run():
    breaker = Breaker()
    whys = [breaker.count(failed("connect", at, at + 0.01, "refused")) for at in (0, 0.3, 0.6, 0.9)]
    assert whys == [None] * 4
    assert "gone" in breaker.count(failed("connect", 1.2, 1.21, "refused"))


def test_a_burst_of_failures_alone_does_not():
    breaker = Breaker()
    assert all(breaker.count(failed("connect", 0.0, 0.01)) is None for _ in range(500))
    assert all(breaker.count(failed("refused", 0.0, 0.9)) is None for _ in range(500))
    assert "in a row" in breaker.count(failed("refused", 0.9, 1.1))


def test_failures_in_a_row_stop_it_and_one_answer_is_enough_to_go_on():
    breaker = Breaker()
    for at in range(NUM_FAILED - 1):
        assert breaker.count(failed(sent_s=at, ended_s=at + 0.5)) is None
    breaker.count(whole())
    for at in range(NUM_FAILED - 1):
        assert breaker.count(failed(sent_s=at, ended_s=at + 0.5)) is None
    assert breaker.count(cut()) is None
    assert "in a row" in breaker.count(failed(sent_s=30, ended_s=31))


def test_a_server_that_refuses_some_while_it_streams_to_others_does_not_stop_it():
    breaker = Breaker()
    for at in range(10 * NUM_FAILED):
        assert breaker.count(failed(sent_s=at, ended_s=at + 0.1), last_token_s=at - 0.2) is None
    for at in range(NUM_FAILED - 1):  # no more tokens
        assert breaker.count(failed(sent_s=300 + at, ended_s=301 + at), last_token_s=200) is None
    assert "in a row" in breaker.count(failed(sent_s=330, ended_s=331), last_token_s=200)


def test_streams_that_break_stop_it_also_while_others_receive_tokens():
    breaker = Breaker()
    for at in range(NUM_FAILED - 1):
        assert breaker.count(failed("lost", at, at + 0.5), last_token_s=at) is None
    assert "in a row" in breaker.count(failed("lost", 30, 31), last_token_s=31)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"cpu_share": 0.95}, "bottleneck"),
        ({"waited_for_cpu_share": 0.5}, "core of its own"),
        ({"lag_p99_s": 0.2}, "200 ms late"),
        ({"late_p99_s": 1.0}, "after the schedule"),
    ],
)
def test_a_client_that_is_the_bottleneck_says_so(change, reported):
    problems = judge_client(msgspec.structs.replace(CALM, **change)).problems
    assert len(problems) == 1
    assert reported.replace("core of its own", "one of its own") in problems[0]


def test_a_calm_client_has_no_problems():
    assert judge_client(CALM).problems == ()


def test_requests_are_counted_by_turns():
    conversations = multi_turn(MultiTurn(3, 10, Lengths(5, 5))).generate()
    limited = list(limit_requests(conversations, 7))
    assert [len(conversation.turns) for conversation in limited] == [3, 3, 1]


def test_warm_up_prompts_do_not_come_again():
    workload = fixed_lengths(PRESETS["balanced"])
    warm = {ask.prompt.parts[0].key for ask in warm_up_requests(workload, 5)}
    later = {
        conversation.turns[0].prompt.parts[0].key
        for conversation in islice(workload.generate(), 20)
    }
    assert len(warm) == 5
    assert not warm & later
    assert {ask.prompt.num_tokens for ask in warm_up_requests(workload, 5)} == {512}


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://x", "http://", "http://u:p@x", "http://x?a=1", "http://x:99999"],
)
def test_what_is_no_servers_address(url):
    with pytest.raises(ConfigError):
        open_target(url, None)


def test_a_servers_address_in_all_its_spellings_and_its_key_is_not_shown():
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1/", "http://h:1/v1/completions"):
        target = open_target(url, "secret")
        assert target.url("completions") == "http://h:1/v1/completions"
        assert "secret" not in repr(target)
    assert open_target("https://h/base/v1", None).models_url == "https://h/base/v1/models"
