"""Any answer, in any pieces, cut anywhere: the client's answer is the unbroken one, or an error."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.gateway.errors import ReplayDiffersError, WorkerReportedError
from baton.gateway.stream_record import MAX_RECORD_BYTES, RecordBudget, StreamRecord
from baton.gateway.stream_replay import Replay
from tests.examples import examples
from tests.stream_answers import StreamedAnswer

TEXT = st.text('ab é\n"\\:{}😀', max_size=6)
NUM_ENDING = 3
"""Events of an answer's end: its reason, usage, `[DONE]`."""
ERROR = b'data: {"error":{"message":"x","type":"engine_error"}}\n\n'


@st.composite
def steps(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What each token of a chat's answer adds: text, a log-probability, a part of a tool's call."""
    found: list[dict[str, Any]] = []
    call = 0
    for _ in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["content", "reasoning_content", "call", "arguments", "held"]))
        if kind in {"content", "reasoning_content"}:
            found.append({kind: draw(TEXT)})
        elif kind == "call":
            call += 1
            found.append({"call": call, "name": draw(st.sampled_from(["f", "get"]))})
        elif kind == "arguments" and call:
            found.append({"call": call, "arguments": draw(TEXT)})
        else:
            found.append({})
    return found


def write_events(
    steps: list[dict[str, Any]], sizes: list[int], *, name: str, logprobs: bool
) -> list[bytes]:
    """The answer as a worker sends it: `sizes` tokens in an event."""
    head = {"id": name, "created": len(name), "object": "chat.completion.chunk"}

    def event(choices: list[dict[str, Any]], **more: object) -> bytes:
        return b"data: " + json.dumps({**head, "choices": choices, **more}).encode() + b"\n\n"

    def chunk(delta: dict[str, Any], entries: list[Any] | None = None, finish: str | None = None):
        wanted = None if entries is None else {"content": entries}
        return {"index": 0, "delta": delta, "logprobs": wanted, "finish_reason": finish}

    events = [event([chunk({"role": "assistant", "content": ""})])]
    at = 0
    while at < len(steps):
        size = sizes[at % len(sizes)]
        group = steps[at : at + size]
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for step in group:
            for key in ("content", "reasoning_content"):
                if key in step:
                    delta[key] = delta.get(key, "") + step[key]
            if "call" in step:
                call = calls.setdefault(step["call"], {"index": step["call"], "function": {}})
                if "name" in step:
                    call |= {"id": f"{name}-{step['call']}", "type": "function"}
                    call["function"]["name"] = step["name"]
                else:
                    function = call["function"]
                    function["arguments"] = function.get("arguments", "") + step["arguments"]
        if calls:
            delta["tool_calls"] = list(calls.values())
        entries = [{"token": str(at + i), "logprob": -1.0 / len(name)} for i in range(len(group))]
        if delta or logprobs:
            events.append(event([chunk(delta, entries if logprobs else None)]))
        at += size
    events.append(event([chunk({}, None, "stop")]))
    events.append(event([], usage={"completion_tokens": len(steps)}))
    events.append(b"data: [DONE]\n\n")
    return events


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[start:stop] for start, stop in pairwise(places)]


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 10_000), max_size=6)


@settings(max_examples=examples(150))
@given(steps(), SIZES, SIZES, CUTS, CUTS, st.data(), st.booleans())
def test_a_replay_adds_what_the_client_lacks_and_nothing_twice(
    steps: list[dict[str, Any]],
    sizes: list[int],
    other_sizes: list[int],
    cuts: list[int],
    other_cuts: list[int],
    data: st.DataObject,
    logprobs: bool,
) -> None:
    first = b"".join(write_events(steps, sizes, name="first", logprobs=logprobs))
    second = b"".join(write_events(steps, other_sizes, name="another", logprobs=logprobs))
    unbroken = StreamedAnswer().read_all(first)
    lost_at = data.draw(st.integers(0, len(first)))

    record = StreamRecord(RecordBudget(1 << 20), 1 << 20)
    record.begin(has_ids=False)
    sent = b"".join(map(record.take, in_pieces(first[:lost_at], cuts)))
    assert StreamedAnswer().read_all(sent).num_events == first[:lost_at].count(b"\n\n")
    if sent.endswith(b"[DONE]\n\n"):
        return
    record.begin(has_ids=False, replay=Replay(record.events))
    more = b"".join(map(record.take, in_pieces(second, other_cuts)))
    assert record.failure is None

    whole = StreamedAnswer().read_all(sent + more)
    assert len(whole.ids) == 1 or not sent
    same = {"ids": set(), "num_events": 0, "logprobs": []}
    assert replace(whole, **same) == replace(unbroken, **same)
    assert len(whole.logprobs) == len(unbroken.logprobs)


@given(steps(), SIZES, SIZES, st.data())
def test_another_answer_is_found_out_before_anything_of_it_is_sent(
    steps: list[dict[str, Any]], sizes: list[int], other_sizes: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(steps)))
    changed = [*steps[:at], {"content": "Z"}, *steps[at:]]
    first = write_events(changed, sizes, name="first", logprobs=False)
    num_sent = data.draw(st.integers(0, len(first) - NUM_ENDING))
    sent = b"".join(first[:num_sent])
    record = StreamRecord(RecordBudget(1 << 20), 1 << 20)
    record.begin(has_ids=False, replay=Replay(sent))
    second = write_events(steps, other_sizes, name="b", logprobs=False)
    more = b""
    for event in second:
        more += record.take(event)
        if record.failure is not None:
            break
    if b"Z" in sent:
        assert isinstance(record.failure, ReplayDiffersError)
        assert not more


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), max_size=8), CUTS, st.data())
def test_the_tokens_that_are_kept_are_those_of_the_events_that_were_sent(
    tokens: list[list[int]], cuts: list[int], data: st.DataObject
) -> None:
    events = [b'data: {"choices":[],"n":%d}\n\n' % number for number in range(len(tokens))]
    lines = [b":%b\n" % ",".join(map(str, ids)).encode() for ids in tokens]
    opening = b'data: {"role":1}\n\n'
    stream = opening + b"".join(map(b"".join, zip(lines, events, strict=True)))
    lost_at = data.draw(st.integers(0, len(stream)))
    record = StreamRecord(RecordBudget(1 << 20), 1 << 20)
    record.begin(has_ids=True)
    sent = b"".join(map(record.take, in_pieces(stream[:lost_at], cuts)))
    num_sent = max(0, sent.count(b"\n\n") - 1)
    assert sent == b"".join([opening, *events])[: len(sent)]
    assert record.read_token_ids() == [i for ids in tokens[:num_sent] for i in ids]


@given(
    st.lists(st.lists(st.integers(0, 9999), min_size=1, max_size=3), min_size=1, max_size=6),
    st.data(),
)
def test_tokens_of_a_comment_without_its_event_are_known_where_a_replay_follows(
    groups: list[list[int]], data: st.DataObject
) -> None:
    comment = b":" + b",".join(", ".join(map(str, group)).encode() for group in groups)
    whole = comment + b'\ndata: {"choices":[{"index":0,"text":"a"}]}\n\n'
    at = data.draw(st.integers(1, len(whole) - 1))
    records = [StreamRecord(RecordBudget(1 << 20), 1 << 20) for _ in range(2)]
    ids = [number for group in groups for number in group]
    for has_events, record in enumerate(records):
        record.begin(has_ids=True, has_events=bool(has_events))
        assert record.take(whole[:at]) == b""
        known = ids[: comment[:at].count(b",")] if has_events else []
        assert record.read_token_ids() == known  # never a part of a number
        assert record.num_ids == len(known)
        assert record.take(whole[at:]) == whole[len(comment) + 1 :]
        assert record.read_token_ids() == ids
        sizes = [len(group) for group in groups]
        assert record.read_group_sizes() == (sizes if max(sizes) > 1 else None)
    again = records[1]
    again.take(b":1,2")
    again.begin(has_ids=True, has_events=True, replay=Replay(again.events))
    assert again.read_token_ids() == [*ids, 1]


def test_what_waits_for_an_event_stays_short_however_many_tokens_have_none() -> None:
    budget = RecordBudget(1 << 20)
    record = StreamRecord(budget, 1000)
    record.begin(has_ids=True, has_events=True)
    ids = list(range(20_000))
    assert record.take(b":") == b""
    for at in range(0, len(ids), 4):
        assert record.take(b"%d,%d,%d,%d," % tuple(ids[at : at + 4])) == b""
        assert record.num_ids == at + 4
    assert record.failure is None
    assert record.read_token_ids() == ids
    assert budget.num_bytes >= 100_000, "they are kept"
    assert record.take(b"1\ndata: {}\n\n") == b"data: {}\n\n"
    assert record.read_token_ids() == [*ids, 1]
    record.close()
    assert budget.num_bytes == 0


def test_tokens_are_counted_once() -> None:
    def measure_s(num_ids: int) -> float:
        record = StreamRecord(RecordBudget(4 << 20), 4 << 20)
        record.begin(has_ids=True)
        record.take(b":%b\ndata: {}\n\n" % b",".join([b"1"] * num_ids))
        assert record.num_ids == num_ids
        began = time.thread_time()
        assert {record.num_ids for _ in range(100)} == {num_ids}
        return time.thread_time() - began

    assert measure_s(500_000) < 20 * measure_s(5)


def test_an_answer_that_begins_anew_has_none_of_the_tokens_before() -> None:
    budget = RecordBudget(1 << 20)
    record = StreamRecord(budget, 1 << 20)
    for begun in (b":5\n" + ERROR, b":6,7,8"):
        record.begin(has_ids=True, has_events=True)
        assert record.take(begun) == b""
    record.begin(has_ids=True, has_events=True)
    assert (record.read_token_ids(), record.num_ids) == ([], 0)
    assert record.take(b":9\ndata: {}\n\n") == b"data: {}\n\n"
    assert (record.read_token_ids(), record.num_ids) == ([9], 1)
    record.close()
    assert budget.num_bytes == 0


@given(st.integers(0, 8), CUTS, CUTS, st.data())
def test_a_replay_names_its_tokens_again(
    num_tokens: int, cuts: list[int], other_cuts: list[int], data: st.DataObject
) -> None:
    def write(name: str) -> bytes:
        event = b':%d\ndata: {"id":"%b","choices":[{"index":0,"text":"%d"}]}\n\n'
        return b"".join(event % (number, name.encode(), number) for number in range(num_tokens))

    whole = write("first")
    lost_at = data.draw(st.integers(0, len(whole)))
    record = StreamRecord(RecordBudget(1 << 20), 1 << 20)
    record.begin(has_ids=True, has_events=True)
    sent = b"".join(map(record.take, in_pieces(whole[:lost_at], cuts)))
    known = record.read_token_ids()
    assert known == list(range(sent.count(b"\n\n")))
    assert record.events == sent
    for name in ("second", "third"):  # the second is lost, too
        record.begin(has_ids=True, has_events=True, replay=Replay(record.events))
        assert record.read_token_ids() == known
        whole = write(name)
        if name == "second":
            whole = whole[: data.draw(st.integers(0, len(whole)))]
        sent += b"".join(map(record.take, in_pieces(whole, other_cuts)))
        known = record.read_token_ids()
        assert known == list(range(sent.count(b"\n\n")))
    assert record.read_token_ids() == list(range(num_tokens))
    texts = [json.loads(each[6:])["choices"][0]["text"] for each in split(sent)]
    assert texts == list(map(str, range(num_tokens)))


@pytest.mark.parametrize("gap", ["", " "])
def test_what_follows_a_replay_is_passed_on_as_it_is_under_the_first_name(gap: str) -> None:
    def write(name: str, created: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        event = {"id": name, "created": created, "choices": [choice], "usage": None}
        return b"data: " + json.dumps(event, separators=("," + gap, ":" + gap)).encode() + b"\n\n"

    role = {"role": "assistant", "content": ""}
    names = '"id":"b" "created":2'  # as a text, it is none of the head
    record = StreamRecord(RecordBudget(1 << 20), 1 << 20)
    record.begin(has_ids=False)
    for delta in (role, {"content": "a"}):
        record.take(write("a", 1, delta))
    replay = Replay(record.events)
    assert replay.take(write("b", 2, role) + write("b", 2, {"content": "a"})) == b""
    for more in ({"content": names}, {"content": ""}):
        assert replay.take(write("b", 2, more)) == write("a", 1, more)
    end = write("b", 2, {}, "stop") + b"data: [DONE]\n\n"
    assert replay.take(end) == write("a", 1, {}, "stop") + b"data: [DONE]\n\n"


def test_of_several_choices_one_that_has_ended_stays_so() -> None:
    def write(name: str, index: int, text: str, finish: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "finish_reason": finish}
        return b"data: " + json.dumps({"id": name, "choices": [choice]}).encode() + b"\n\n"

    replay = Replay(write("a", 0, "x") + write("a", 0, "", "stop") + write("a", 1, "y"))
    assert replay.take(write("b", 0, "x") + write("b", 1, "y")) == b""
    assert replay.take(write("b", 0, "", "stop")) == b""
    assert replay.take(write("b", 1, "z")) == write("a", 1, "z")


def split(events: bytes) -> list[bytes]:
    return events.split(b"\n\n")[:-1]


@given(CUTS)
def test_an_error_is_kept_back_in_whatever_pieces_it_comes(cuts: list[int]) -> None:
    token = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    record = StreamRecord(RecordBudget(1 << 20), 1 << 20)
    record.begin(has_ids=False)
    sent = b""
    for piece in in_pieces(token + ERROR + b"data: [DONE]\n\n", cuts):
        sent += record.take(piece)
        if record.failure is not None:
            break
    assert sent == token
    assert isinstance(record.failure, WorkerReportedError)
    assert record.failure.answer.body == ERROR[6:-2]


def test_what_is_too_long_is_not_kept_and_gives_back_what_it_took() -> None:
    budget = RecordBudget(2 * MAX_RECORD_BYTES)
    record, event = StreamRecord(budget, 1 << 20), b"data: " + b"x" * 100_000 + b"\n\n"
    record.begin(has_ids=False)
    for _ in range(MAX_RECORD_BYTES // len(event) + 2):
        assert record.take(event) == event
    assert not record.is_kept
    assert budget.num_bytes == 0
    assert record.take(event) == event


def test_all_streams_together_keep_no_more_than_the_budget() -> None:
    budget = RecordBudget(300_000)
    records = [StreamRecord(budget, 1 << 20) for _ in range(4)]
    event = b"data: " + b"x" * 90_000 + b"\n\n"
    for record in records:
        record.begin(has_ids=False)
        record.take(event)
        assert budget.num_bytes <= 300_000
    assert [record.is_kept for record in records] == [True, False, False, False]
    for record in records:
        record.close()
    assert budget.num_bytes == 0


def test_an_event_without_end_is_refused() -> None:
    record = StreamRecord(RecordBudget(1 << 20), 1000)
    record.begin(has_ids=False)
    assert record.take(b"data: " + b"x" * 2000) == b""
    assert record.failure is not None


@given(steps(), SIZES, SIZES, st.integers(1, NUM_ENDING - 1), st.data())
def test_of_another_answer_only_the_end_follows_what_has_ended(
    steps: list[dict[str, Any]],
    sizes: list[int],
    other_sizes: list[int],
    num_missing: int,
    data: st.DataObject,
) -> None:
    at = data.draw(st.integers(0, len(steps)))
    first = write_events(steps, sizes, name="first", logprobs=False)
    sent = b"".join(first[:-num_missing])
    record = StreamRecord(RecordBudget(1 << 20), 1 << 20)
    record.begin(has_ids=False, replay=Replay(sent))
    other = [*steps[:at], {"content": "Z"}]
    more = b"".join(map(record.take, write_events(other, other_sizes, name="b", logprobs=False)))
    assert record.failure is None
    assert [b'"usage"' in event for event in split(more)] == [True, False][-num_missing:]
    whole = StreamedAnswer().read_all(sent + more)
    assert (len(whole.ids), len(whole.usages), whole.is_done) == (1, 1, True)
