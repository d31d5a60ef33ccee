"""What happens when workers fail: time is lost, never a request, and nobody hangs."""

from __future__ import annotations

import asyncio
import io
import json
import time
from typing import Any

import pytest

from baton.gateway.targets import Targets
from baton.ids import new_epoch
from baton.router.failover import LEAST_RETRIES, PER_SECOND
from baton.router.health import APART_S, REQUESTS_TO_EJECT
from tests.integration.gateway_cluster import (
    JSON,
    PROMPT,
    STREAM,
    Cluster,
    after_prefill,
    run,
    until,
    until_true,
)
from tests.integration.scripted_worker import (
    MODEL,
    ScriptedWorker,
    Visit,
    never_answer,
    one_token_and_wait,
    recompute_when_aborted,
    say_abc,
    start_and_wait,
)


def errors_in(text: str) -> list[str]:
    events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [e["error"]["code"] for e in map(json.loads, events) if "error" in e]


async def streamed(cluster: Cluster, body: object = STREAM) -> str:
    async with cluster.post(body) as response:
        assert response.status == 200
        return await response.text()


# Prefill fails: decode is told, and recomputes ---------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "cause"),
    [
        (503, "overloaded", "prefill_overloaded"),
        (502, "handoff_failed", "handoff_failed"),
        (500, "internal_error", "prefill_failed"),
        (409, "something_else", "prefill_rejected"),
    ],
)
def test_prefill_answers_an_error(status, code, cause):
    async def refuse(visit: Visit):
        await visit.fail(status, code)

    async def scenario(cluster: Cluster):
        cluster.prefills[0].script = refuse
        cluster.decodes[0].script = recompute_when_aborted
        text = await streamed(cluster)
        assert text.count("data: ") == 4
        assert text.endswith("[DONE]\n\n")
        assert not errors_in(text)
        ticket, reason = cluster.decodes[0].aborts[0]
        assert ticket == cluster.decodes[0].visits[0].ticket.id.hex()
        assert str(status) in reason
        assert await cluster.metric(f'baton_gateway_fallbacks_total{{cause="{cause}"}}') == 1
        assert await cluster.metric('baton_gateway_requests_total{code="200",mode="push"') == 1

    run(scenario)


@pytest.mark.parametrize("status", [401, 403])
def test_a_decode_worker_that_refuses_the_ticket_serves_without_one(status):
    async def scenario(cluster: Cluster):
        async def refuse(visit: Visit):
            if visit.ticket is not None:
                await visit.fail(status, "invalid_ticket")
            else:
                await say_abc(visit)

        cluster.decodes[0].script = refuse
        text = await streamed(cluster)
        assert text.endswith("[DONE]\n\n")
        assert not errors_in(text)
        fallbacks = 'baton_gateway_fallbacks_total{cause="ticket_refused"}'
        assert await cluster.metric(fallbacks) == 1

    run(scenario)


def test_an_error_has_one_content_type():
    async def refuse(visit: Visit):
        await visit.fail(503, "overloaded")

    async def scenario(cluster: Cluster):
        for decode in cluster.decodes:
            decode.script = refuse
        async with cluster.post(PROMPT) as response:
            assert response.status == 503
            assert response.headers.getall("content-type") == ["application/json"]

    run(scenario)


def test_kv_that_decode_does_not_want_is_no_failure():
    async def decline(visit: Visit):
        await visit.fail(502, "handoff_declined")

    async def scenario(cluster: Cluster):
        cluster.prefills[0].script = decline
        assert (await streamed(cluster)).endswith("[DONE]\n\n")
        await asyncio.sleep(0.1)
        assert not cluster.decodes[0].aborts
        assert await cluster.metric("baton_gateway_fallbacks_total") == 0

    run(scenario)


def test_prefill_cannot_be_reached():
    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = recompute_when_aborted
        cluster.prefills[0].kill()
        assert (await streamed(cluster)).endswith("[DONE]\n\n")
        assert cluster.decodes[0].aborts
        cause = '{cause="prefill_unreachable"}'
        assert await cluster.metric("baton_gateway_fallbacks_total" + cause) == 1

        cluster.decodes[0].script = say_abc  # now it is known: no ticket, no abort
        await streamed(cluster)
        assert cluster.decodes[0].visits[-1].ticket is None
        cause = '{cause="prefill_unavailable"}'
        assert await cluster.metric("baton_gateway_fallbacks_total" + cause) == 1

    run(scenario, probe_interval_s=30)


def test_prefill_dies_while_it_computes():
    async def scenario(cluster: Cluster):
        cluster.prefills[0].script = never_answer
        cluster.decodes[0].script = recompute_when_aborted
        asyncio.get_running_loop().call_later(0.2, cluster.prefills[0].kill)
        assert (await streamed(cluster)).endswith("[DONE]\n\n")
        cause = '{cause="prefill_lost"}'
        assert await cluster.metric("baton_gateway_fallbacks_total" + cause) == 1

    run(scenario)


def test_an_abort_that_overtakes_its_request_is_repeated():
    async def late_admission(visit: Visit):
        visit.worker.visits.remove(visit)
        await until(lambda: visit.worker.aborts)  # the first one finds nobody
        visit.worker.visits.append(visit)
        await recompute_when_aborted(visit)

    async def refuse(visit: Visit):
        await visit.fail(503, "overloaded")

    async def scenario(cluster: Cluster):
        cluster.prefills[0].script = refuse
        cluster.decodes[0].script = late_admission
        assert (await streamed(cluster)).endswith("[DONE]\n\n")
        assert len(cluster.decodes[0].aborts) >= 2

    run(scenario)


def test_a_request_that_both_refuse_is_the_clients_error():
    async def refuse(visit: Visit):
        await visit.fail(400, "context_length_exceeded")

    async def scenario(cluster: Cluster):
        cluster.prefills[0].script = cluster.decodes[0].script = refuse
        async with cluster.post(STREAM) as response:
            assert response.status == 400
            error = (await response.json())["error"]
            assert error["code"] == "context_length_exceeded"
        _, listed = await cluster.get_json("/debug/requests")
        (record,) = listed["requests"]
        assert (record["status"], record["outcome"]) == (400, f"error: {error['message']}")

    run(scenario)


@pytest.mark.parametrize(
    "named",
    [
        {"code": "context_length_exceeded"},
        {"code": 400, "param": "input_tokens"},
        {"code": 400, "param": "input_text"},
    ],
)
@pytest.mark.parametrize("body", [PROMPT, STREAM])
def test_what_does_not_fit_one_worker_goes_to_one_with_more_room(body, named):
    error = {"message": "too long", "type": "invalid_request_error", "param": None, **named}

    async def refuse(visit: Visit):
        await visit.answer(400, {"error": error})

    async def scenario(cluster: Cluster):
        for _ in range(2):
            async with cluster.post(body) as response:
                assert response.status == 200
                assert b"error" not in await response.read()
        assert len(large.visits) == 2
        fallbacks = 'baton_gateway_fallbacks_total{cause="context_too_small"}'
        assert await cluster.metric(fallbacks) == len(small.visits) > 0
        large.script = refuse
        for _ in range(2):
            async with cluster.post(body) as response:
                assert response.status == 400
                assert (await response.json())["error"] == error
        assert len(large.visits) == 4

    small = ScriptedWorker("small", "decode", refuse, max_context_tokens=256)
    large = ScriptedWorker("large", "decode", say_abc)
    run(scenario, prefills=0, decodes=[small, large])


# Decode fails before an answer: another one is asked ----------------------------------------------


def test_decode_cannot_be_reached():
    async def scenario(cluster: Cluster):
        cluster.prefills[0].script = never_answer
        cluster.decodes[0].kill()
        cluster.decodes[1].script = after_prefill(cluster, say_abc)
        text = await streamed(cluster)
        assert text.endswith("[DONE]\n\n")
        assert not errors_in(text)
        *before, last = cluster.prefills[0].visits
        assert last.ticket.decode.worker == "decode-1"
        for first in before:  # none, where decode was found out before prefill was asked
            assert first.ticket.decode.worker == "decode-0"
            assert first.ticket.id != last.ticket.id
            await until(lambda first=first: first.left_at)  # it was cancelled
        cause = '{cause="decode_unreachable"}'
        assert await cluster.metric("baton_gateway_fallbacks_total" + cause) == 1

    run(scenario, decodes=2, probe_interval_s=30)


@pytest.mark.parametrize("script", [never_answer, start_and_wait])
def test_decode_dies_before_the_first_token(script):
    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = script
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, cluster.decodes[0].kill)
        text = await streamed(cluster)
        assert text.count("data: ") == 4
        assert not errors_in(text)
        assert len(cluster.decodes[1].visits) == 1

    run(scenario, decodes=2)


def test_the_second_decode_worker_fails_too():
    async def scenario(cluster: Cluster):
        for decode in cluster.decodes:
            decode.kill()
        async with cluster.post(STREAM) as response:
            assert response.status == 502
            error = (await response.json())["error"]
            assert error["code"] == "worker_failed"
            assert cluster.decodes[1].url in error["message"]

    run(scenario, decodes=3, probe_interval_s=30)


def test_the_only_decode_worker_cannot_be_reached():
    async def scenario(cluster: Cluster):
        cluster.decodes[0].kill()
        for _ in range(2):  # it is found out with the first one
            async with cluster.post(STREAM) as response:
                assert response.status == 503
                assert int(response.headers["retry-after"]) >= 1
                assert (await response.json())["error"]["code"] == "no_worker"

    run(scenario, probe_interval_s=30)


def test_an_overloaded_decode_worker_is_passed_over():
    async def refuse(visit: Visit):
        await visit.fail(503, "overloaded")

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = refuse
        assert (await streamed(cluster)).endswith("[DONE]\n\n")
        _, demand = await cluster.get_json("/debug/demand")
        assert demand["models"][0]["num_begun"] == 1, "a retry is no new request"

    run(scenario, decodes=2)


def test_a_fleet_that_fails_gets_a_bounded_number_of_retries():
    """Else it would get twice the load when it can bear none."""

    async def fail(visit: Visit):
        await visit.fail(500, "engine_failed")

    async def scenario(cluster: Cluster):
        for decode in cluster.decodes:
            decode.script = fail
        begun = time.monotonic()
        for _ in range(40):
            async with cluster.post(STREAM) as response:
                assert response.status in {500, 502}
        num_asked = sum(len(decode.visits) for decode in cluster.decodes)
        refused = await cluster.metric("baton_gateway_refused_retries_total")
        granted = LEAST_RETRIES + 40 * 0.2 + (time.monotonic() - begun) * PER_SECOND
        assert 40 < num_asked <= 40 + granted
        assert refused == 40 - (num_asked - 40)

    run(scenario, decodes=2)


def test_the_requests_of_a_worker_that_dies_take_turns_with_their_retries():
    num_requests, num_retrying, most_retrying = 40, 0, 0
    all_arrived, all_retried = asyncio.Event(), asyncio.Event()

    async def scenario(cluster: Cluster):
        failing, other = cluster.decodes

        def num_visits() -> int:
            return len(failing.visits) + len(other.visits)

        def is_retry(visit: Visit) -> bool:
            request_id = visit.headers["x-request-id"]
            return any(each.headers["x-request-id"] == request_id for each in failing.visits)

        async def fail_together(visit: Visit):
            if num_visits() == num_requests:
                all_arrived.set()
            await all_arrived.wait()
            await visit.fail(500, "engine_failed")

        async def serve(visit: Visit):
            nonlocal num_retrying, most_retrying
            if num_visits() == num_requests:
                all_arrived.set()
            if is_retry(visit):
                num_retrying += 1
                most_retrying = max(most_retrying, num_retrying)
                await asyncio.sleep(0.01)
                num_retrying -= 1
                if num_visits() == num_requests + len(failing.visits):
                    all_retried.set()
            else:
                await all_retried.wait()
            await say_abc(visit)

        failing.script, other.script = fail_together, serve
        answers = await asyncio.gather(*(streamed(cluster) for _ in range(num_requests)))
        assert all(answer.endswith("[DONE]\n\n") for answer in answers)
        assert len(failing.visits) == num_requests // 2
        assert 1 < most_retrying <= 0.2 * num_requests
        assert await cluster.metric("baton_gateway_refused_retries_total") == 0

    run(scenario, decodes=2)


def test_the_only_decode_worker_is_overloaded():
    async def refuse(visit: Visit):
        error = {"message": "full", "type": "server_error", "code": "overloaded", "param": None}
        await visit.answer(503, {"error": error}, (b"retry-after", b"7"))

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = refuse
        async with cluster.post(STREAM) as response:
            assert response.status == 503
            assert response.headers["retry-after"] == "7"
            assert (await response.json())["error"]["message"] == "full"
        assert await cluster.metric("baton_gateway_worker_up{") == 2, "overloaded is not down"

    run(scenario)


# Decode fails in the middle of an answer ----------------------------------------------------------


def test_decode_dies_in_mid_stream():
    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = one_token_and_wait
        async with cluster.post(STREAM) as response:
            first = await response.content.readany()
            cluster.decodes[0].kill()
            rest = (await response.read()).decode()
        assert first.startswith(b"data: ")
        assert errors_in(rest) == ["worker_failed"]
        assert rest.endswith("\n\ndata: [DONE]\n\n")
        assert not cluster.decodes[1].visits, "half an answer is not begun again"
        cause = '{cause="worker_lost"}'
        assert await cluster.metric("baton_gateway_broken_streams_total" + cause) == 1

    run(scenario, decodes=2)


def test_decode_hangs_in_mid_stream():
    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = one_token_and_wait
        async with cluster.post(STREAM) as response:
            first = await response.content.readany()
            cluster.decodes[0].health_status = 500  # connected, and not well
            rest = (await response.read()).decode()
        assert first.startswith(b"data: ")
        assert errors_in(rest) == ["worker_failed"]
        assert rest.endswith("\n\ndata: [DONE]\n\n")

    run(scenario, abandon_after_s=0.3)


def test_a_request_that_a_hanging_decode_worker_never_answered_goes_elsewhere():
    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = never_answer
        asking = asyncio.create_task(read_all(cluster))
        await until_true(lambda: _is_visited(cluster))
        cluster.decodes[0].health_status = 500
        status, body = await asking
        assert status == 200
        assert body.endswith("data: [DONE]\n\n")
        assert cluster.decodes[1].visits

    async def read_all(cluster: Cluster) -> tuple[int, str]:
        async with cluster.post(STREAM) as response:
            return response.status, (await response.read()).decode()

    async def _is_visited(cluster: Cluster) -> bool:
        return bool(cluster.decodes[0].visits)

    run(scenario, decodes=2, abandon_after_s=0.3)


def test_a_stream_that_ends_without_done_is_broken():
    async def stop_early(visit: Visit):
        await visit.start_stream()
        await visit.token("a")
        await visit.send({"type": "http.response.body", "body": b""})

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = stop_early
        text = await streamed(cluster)
        assert errors_in(text) == ["worker_failed"]
        assert text.endswith("\n\ndata: [DONE]\n\n")

    run(scenario)


def test_of_half_an_event_the_client_gets_nothing():
    async def cut(visit: Visit):
        await visit.start_stream()
        await visit.token("a")
        await visit.write(b'data: {"choices": [')
        await visit.send({"type": "http.response.body", "body": b""})

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = cut
        text = await streamed(cluster)
        assert "[\n" not in text
        assert errors_in(text) == ["worker_failed"]

    run(scenario)


def test_an_answer_in_one_piece_that_is_cut_is_502():
    async def cut(visit: Visit):
        headers = [(b"content-type", b"application/json"), (b"content-length", b"100")]
        await visit.send({"type": "http.response.start", "status": 200, "headers": headers})
        await visit.write(b'{"choices"')
        visit.worker.kill()

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = cut
        async with cluster.post(PROMPT) as response:
            assert response.status == 502

    run(scenario)


def test_an_answer_that_is_too_long_is_502():
    async def scenario(cluster: Cluster):
        async with cluster.post(PROMPT) as response:
            assert response.status == 502

    run(scenario, max_answer_bytes=10)


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_an_error_that_the_worker_reports_is_forwarded_and_counted(pieces):
    """Whether it comes with the token before it, by itself, or in two pieces."""
    token = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
    error = b'data: {"error":{"message":"x","type":"y","code":"z"}}\n\n'
    written = {1: [token + error], 2: [token, error], 3: [token, error[:9], error[9:]]}

    async def report(visit: Visit):
        await visit.start_stream()
        for piece in written[pieces]:
            await visit.write(piece)
            await asyncio.sleep(0.02)
        await visit.done()

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = report
        assert errors_in(await streamed(cluster)) == ["z"]
        cause = '{cause="worker_reported"}'
        assert await cluster.metric("baton_gateway_broken_streams_total" + cause) == 1

    run(scenario)


# Workers that begin another life ------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefills", "decodes"])
@pytest.mark.parametrize("body", [PROMPT, STREAM])
def test_a_restarted_worker_is_asked_again_with_its_new_epoch(role, body):
    async def wait_for_prefill(visit: Visit):
        if len(visit.worker.visits) == 1 and role == "prefills":
            await never_answer(visit)
        await say_abc(visit)

    async def scenario(cluster: Cluster):
        restarted = getattr(cluster, role)[0]
        cluster.decodes[0].script = wait_for_prefill
        restarted.epoch = new_epoch()
        async with cluster.post(body) as response:
            assert response.status == 200
            assert "c" in await response.text()
        stale, fresh = restarted.visits
        assert stale.ticket.id != fresh.ticket.id
        assert restarted.epoch in {fresh.ticket.prefill.epoch, fresh.ticket.decode.epoch}
        cause = '{cause="stale_ticket"}'
        assert await cluster.metric("baton_gateway_fallbacks_total" + cause) == 1

    run(scenario, probe_interval_s=30)


def test_a_worker_that_refuses_every_ticket_is_not_asked_for_ever():
    async def refuse(visit: Visit):
        await visit.fail(409, "stale_ticket")

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = refuse
        async with cluster.post(STREAM) as response:
            assert response.status == 502
        assert len(cluster.decodes[0].visits) == 2

    run(scenario)


# The registry of workers --------------------------------------------------------------------------


def test_a_worker_goes_down_and_comes_back():
    async def scenario(cluster: Cluster):
        async def ups() -> float:
            return await cluster.metric('baton_gateway_worker_up{role="decode"')

        async def down() -> bool:
            return await ups() == 0

        async def up() -> bool:
            return await ups() == 1

        cluster.decodes[0].health_status = 500
        await until_true(down)
        status, answer = await cluster.get_json("/ready")
        assert status == 503
        assert "decode-0" in answer["error"]["message"]
        cluster.decodes[0].health_status = 200
        await until_true(up)
        assert (await cluster.get_json("/ready"))[0] == 200

    run(scenario, probe_interval_s=0.05)


def test_a_draining_worker_gets_no_more_requests():
    async def scenario(cluster: Cluster):
        cluster.decodes[0].health_status = 503

        async def one_left() -> bool:
            return await cluster.metric('baton_gateway_worker_up{role="decode"') == 1

        await until_true(one_left)
        for _ in range(3):
            await streamed(cluster)
        assert not cluster.decodes[0].visits

    run(scenario, decodes=2, probe_interval_s=0.05)


def test_without_workers_a_gateway_lives_but_is_not_ready():
    async def scenario(cluster: Cluster):
        assert (await cluster.get_json("/health"))[0] == 200
        status, answer = await cluster.get_json("/ready")
        assert status == 503
        assert cluster.decodes[0].url in answer["error"]["message"]
        async with cluster.post(PROMPT) as response:
            assert response.status == 503
        assert (await cluster.get_json("/v1/models"))[1]["data"] == []

    run(scenario, prefills=0, wait=False, probe_interval_s=30, probe_timeout_s=0.001)


def test_a_worker_listed_in_the_wrong_role_is_not_used():
    async def scenario(cluster: Cluster):
        cluster.prefills[0].extra_info["role"] = "decode"

        async def rejected() -> bool:
            return await cluster.metric('baton_gateway_worker_up{role="prefill"') == 0

        cluster.prefills[0].epoch = new_epoch()
        await until_true(rejected)
        await streamed(cluster)
        assert not cluster.prefills[0].visits

    run(scenario, probe_interval_s=0.02)


@pytest.mark.parametrize(
    "info", [{"epoch": "short"}, {"role": "chef"}, {"worker": ""}, {"served_model_name": None}]
)
def test_a_description_that_makes_no_sense_is_not_believed(info):
    async def scenario(cluster: Cluster):
        cluster.decodes[0].extra_info.update(info)

        async def lost() -> bool:
            return await cluster.metric('baton_gateway_worker_up{role="decode"') == 0

        await until_true(lost)

    run(scenario, probe_interval_s=0.01)


# Limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_request"),
        (b"[]", 400, "invalid_request"),
        (b"{}", 400, "invalid_request"),
        (b'{"model":"nobody"}', 404, "model_not_found"),
        (b'{"model":"demo","prompt":"' + b"x" * 2000 + b'"}', 413, "request_too_large"),
    ],
)
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_bad_request_reaches_no_worker(body, status, code, framing):
    async def in_chunks():
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    async def scenario(cluster: Cluster):
        data = body if framing == "length" else in_chunks()
        async with cluster.client.post(
            cluster.url + "/v1/completions", data=data, headers=JSON
        ) as response:
            assert response.status == status
            error = (await response.json())["error"]
            assert error["code"] == code
            if code == "model_not_found":
                assert MODEL in error["message"]
        assert not cluster.decodes[0].visits
        assert not cluster.prefills[0].visits

    run(scenario, max_body_bytes=1000)


def test_above_the_limit_requests_are_refused():
    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = one_token_and_wait
        async with cluster.post(STREAM) as first, cluster.post(STREAM) as second:
            assert first.status == second.status == 200
            async with cluster.post(STREAM) as third:
                assert third.status == 503
                assert int(third.headers["retry-after"]) >= 1
                assert (await third.json())["error"]["code"] == "overloaded"
        cluster.decodes[0].script = say_abc

        async def room() -> bool:
            return await cluster.metric("baton_gateway_inflight_requests") == 0

        await until_true(room)
        await streamed(cluster)

    run(scenario, max_inflight_requests=2)


@pytest.mark.parametrize("limit", ["request_timeout_s", "first_byte_timeout_s"])
@pytest.mark.parametrize("script", [never_answer, start_and_wait])
def test_a_deadline_before_the_first_token(limit, script):
    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = script
        cluster.prefills[0].script = never_answer
        async with cluster.post(STREAM) as response:
            text = await response.text()
        if script is never_answer:
            assert response.status == 504
            assert json.loads(text)["error"]["code"] == "deadline_exceeded"
            assert "prefill-0 → decode-0" in text
        else:
            assert response.status == 200
            assert errors_in(text) == ["deadline_exceeded"]
            assert text.endswith("[DONE]\n\n")
        for worker in (cluster.prefills[0], cluster.decodes[0]):
            await until(lambda worker=worker: worker.visits[0].left_at)

    run(scenario, **{limit: 0.3})


def test_a_deadline_in_mid_stream():
    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = one_token_and_wait
        text = await streamed(cluster)
        assert errors_in(text) == ["deadline_exceeded"]
        await until(lambda: cluster.decodes[0].visits[0].left_at)
        cause = '{cause="deadline"}'
        assert await cluster.metric("baton_gateway_broken_streams_total" + cause) == 1

    run(scenario, request_timeout_s=1.5, first_byte_timeout_s=1.4)


def test_an_answer_in_one_piece_has_only_the_whole_deadline():
    async def slow(visit: Visit):
        await asyncio.sleep(0.3)
        await say_abc(visit)

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = slow
        async with cluster.post(PROMPT) as response:
            assert response.status == 200

    run(scenario, first_byte_timeout_s=0.1)


@pytest.mark.parametrize("body", [PROMPT, STREAM])
def test_a_request_whose_time_is_over_at_its_worker_is_not_tried_elsewhere(body):
    """Workers look a little before the gateway does."""

    async def give_up(visit: Visit):
        await visit.fail(504, "deadline_exceeded")

    async def scenario(cluster: Cluster):
        for worker in (*cluster.prefills, *cluster.decodes):
            worker.script = give_up
        async with cluster.post(body) as response:
            assert response.status == 504
            assert (await response.json())["error"]["code"] == "deadline_exceeded"
        assert sum(len(worker.visits) for worker in cluster.decodes) == 1

    run(scenario, decodes=2, request_timeout_s=0.9)


def test_a_worker_without_time_for_its_requests_is_not_ejected():
    async def give_up(visit: Visit):
        await visit.fail(504, "deadline_exceeded")

    async def scenario(cluster: Cluster):
        for worker in (*cluster.prefills, *cluster.decodes):
            worker.script = give_up
        for _ in range(2 * REQUESTS_TO_EJECT):
            async with cluster.post(PROMPT) as response:
                assert response.status == 504
            await asyncio.sleep(2 * APART_S)
        assert await cluster.metric("baton_gateway_ejections_total") == 0

    run(scenario, decodes=2)


def test_a_deadline_that_a_worker_reports_in_mid_stream_is_no_other_workers_chance():
    async def give_up(visit: Visit):
        await visit.start_stream()
        await visit.token("a")
        error = {"message": "x", "type": "timeout_error", "code": "deadline_exceeded"}
        await visit.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
        await visit.done()

    async def scenario(cluster: Cluster):
        for worker in cluster.decodes:
            worker.script = give_up
        assert errors_in(await streamed(cluster, {**STREAM, "temperature": 0})) == [
            "deadline_exceeded"
        ]
        assert sum(len(worker.visits) for worker in cluster.decodes) == 1
        cause = '{cause="deadline"}'
        assert await cluster.metric("baton_gateway_broken_streams_total" + cause) == 1

    run(scenario, decodes=2, request_timeout_s=0.9, first_byte_timeout_s=0.8)


def test_a_workers_failure_that_is_no_json_is_an_error_of_the_gateway():
    async def break_down(visit: Visit):
        headers = [(b"content-type", b"text/plain")]
        await visit.send({"type": "http.response.start", "status": 500, "headers": headers})
        await visit.send({"type": "http.response.body", "body": b"Internal Server Error"})

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = break_down
        async with cluster.post(PROMPT) as response:
            assert response.status == 502
            error = (await response.json())["error"]
            assert error["code"] == "worker_failed"
            assert "answered 500" in error["message"]

    run(scenario)


def test_a_long_prompt_is_not_too_long_while_its_worker_is_down():
    long = json.dumps({**PROMPT, "prompt": "a" * 1_500_000}).encode()

    def post(cluster: Cluster):
        url = f"{cluster.url}/v1/completions"
        return cluster.client.post(url, data=io.BytesIO(long), headers=JSON)

    async def scenario(cluster: Cluster):
        worker = cluster.decodes[0]
        async with post(cluster) as response:
            assert response.status == 200
        worker.health_status = 500

        async def is_down() -> bool:
            return await cluster.metric("baton_gateway_worker_up{") == 0

        await until_true(is_down)
        async with post(cluster) as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "no_worker"

    long_context = ScriptedWorker("worker", "both", say_abc, max_context_tokens=1_600_000)
    run(scenario, prefills=0, decodes=[long_context], probe_interval_s=0.05)


def test_names_that_clients_invent_make_no_series_while_there_is_no_worker():
    async def scenario(cluster: Cluster):
        for number in range(3):
            async with cluster.post({**PROMPT, "model": f"invented-{number}"}) as response:
                assert response.status == 503
        async with cluster.client.get(cluster.url + "/metrics") as response:
            series = await response.text()
        assert "invented" not in series
        assert 'baton_gateway_target_misses_total{model="",objective="ttft"} 3.0' in series
        cluster.decodes[0].health_status = 200

        async def is_served() -> bool:
            async with cluster.post(PROMPT) as response:
                return response.status == 200

        await until_true(is_served)
        assert cluster.metrics is not None
        assert cluster.metrics.targets.knows(MODEL), "it is counted when its workers are gone, too"

    away = ScriptedWorker("away", "both", say_abc)
    away.health_status = 500
    targets = {"*": Targets(ttft_s=1.0)}
    run(scenario, prefills=0, decodes=[away], wait=False, wait_for_worker_s=0.01, targets=targets)


class SlowToDescribe(ScriptedWorker):
    """It answers `/baton/v1/info` once it may."""

    may_answer: asyncio.Event

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/baton/v1/info":
            await self.may_answer.wait()
        await super().__call__(scope, receive, send)


def test_a_model_is_waited_for_while_workers_are_asked_what_they_serve():
    async def scenario(cluster: Cluster):
        slow = cluster.decodes[1]
        slow.may_answer = asyncio.Event()

        async def is_one_up() -> bool:
            return await cluster.metric("baton_gateway_worker_up{") == 1

        await until_true(is_one_up)
        async with cluster.post({**PROMPT, "model": "other"}) as response:
            assert response.status == 503
            error = (await response.json())["error"]
            assert error["code"] == "no_worker"
            assert slow.url in error["message"]
        asking = asyncio.create_task(streamed(cluster, {**STREAM, "model": "other"}))
        slow.may_answer.set()
        assert (await asking).endswith("[DONE]\n\n")
        async with cluster.post({**PROMPT, "model": "none"}) as response:
            assert response.status == 404

    workers = [
        ScriptedWorker("first", "both", say_abc),
        SlowToDescribe("slow", "both", say_abc, served_model_name="other"),
    ]
    run(scenario, prefills=0, decodes=workers, wait=False, wait_for_worker_s=1.0)
