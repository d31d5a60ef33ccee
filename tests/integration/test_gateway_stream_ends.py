"""Streams at their end: what the client has in full is not asked of another worker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.gateway.admission import Admission
from baton.gateway.stream_record import RecordBudget, StreamRecord
from baton.gateway.workers import Worker
from baton.ids import WorkerId
from baton.net.http_exchange import HttpExchange
from baton.router.load import RunningRequest
from tests.integration.gateway_cluster import MODEL, PROMPT, Cluster, run, until, until_true
from tests.integration.scripted_worker import Script, ScriptedWorker, Visit

ASKED = {"model": MODEL, "prompt": "hello", "max_tokens": 9, "stream": True}
DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"id":"x","created":1,"choices":[],"usage":{"completion_tokens":2}}\n\n'


def event(token_id: int, text: str, reason: str = "null") -> bytes:
    choice = f'{{"index":0,"text":"{text}","finish_reason":{reason}}}'
    return f':{token_id}\ndata: {{"id":"x","created":1,"choices":[{choice}]}}\n\n'.encode()


TEXT, FINISH, MORE = event(5, "a"), event(2, "b", '"stop"'), event(7, "WRONG", '"length"')


def stream_of(*parts: bytes, dies: bool = False) -> Script:
    """What a worker sends, part by part; then it ends its answer, or its process."""

    async def play(visit: Visit) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"x-baton-token-ids", b"1")]
        await visit.send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await visit.write(part)
            await asyncio.sleep(0.05)  # so that the gateway reads each by itself
        if dies:
            visit.worker.kill()
        else:
            await visit.send({"type": "http.response.body", "body": b""})

    return play


async def go_on(visit: Visit) -> None:
    """What another worker has to add: nothing but usage, where it is told that the answer ended."""
    is_complete = visit.body["kv_transfer_params"]["baton_resume"].get("is_complete", False)
    await stream_of(*(() if is_complete else (MORE,)), USAGE, DONE)(visit)


def two_decodes(first: Script, second: Script) -> dict[str, Any]:
    workers = [ScriptedWorker("d0", "decode", first), ScriptedWorker("d1", "decode", second)]
    return {"prefills": 0, "decodes": workers}


class TestIsFinished:
    @pytest.mark.parametrize("last", [b"", USAGE, DONE, USAGE + DONE])
    def test_whatever_followed_the_reason(self, last: bytes) -> None:
        record = StreamRecord(RecordBudget(1 << 20), 1 << 20)
        record.begin(has_ids=True)
        for chunk in (TEXT, FINISH, last):
            record.take(chunk)
        assert record.is_finished
        assert not record.can_go_on

    @pytest.mark.parametrize(
        "last", [b'data: {"choices":[]}\n\n', b'data: {"choices":[],"usage":null}\n\n']
    )
    def test_an_event_without_choices_is_no_end(self, last: bytes) -> None:
        record = StreamRecord(RecordBudget(1 << 20), 1 << 20)
        record.begin(has_ids=True)
        for chunk in (TEXT, last):
            record.take(chunk)
        assert not record.is_finished


@pytest.mark.parametrize("has_another", [True, False])
def test_a_worker_dies_between_usage_and_done(has_another: bool) -> None:
    async def scenario(cluster: Cluster) -> None:
        async with cluster.post(ASKED) as response:
            body = await response.read()
        assert body.endswith(USAGE + DONE)
        assert (body.count(USAGE), body.count(DONE)) == (1, 1)
        assert b"error" not in body
        assert not any(other.visits for other in cluster.decodes[1:]), "nothing was missing"

    dies = stream_of(TEXT, FINISH, USAGE, dies=True)
    if has_another:
        run(scenario, **two_decodes(dies, go_on))
    else:
        run(scenario, prefills=0, decodes=[ScriptedWorker("d0", "decode", dies)])


def test_a_worker_dies_between_the_last_token_and_usage() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with cluster.post(ASKED) as response:
            body = await response.read()
        assert len(cluster.decodes[1].visits) == 1
        assert b"WRONG" not in body
        assert body.endswith(USAGE + DONE)

    run(scenario, **two_decodes(stream_of(TEXT, FINISH, dies=True), go_on))


def test_a_worker_is_given_up_while_its_client_takes_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client does not read: the gateway has written `[DONE]`, and waits for room."""
    stalled, room = asyncio.Event(), asyncio.Event()
    write, drain = HttpExchange.write, HttpExchange.drain

    def write_until_full(self: HttpExchange, body: bytes) -> bool:
        takes_more = write(self, body)
        if body.endswith(DONE) and not room.is_set():
            stalled.set()
            return False  # as with more bytes than the socket and the buffers take
        return takes_more

    async def wait_for_room(self: HttpExchange) -> None:
        if stalled.is_set():
            await room.wait()
        await drain(self)

    monkeypatch.setattr(HttpExchange, "write", write_until_full)
    monkeypatch.setattr(HttpExchange, "drain", wait_for_room)
    abandoned: list[str] = []
    abandon = Worker.abandon

    def note_abandoned(self: Worker, reason: str) -> None:
        if self.is_waited_for:
            abandoned.append(reason)
        abandon(self, reason)

    monkeypatch.setattr(Worker, "abandon", note_abandoned)

    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes

        async def ask() -> bytes:
            async with cluster.post(ASKED) as response:
                return await response.read()

        asking = asyncio.create_task(ask())
        await asyncio.wait_for(stalled.wait(), 20)
        first.health_status = 500

        async def is_given_up() -> bool:
            return await cluster.metric("baton_gateway_worker_up{") == 1

        await until_true(is_given_up)
        await until(lambda: abandoned)
        await asyncio.sleep(0.5)  # another worker would be asked
        room.set()
        body = await asking
        assert not second.visits, "nothing was missing"
        assert body.count(DONE) == 1
        assert b"error" not in body
        assert b"WRONG" not in body

    workers = two_decodes(stream_of(TEXT, FINISH, USAGE + DONE), stream_of(MORE, DONE))
    run(scenario, abandon_after_s=0.4, **workers)


def test_streams_of_several_answers_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    nums: list[int] = []
    end = RunningRequest.end

    def note(self: RunningRequest, now: Any, num_streamed: int = 0, *more: Any) -> None:
        nums.append(num_streamed)
        end(self, now, num_streamed, *more)

    monkeypatch.setattr(RunningRequest, "end", note)

    async def scenario(cluster: Cluster) -> None:
        async with cluster.post({**ASKED, "prompt": ["a", "b"]}) as response:
            await response.read()
        await until(lambda: len(nums) == 2)
        assert all(num >= 4 for num in nums), nums

    five = stream_of(TEXT, TEXT, TEXT, TEXT, FINISH, DONE)
    run(scenario, **two_decodes(five, five))


def test_a_retry_passes_over_workers_that_are_full_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which were full when it was admitted is of no interest."""
    full, look = {"d1"}, Admission._look
    monkeypatch.setattr(
        Admission,
        "_look",
        lambda *each: replace(look(*each), full=frozenset(map(WorkerId, full))),
    )

    async def dies(visit: Visit) -> None:
        full.clear()
        full.add("d2")
        visit.worker.kill()

    workers = [
        ScriptedWorker("d0", "decode", dies),
        ScriptedWorker("d1", "decode", stream_of(TEXT, FINISH, DONE)),
        ScriptedWorker("d2", "decode", stream_of(TEXT, FINISH, DONE)),
    ]

    async def scenario(cluster: Cluster) -> None:
        async with cluster.post(ASKED) as response:
            assert response.status == 200
            await response.read()
        assert len(workers[1].visits) == 1
        assert not workers[2].visits

    run(scenario, prefills=0, decodes=workers)


def test_a_failed_request_whose_wait_is_over_is_told_when_to_come_again() -> None:
    """Of two workers the one was away before, and the other dies under the request."""

    async def dies(visit: Visit) -> None:
        visit.worker.kill()

    async def scenario(cluster: Cluster) -> None:
        cluster.decodes[0].kill()

        async def is_one_up() -> bool:
            return await cluster.metric("baton_gateway_worker_up{") == 1

        await until_true(is_one_up)
        async with cluster.post(PROMPT) as response:
            answer = await response.json()
        assert len(cluster.decodes[1].visits) == 1
        assert response.status == 503, answer
        assert "retry-after" in response.headers

    run(scenario, **two_decodes(dies, dies))
