"""The load generator against a scripted server: what is counted, what fails, when it stops."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from baton.bench.files import LineFile, open_manifest
from baton.bench.load.client import open_target
from baton.bench.load.job import Job, run_load
from baton.bench.load.plan import Closed, Limits, LoadPlan, Open, Replay
from baton.bench.load.records import Record, Slo
from baton.bench.load.server_check import RequestOptions, UnusableServerError
from baton.bench.workloads.requests import Conversation
from baton.bench.workloads.synthetic import Lengths, MultiTurn, fixed_lengths, multi_turn
from baton.bench.workloads.traces import TraceFile, read_trace
from baton.clock import MachineClock
from baton.errors import ConfigError, PeerUnreachableError
from tests.integration.scripted_openai import ScriptedServer, answering

LENGTHS = Lengths(20, 4)
WORKLOAD = fixed_lengths(LENGTHS)
NUM_SURVEYED = 2
"""Requests of the survey, where token ids are taken: a small one, and the largest."""


def plan_of(load, num_requests=10, duration_s=None, drain_s=10.0, timeout_s=10.0, num_warm_up=0):
    return LoadPlan(load, Limits(num_requests, duration_s, drain_s, timeout_s), num_warm_up)


def job_of(url, plan=None, workload=WORKLOAD, **request_options):
    target = open_target(url, "the-key")
    plan = plan or plan_of(Closed(2))
    return Job(target, RequestOptions(**request_options), workload, "seed", plan, Slo(ttft_s=5.0))


def run(job):
    clock = MachineClock()
    return run_load(job, open_manifest(["bench", "serve"], clock), clock)


def measure(server, plan=None, workload=WORKLOAD, **request_options):
    async def go():
        async with server.running() as at:
            return await run(job_of(at.url, plan, workload, **request_options))

    return asyncio.run(go())


def kinds_of(report):
    return {each.kind: each.num for each in report.figures.failures}


def after_survey(script):
    """The survey is answered well; then the script."""

    async def chosen(ask):
        await (answering() if ask.number < NUM_SURVEYED else script)(ask)

    return ScriptedServer(chosen)


def test_a_closed_loop_keeps_so_many_under_way_and_counts_all():
    server = ScriptedServer(answering(0.01))
    report = measure(server, plan_of(Closed(3), 12, num_warm_up=3))
    figures = report.figures
    assert (figures.num_complete, figures.num_failed, figures.num_cut) == (12, 0, 0)
    assert (figures.num_prompt_tokens, figures.num_output_tokens) == (240, 48)
    assert len(server.asks) == NUM_SURVEYED + 3 + 12
    assert server.most_at_once == 3
    assert figures.itl_s.num == 12 * 3
    assert figures.goodput.share == 1.0
    assert report.server.model == "scripted"
    assert report.warnings == ()
    assert {len(ask.body["prompt"]) for ask in server.asks[NUM_SURVEYED:]} == {20}
    prompts = {json.dumps(ask.body["prompt"]) for ask in server.asks}
    assert len(prompts) == len(server.asks)


def test_what_settles_is_not_counted_and_asked_once():
    server = ScriptedServer(answering(0.01))
    plan = replace(plan_of(Closed(2), num_requests=None, duration_s=0.3), settle_s=0.3)
    report = measure(server, plan)
    num_settling = sum(record.phase == "warm-up" for record in report.records)
    assert num_settling >= 4, "the load ran before"
    assert 4 <= report.figures.num_complete == len(report.records) - num_settling
    prompts = {json.dumps(ask.body["prompt"]) for ask in server.asks}
    assert len(prompts) == len(server.asks)


def test_what_settles_takes_nothing_from_the_number_of_requests():
    plan = replace(plan_of(Closed(2), num_requests=6), settle_s=0.3)
    report = measure(ScriptedServer(answering(0.01)), plan)
    assert sum(record.phase == "warm-up" for record in report.records) >= 4
    assert report.figures.num_complete == 6


def test_the_key_is_sent_and_kept_nowhere():
    server = ScriptedServer()
    report = measure(server)
    assert server.asks[-1].headers["authorization"] == "Bearer the-key"
    assert b"the-key" not in msgspec.json.encode(report)


def test_times_are_in_order():
    report = measure(ScriptedServer(answering(0.02)), plan_of(Closed(1), 3))
    for record in report.records:
        times = (record.sent_s, record.first_byte_s, *record.token_s, record.ended_s)
        assert all(a <= b for a, b in pairwise(times))
        assert record.e2e_s >= 0.06


def test_an_open_loop_does_not_wait_for_the_server():
    server = ScriptedServer(answering(0.2))
    report = measure(server, plan_of(Open(50.0, "constant"), 20))
    assert report.figures.num_complete == 20
    assert server.most_at_once > 5
    due = [record.scheduled_s for record in sorted(report.records, key=lambda each: each.index)]
    assert due == pytest.approx([i / 50 for i in range(20)])


def test_an_open_loop_with_a_bound_holds_back_and_says_for_how_long():
    server = ScriptedServer(answering(0.05))
    report = measure(server, plan_of(Open(200.0, "constant", max_in_flight=2), 10))
    assert server.most_at_once == 2
    assert report.figures.held_s.max > 0.5, "the last ones, for all that are before them"
    assert report.client.late_p99_s < report.figures.held_s.max / 2, "the client is not late"


def test_a_trace_is_played_when_it_was_recorded_faster_if_wanted(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at, "input_length": 600, "output_length": 3, "hash_ids": [1, at]}
        for at in (0, 400, 400, 900)
    ]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    server = ScriptedServer()
    report = measure(server, plan_of(Replay(), 4), read_trace(TraceFile(path, speed=2.0)))
    records = sorted(report.records, key=lambda each: each.index)
    assert [record.scheduled_s for record in records] == [0.0, 0.2, 0.2, 0.45]
    assert all(record.sent_s >= record.scheduled_s for record in records)
    prompts = [ask.body["prompt"] for ask in server.asks[NUM_SURVEYED:]]
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt[512:]) for prompt in prompts}) == 3  # two have the same ids


def test_texts_that_were_sent_before_they_are_measured_are_warned_of(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"url": "/v1/completions", "body": {"prompt": f"hi {at}", "max_tokens": 2}}
        for at in range(4)
    ]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    server = ScriptedServer()
    report = measure(server, plan_of(Closed(2), 4, num_warm_up=2), read_trace(TraceFile(path)))
    prompts = [ask.body["prompt"] for ask in server.asks]
    assert len(prompts) - len(set(prompts)) == 3, "the largest, and two of the warm-up"
    (warning,) = report.warnings
    assert "a prefix cache has them" in warning


def test_turns_follow_their_answers_and_a_failure_ends_a_conversation():
    server = ScriptedServer(answering(0.01))
    workload = multi_turn(MultiTurn(3, 8, LENGTHS))
    report = measure(server, plan_of(Closed(2), 6), workload)
    conversations = {record.conversation for record in report.records}
    assert len(conversations) == 2
    for conversation in conversations:
        turns = sorted(
            (r for r in report.records if r.conversation == conversation), key=lambda r: r.turn
        )
        assert [turn.turn for turn in turns] == [0, 1, 2]
        assert all(a.ended_s <= b.sent_s for a, b in pairwise(turns))


async def error_in_stream(ask):
    await ask.start()
    await ask.tokens(2)
    await ask.event({"error": {"message": "the engine died", "code": "x"}})
    await ask.write(b"data: [DONE]\n\n")
    await ask.end()


async def no_finish_reason(ask):
    await ask.start()
    await ask.tokens(4)
    await ask.finish(4)


async def no_done(ask):
    await ask.start()
    await ask.tokens(3)
    await ask.token("length")
    await ask.end()


async def broken_connection(ask):
    await ask.start()
    await ask.tokens(2)
    raise ConnectionResetError


async def too_slow(ask):
    await ask.start()
    await ask.token()
    await asyncio.sleep(3)


async def overloaded(ask):
    await ask.refuse(503, "no room")


async def nonsense(ask):
    await ask.start()
    await ask.write(b"data: <html>\n\n")
    await ask.end()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (error_in_stream, "error_in_stream"),
        (no_finish_reason, "truncated"),
        (no_done, "truncated"),
        (broken_connection, "lost"),
        (too_slow, "timeout"),
        (overloaded, "refused"),
        (nonsense, "protocol"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_no_whole_answer_is_a_failure(script, kind):
    async def every_other(ask):
        await (script if ask.number % 2 else answering())(ask)

    report = measure(after_survey(every_other), plan_of(Closed(1), 4, timeout_s=1.5))
    assert kinds_of(report) == {kind: 2}
    assert report.figures.num_complete == 2
    assert report.figures.goodput.share == 0.5
    assert not report.is_partial


def test_a_server_that_fails_everything_stops_the_run():
    report = measure(after_survey(overloaded), plan_of(Closed(8), 1000))
    assert "in a row" in report.stopped
    assert {each.example for each in report.figures.failures} == {"HTTP 503: no room"}
    assert report.is_partial
    assert report.figures.num_failed < 200


def test_a_server_that_sheds_load_does_not_stop_the_run():
    async def full(ask):
        is_first = ask.number <= NUM_SURVEYED
        await (answering(0.7) if is_first else overloaded)(ask)

    report = measure(after_survey(full), plan_of(Open(40.0, "constant"), 70))
    assert report.stopped is None
    assert (report.figures.num_complete, report.figures.num_failed) == (1, 69)


def test_cookies_are_not_kept_so_that_no_balancer_sends_all_to_one_server():
    async def sticky(ask):
        headers = [(b"content-type", b"text/event-stream"), (b"set-cookie", b"backend=1")]
        await ask.send({"type": "http.response.start", "status": 200, "headers": headers})
        await ask.tokens(3)
        await ask.token("length")
        await ask.finish(4)

    async def go():
        server = ScriptedServer(sticky)
        async with server.running() as at:
            # No client keeps cookies of an IP address.
            await run(job_of(at.url.replace("127.0.0.1", "localhost")))
        return server.asks

    asks = asyncio.run(go())
    assert len(asks) == NUM_SURVEYED + 10
    assert not any("cookie" in ask.headers for ask in asks)


def test_a_server_that_dies_stops_the_run_and_what_was_measured_is_kept():
    async def go():
        server = ScriptedServer(answering(0.02))
        async with server.running() as at:
            job = job_of(at.url, plan_of(Closed(4), None, duration_s=60))
            running = asyncio.create_task(run(job))
            while len(server.asks) < 30:
                await asyncio.sleep(0.01)
            at.kill()
            return await running

    report = asyncio.run(go())
    assert "the server is gone" in report.stopped
    assert report.figures.num_complete >= 20
    assert {"connect"} <= set(kinds_of(report)) <= {"connect", "lost"}
    assert report.figures.window_s < 50


def test_a_duration_ends_and_what_runs_then_is_drained_or_cut():
    async def slow_once(ask):
        await (too_slow if ask.number == NUM_SURVEYED else answering(0.01))(ask)

    plan = plan_of(Closed(2), None, duration_s=0.5, drain_s=0.3, timeout_s=30.0)
    report = measure(ScriptedServer(slow_once), plan)
    assert report.figures.num_cut == 1
    assert report.figures.num_failed == 0
    assert report.figures.num_complete > 3
    assert 0.5 <= report.figures.window_s < 5
    assert not report.is_partial


def test_records_go_to_a_file_as_they_come(tmp_path):
    async def go():
        async with ScriptedServer().running() as at:
            lines = LineFile(tmp_path / "records.jsonl")
            return await run(replace(job_of(at.url), lines=lines))

    report = asyncio.run(go())
    lines = (tmp_path / "records.jsonl").read_bytes().splitlines()
    assert tuple(msgspec.json.decode(line, type=Record) for line in lines) == report.records


def test_a_server_without_token_ids_is_asked_in_words_of_the_right_number():
    async def words_only(ask):
        if not isinstance(ask.body.get("prompt"), str):
            await ask.refuse(422, "prompt must be a string")
        else:
            await answering()(ask)

    server = ScriptedServer(words_only)
    report = measure(server)
    assert report.server.prompts == "words"
    assert any("must be a string" in each for each in report.warnings)
    assert report.figures.num_prompt_tokens == 10 * 20


def test_a_server_that_refuses_ignore_eos_is_asked_without():
    async def strict(ask):
        if "ignore_eos" in ask.body:
            await ask.refuse(400, "unknown field ignore_eos")
        else:
            await answering()(ask)

    server = ScriptedServer(strict)
    report = measure(server)
    assert not report.server.has_exact_lengths
    assert any("ignore_eos" in each for each in report.warnings)
    assert report.figures.num_complete == 10


def test_chats():
    report = measure(ScriptedServer(), endpoint="chat")
    assert report.server.endpoint == "chat"
    assert report.figures.num_complete == 10


@pytest.mark.parametrize(
    ("server", "request_options", "reported"),
    [
        (ScriptedServer(), {"model": "another"}, "does not serve it; it serves scripted"),
        (ScriptedServer(context=23), {}, "20 tokens in and 4 out"),
        (ScriptedServer(lists_models=False), {}, "--model"),
        (ScriptedServer(overloaded), {"endpoint": "chat", "form": "tokens"}, "text only"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(server, request_options, reported):
    with pytest.raises(ConfigError, match=reported):
        measure(server, **request_options)


def test_a_server_that_says_only_by_refusing_that_a_request_is_too_large():
    async def small(ask):
        if ask.num_prompt_tokens + ask.body["max_tokens"] > 20:
            await ask.refuse(400, "the context holds 20 tokens")
        else:
            await answering()(ask)

    server = ScriptedServer(small, context=None)
    with pytest.raises(ConfigError, match=r"largest request.*context holds 20"):
        measure(server)
    assert len(server.asks) == NUM_SURVEYED


def test_a_server_that_cannot_answer_at_all():
    with pytest.raises(UnusableServerError, match="no room"):
        measure(ScriptedServer(overloaded))


def test_no_server():
    with pytest.raises(PeerUnreachableError, match="Is it up"):
        asyncio.run(run(job_of("http://127.0.0.1:1")))


def test_a_workload_of_no_conversations_ends():
    empty = replace(WORKLOAD, generate=lambda: iter(()), num_requests=0)
    assert measure(ScriptedServer(), workload=empty).figures.num_complete == 0


def test_a_pause_between_turns_is_kept_but_ends_with_the_run():
    requests = next(multi_turn(MultiTurn(3, 8, LENGTHS)).generate()).turns
    workload = replace(WORKLOAD, generate=lambda: iter([Conversation(requests, pause_s=30.0)]))
    report = measure(ScriptedServer(), plan_of(Closed(1), None, duration_s=0.3), workload)
    assert report.figures.num_complete == 1
