"""Modes of handing over at the gateway: who is asked when, and what follows a mode that fails."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.integration.gateway_cluster import PROMPT, STREAM, Cluster, run, until, until_true
from tests.integration.scripted_vllm import ScriptedVllm, offer, say_abc_as_vllm
from tests.integration.scripted_worker import (
    ScriptedWorker,
    Visit,
    never_answer,
    prefill_at_once,
    recompute_when_aborted,
    say_abc,
)

PULL = {"modes": ["push", "pull"]}


def pair(prefill=prefill_at_once, decode=say_abc, num_prefills=1):
    return {
        "prefills": [
            ScriptedWorker(f"prefill-{n}", "prefill", prefill, **PULL) for n in range(num_prefills)
        ],
        "decodes": [ScriptedWorker("decode-0", "decode", decode, **PULL)],
    }


async def placement_of(cluster: Cluster, request_id: str) -> dict:
    status, body = await cluster.get_json(f"/debug/requests/{request_id}")
    assert status == 200
    return body


async def ask(cluster: Cluster, request_id: str = "r") -> None:
    async with cluster.post(STREAM, **{"x-request-id": request_id}) as response:
        assert response.status == 200
        assert (await response.text()).endswith("[DONE]\n\n")


def test_decode_is_asked_once_prefill_holds_the_kv():
    gate = asyncio.Event()

    async def slow_prefill(visit: Visit):
        await gate.wait()
        await prefill_at_once(visit)

    async def scenario(cluster: Cluster):
        asking = asyncio.create_task(ask(cluster))
        await until(lambda: cluster.prefills[0].visits)
        await asyncio.sleep(0.1)
        assert not cluster.decodes[0].visits, "decode was asked before the KV was there"
        gate.set()
        await asking
        tickets = [w.visits[0].ticket for w in (cluster.prefills[0], cluster.decodes[0])]
        assert tickets[0] == tickets[1]
        assert tickets[0].mode == "pull"
        assert not cluster.prefills[0].aborts
        traced = await placement_of(cluster, "r")
        assert (traced["gateway"]["mode"], traced["placement"]) == (
            "pull",
            ["the operator chose pull"],
        )
        assert await cluster.metric('baton_gateway_requests_total{code="200",mode="pull"') == 1
        assert await cluster.metric("baton_gateway_fallbacks_total") == 0

    run(scenario, mode="pull", **pair(slow_prefill))


@pytest.mark.parametrize(
    ("status", "code", "cause", "modes"),
    [
        (503, "overloaded", "prefill_overloaded", ["pull", "push"]),
        (502, "handoff_failed", "handoff_failed", ["pull", "push"]),
        (500, "internal_error", "prefill_failed", ["pull", None]),
        (400, "invalid_value", "prefill_rejected", ["pull", None]),
    ],
)
def test_a_mode_that_fails_falls_to_the_next(status, code, cause, modes):
    async def refuse_pulls(visit: Visit):
        if visit.ticket.mode == "pull":
            await visit.fail(status, code)
        else:
            await prefill_at_once(visit)

    async def scenario(cluster: Cluster):
        await ask(cluster)
        asked = [visit.ticket.mode for visit in cluster.prefills[0].visits]
        assert asked == [mode for mode in modes if mode]
        (visit,) = cluster.decodes[0].visits
        assert (visit.ticket and visit.ticket.mode) == modes[-1]
        assert await cluster.metric(f'baton_gateway_fallbacks_total{{cause="{cause}"}}') == 1

    run(scenario, mode="pull", **pair(refuse_pulls))


def test_a_prefill_worker_that_is_gone_is_followed_by_another():
    async def scenario(cluster: Cluster):
        cluster.prefills[0].kill()
        await ask(cluster)
        (visit,) = cluster.prefills[1].visits
        assert visit.ticket.mode == "pull"
        assert cluster.decodes[0].visits[0].ticket == visit.ticket

    run(scenario, mode="pull", probe_interval_s=30, **pair(num_prefills=2))


def test_prefill_workers_that_fail_one_after_another_end_in_decode_alone():
    async def fail(visit: Visit):
        await visit.fail(500, "internal_error")

    async def scenario(cluster: Cluster):
        await ask(cluster)
        assert sum(len(worker.visits) for worker in cluster.prefills) == 2
        (visit,) = cluster.decodes[0].visits
        assert visit.ticket is None

    run(scenario, mode="pull", **pair(fail, num_prefills=4))


def test_what_is_held_is_released_when_the_client_leaves():
    async def scenario(cluster: Cluster):
        asking = asyncio.create_task(ask(cluster))
        await until(lambda: cluster.decodes[0].visits)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: cluster.prefills[0].aborts)
        ticket = cluster.decodes[0].visits[0].ticket
        assert cluster.prefills[0].aborts[0][0] == ticket.id.hex()

    run(scenario, mode="pull", **pair(decode=never_answer))


def test_what_is_about_to_be_held_is_released_when_the_client_leaves():
    """Its answer may have left already: then closing the connection tells the worker nothing."""

    async def scenario(cluster: Cluster):
        asking = asyncio.create_task(ask(cluster))
        await until(lambda: cluster.prefills[0].visits)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: cluster.prefills[0].aborts)
        ticket = cluster.prefills[0].visits[0].ticket
        assert cluster.prefills[0].aborts[0][0] == ticket.id.hex()
        assert not cluster.decodes[0].visits

    run(scenario, mode="pull", **pair(never_answer))


def test_a_prefill_worker_that_hangs_is_not_waited_for_once_it_is_given_up():
    async def scenario(cluster: Cluster):
        asking = asyncio.create_task(ask(cluster))
        await until(lambda: cluster.prefills[0].visits)
        cluster.prefills[0].health_status = 500
        await asking
        assert cluster.decodes[0].visits[-1].ticket is None
        assert await cluster.metric('baton_gateway_fallbacks_total{cause="prefill_lost"}') >= 1

    run(scenario, mode="pull", abandon_after_s=0.3, **pair(never_answer))


def test_what_is_held_is_released_when_decode_cannot_be_asked():
    async def scenario(cluster: Cluster):
        cluster.decodes[0].kill()
        async with cluster.post(PROMPT) as response:
            assert response.status in {502, 503}
        await until(lambda: cluster.prefills[0].aborts)

    run(scenario, mode="pull", probe_interval_s=30, **pair())


def test_a_stale_ticket_is_made_again_for_a_prefill_worker_that_restarted():
    async def scenario(cluster: Cluster):
        prefill = cluster.prefills[0]
        before, prefill.epoch = prefill.epoch, "f" * 32
        await ask(cluster)
        assert [visit.ticket.prefill.epoch for visit in prefill.visits] == [before, "f" * 32]

    run(scenario, mode="pull", probe_interval_s=30, **pair())


def test_a_mode_that_the_workers_do_not_know_is_replaced_and_counted():
    async def scenario(cluster: Cluster):
        await ask(cluster)
        assert cluster.decodes[0].visits[0].ticket.mode == "push"
        cause = '{cause="mode_unusable"}'
        assert await cluster.metric("baton_gateway_fallbacks_total" + cause) == 1
        traced = await placement_of(cluster, "r")
        assert traced["placement"][0] == "the operator chose pull"
        assert "does not know the mode pull" in traced["placement"][1]

    run(scenario, mode="pull")


def test_colocated_asks_decode_alone():
    async def scenario(cluster: Cluster):
        await ask(cluster)
        assert not cluster.prefills[0].visits
        assert cluster.decodes[0].visits[0].ticket is None
        assert await cluster.metric("baton_gateway_fallbacks_total") == 0

    run(scenario, mode="colocated", **pair())


def test_a_queue_on_decode_turns_push_into_pull():
    async def scenario(cluster: Cluster):
        await ask(cluster, "before")
        load = {"num_waiting": 2, "num_blocks": 64, "num_free_blocks": 60, "block_size": 16}
        cluster.decodes[0].load = load
        probes = cluster.decodes[0].num_health_reads
        await until(lambda: cluster.decodes[0].num_health_reads > probes + 1)
        long = {**STREAM, "prompt": "word " * 1000}
        async with cluster.post(long, **{"x-request-id": "after"}) as response:
            await response.text()
        modes = [visit.ticket.mode for visit in cluster.decodes[0].visits]
        assert modes == ["push", "pull"]
        traced = await placement_of(cluster, "after")
        assert traced["placement"] == ["decode-0 has 2 requests in its queue"]

    run(scenario, **pair())


def test_push_is_as_it_was_where_prefill_fails():
    async def refuse(visit: Visit):
        await visit.fail(503, "overloaded")

    async def scenario(cluster: Cluster):
        await ask(cluster)
        assert cluster.decodes[0].aborts
        assert len(cluster.prefills[0].visits) == 1

    run(scenario, **pair(refuse, recompute_when_aborted))


# The first token early ---------------------------------------------------------------------------

EVENT = 'data: {"id": "x", "choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
TOKEN = {"token_id": 5, "logprob": None, "top": []}


async def prefill_early(visit: Visit):
    first = {"token": TOKEN, "events": EVENT}
    await visit.answer(200, {"object": "baton.prefill", "first": first})


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_the_client_has_the_first_token_before_decode_says_anything(mode):
    gate = asyncio.Event()

    async def say_abc_late(visit: Visit):
        await gate.wait()
        await say_abc(visit)

    async def scenario(cluster: Cluster):
        async with cluster.post(STREAM) as response:
            assert await response.content.readany() == EVENT.encode()
            gate.set()
            rest = (await response.content.read()).decode()
        texts = [json.loads(e[6:])["choices"][0]["text"] for e in rest.split("\n\n")[:-2]]
        assert texts == ["b", "c"]
        assert rest.endswith("[DONE]\n\n")
        (visit,) = cluster.decodes[0].visits
        assert visit.ticket.first_token_early
        assert cluster.decodes[0].agreed == {visit.ticket.id.hex(): TOKEN}
        created = [
            w.visits[0].headers["x-baton-created"] for w in (*cluster.prefills, *cluster.decodes)
        ]
        assert created[0] == created[1]
        assert await cluster.metric("baton_gateway_time_to_first_token_seconds_count") == 1
        assert await cluster.metric("baton_gateway_early_first_tokens_total") == 1

    run(scenario, mode=mode, first_token_early=True, **pair(prefill_early, say_abc_late))


def test_a_stream_of_which_only_the_first_token_is_there_is_not_moved():
    """Its decode worker has not begun it, so that it has nothing to hand over."""
    gate = asyncio.Event()

    async def say_abc_late(visit: Visit):
        await gate.wait()
        await say_abc(visit)

    async def scenario(cluster: Cluster):
        async with cluster.post(STREAM) as response:
            assert await response.content.readany() == EVENT.encode()
            (asked,) = (worker for worker in cluster.decodes if worker.visits)
            asked.health_status = 503
            await asyncio.sleep(0.4)
            assert sum(len(worker.visits) for worker in cluster.decodes) == 1
            gate.set()
            assert (await response.text()).endswith("[DONE]\n\n")

    workers = pair(prefill_early, say_abc_late)
    workers["decodes"].append(ScriptedWorker("decode-1", "decode", say_abc_late, **PULL))
    run(scenario, mode="push", first_token_early=True, **workers)


def test_nothing_is_sent_early_where_decode_has_begun_from_another_token():
    async def scenario(cluster: Cluster):
        cluster.decodes[0].agrees_on = {**TOKEN, "token_id": 6}
        async with cluster.post(STREAM) as response:
            text = await response.text()
        assert text.count("data: ") == 4
        assert await cluster.metric("baton_gateway_early_first_tokens_total") == 0

    run(scenario, mode="pull", first_token_early=True, **pair(prefill_early))


def test_a_stream_that_does_not_go_on_from_the_first_token_is_broken_off():
    async def say_xyz(visit: Visit):
        await visit.start_stream()
        for text in "xyz":
            await visit.token(text)
        await visit.done()

    async def scenario(cluster: Cluster):
        async with cluster.post(STREAM) as response:
            text = await response.text()
        assert text.startswith(EVENT)
        assert '"x"' not in text.removeprefix(EVENT).split("error")[0]
        assert "another first token" in text

    run(scenario, mode="pull", first_token_early=True, **pair(prefill_early, say_xyz))


def test_an_answer_in_one_piece_has_no_early_start():
    async def scenario(cluster: Cluster):
        async with cluster.post(PROMPT) as response:
            assert (await response.json())["choices"][0]["text"] == "abc"
        assert not cluster.decodes[0].visits[0].ticket.first_token_early

    run(scenario, first_token_early=True, **pair(prefill_early))


def test_by_default_the_first_token_comes_from_decode():
    async def scenario(cluster: Cluster):
        await ask(cluster)
        assert not cluster.decodes[0].visits[0].ticket.first_token_early
        assert not cluster.decodes[0].agreed

    run(scenario, **pair(prefill_early))


# How full vLLM servers are -----------------------------------------------------------------------

FULL = {"num_waiting": 0, "num_blocks": 64, "num_free_blocks": 3, "block_size": 16}
LONG = {**STREAM, "prompt": "word " * 1000}


def vllm_pair():
    return {
        "prefills": [ScriptedVllm("vllm-p", "prefill", offer, **PULL)],
        "decodes": [ScriptedVllm("vllm-d", "decode", say_abc_as_vllm, **PULL)],
    }


async def load_of(cluster: Cluster, worker: str) -> dict | None:
    _, body = await cluster.get_json("/debug/workers")
    (load,) = (each["load"] for each in body["workers"] if each["worker"] == worker)
    return load


async def ask_long(cluster: Cluster, request_id: str) -> None:
    async with cluster.post(LONG, **{"x-request-id": request_id}) as response:
        assert response.status == 200
        await response.text()


def test_a_full_vllm_server_turns_push_into_pull():
    async def scenario(cluster: Cluster):
        await ask_long(cluster, "before")
        cluster.decodes[0].load = FULL

        async def is_known() -> bool:
            load = await load_of(cluster, "vllm-d")
            return load is not None and load["num_free_blocks"] == 3

        await until_true(is_known)
        await ask_long(cluster, "after")
        modes = [visit.ticket.mode for visit in cluster.decodes[0].visits]
        assert modes == ["push", "pull"]
        (reason,) = (await placement_of(cluster, "after"))["placement"]
        assert reason.startswith("vllm-d has 3 of 64 blocks free, too few for about ")

    run(scenario, **vllm_pair())


def test_a_vllm_server_whose_control_server_is_silent_is_up_and_says_nothing_of_its_load():
    async def scenario(cluster: Cluster):
        server = cluster.decodes[0]
        server.load = FULL

        async def is_known() -> bool:
            return await load_of(cluster, "vllm-d") is not None

        async def is_forgotten() -> bool:
            return not await is_known()

        await until_true(is_known)
        server.controls[0].kill()
        await until_true(is_forgotten)
        await ask_long(cluster, "then")
        assert server.visits[-1].ticket.mode == "push"
        assert await cluster.metric("baton_gateway_worker_up{") == 2

    run(scenario, **vllm_pair(), probe_interval_s=0.02)


def usage(cached: int) -> dict:
    return {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": cached}}


async def prefill_with_64_cached(visit: Visit) -> None:
    await visit.answer(200, {"object": "baton.prefill", "cached_tokens": 64})


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_client_sees_what_the_prefill_worker_had_cached(is_stream: bool) -> None:
    async def answer(visit: Visit) -> None:
        if not is_stream:
            await visit.answer(200, {"choices": [{"text": "abc"}], "usage": usage(0)})
            return
        headers = [(b"content-type", b"text/event-stream"), (b"x-baton-token-ids", b"1")]
        await visit.send({"type": "http.response.start", "status": 200, "headers": headers})
        await visit.write(b':5\ndata: {"choices": [{"index": 0, "text": "abc"}]}\n\n')
        last = json.dumps({"choices": [], "usage": usage(0)}).encode()
        await visit.write(b"data: " + last + b"\n\ndata: [DONE]\n\n")
        await visit.send({"type": "http.response.body", "body": b""})

    async def scenario(cluster: Cluster) -> None:
        async with cluster.post(STREAM if is_stream else PROMPT) as response:
            text = await response.text()
        events = [line.removeprefix("data: ") for line in text.splitlines() if line]
        last = json.loads(events[-2] if is_stream else text)
        assert last["usage"] == usage(64)

    run(scenario, mode="pull", **pair(prefill_with_64_cached, answer))


@pytest.mark.parametrize("reports", [True, False])
def test_an_answer_that_overtakes_prefills_report_waits_a_moment_for_it(reports: bool) -> None:
    has_answered = asyncio.Event()

    async def prefill(visit: Visit) -> None:
        await has_answered.wait()
        await asyncio.sleep(0.05 if reports else 30)
        await prefill_with_64_cached(visit)

    async def answer(visit: Visit) -> None:
        await visit.answer(200, {"choices": [{"text": "abc"}], "usage": usage(0)})
        has_answered.set()

    async def scenario(cluster: Cluster) -> None:
        async with asyncio.timeout(10), cluster.post(PROMPT) as response:
            assert (await response.json())["usage"] == usage(64 if reports else 0)

    run(scenario, mode="push", **pair(prefill, answer))
