"""Requests through vLLM's own API: what its two legs are asked, and what comes of the answers."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from tests.integration.gateway_cluster import PROMPT, STREAM, Cluster, after_prefill, run, until
from tests.integration.scripted_vllm import (
    ScriptedVllm,
    completion,
    fail_as_vllm,
    offer,
    refuse,
    say_abc_as_vllm,
)
from tests.integration.scripted_worker import Visit, never_answer, recompute_when_aborted

CHAT = "/v1/chat/completions"
ERROR = {"message": "Internal server error", "type": "InternalServerError", "code": 500}
MESSAGES = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


def prefill(**setup) -> ScriptedVllm:
    return ScriptedVllm("vllm-p", "prefill", offer, **setup)


def decode(**setup) -> ScriptedVllm:
    return ScriptedVllm("vllm-d", "decode", say_abc_as_vllm, **setup)


def run_vllm(scenario, **setup) -> None:
    run(
        scenario,
        prefills=setup.pop("prefills", None) or [prefill()],
        decodes=setup.pop("decodes", None) or [decode()],
        **setup,
    )


async def text_of(cluster: Cluster, body: object, path: str = "/v1/completions") -> str:
    async with cluster.post(body, path) as response:
        assert response.status == 200, await response.text()
        return await response.text()


async def fallbacks(cluster: Cluster, cause: str) -> float:
    return await cluster.metric(f'baton_gateway_fallbacks_total{{cause="{cause}"}}')


# What the legs are asked -------------------------------------------------------------------------


def test_prefill_is_a_completion_of_one_token_and_decode_the_clients_own():
    body = {
        **STREAM,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "stop": ["x"],
        "min_tokens": 2,
        "logprobs": 3,
        "logprob_token_ids": [1, 2],
        "truncate_prompt_tokens": 7,
        "kv_transfer_params": {"baton_ticket": "forged", "do_remote_prefill": False},
        "ec_transfer_params": {"forged": 1},
        "vllm_xargs": {"ec_transfer_params": 1, "kept": 2},
    }

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = after_prefill(cluster, cluster.decodes[0].script)
        text = await text_of(cluster, body)
        assert text.endswith("data: [DONE]\n\n")
        (p,), (d,) = cluster.prefills[0].visits, cluster.decodes[0].visits
        sealed = p.body["kv_transfer_params"]["baton_ticket"]
        assert p.body == {
            "model": "demo",
            "prompt": "hello",
            "max_tokens": 1,
            "stream": False,
            "temperature": 0.5,
            "stop": ["x"],
            "truncate_prompt_tokens": 7,
            "vllm_xargs": {"kept": 2},
            "kv_transfer_params": {"baton_ticket": sealed, "do_remote_decode": True},
        }
        assert d.body == {
            **{name: body[name] for name in body if name != "ec_transfer_params"},
            "vllm_xargs": {"kept": 2},
            "kv_transfer_params": {"baton_ticket": sealed, "do_remote_prefill": True},
        }
        assert p.headers["x-request-id"] == d.headers["x-request-id"] == p.ticket.request_id
        assert p.headers["traceparent"] == d.headers["traceparent"]
        assert abs(p.arrived_at - d.arrived_at) < 0.5
        assert await cluster.metric("baton_gateway_fallbacks_total") == 0

    run_vllm(scenario)


@pytest.mark.parametrize(
    ("limits", "asked"),
    [
        ({}, {"max_tokens": 1}),
        ({"max_tokens": 9}, {"max_tokens": 1}),
        ({"max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
    ],
)
def test_a_chat_is_prefilled_by_one_token_however_its_limit_is_named(limits, asked):
    tool = {"type": "function", "function": {"name": "f"}}
    body = {**MESSAGES, **limits, "tools": [tool], "tool_choice": "auto", "top_logprobs": 2,
            "logprobs": True, "response_format": {"type": "json_object"}}  # fmt: skip

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = after_prefill(cluster, cluster.decodes[0].script)
        await text_of(cluster, body, CHAT)
        (visit,) = cluster.prefills[0].visits
        told = {name: visit.body[name] for name in visit.body if name.startswith("max_")}
        assert told == asked
        assert visit.body["tools"] == [tool]  # they are a part of the prompt
        assert visit.body["tool_choice"] == "auto"
        assert "response_format" not in visit.body

    run_vllm(scenario)


def test_a_ticket_names_all_ranks():
    async def scenario(cluster: Cluster):
        await text_of(cluster, PROMPT)
        ticket = cluster.decodes[0].visits[0].ticket
        port = cluster.decodes[0].port
        assert ticket.decode.rank_addresses == (f"127.0.0.1:{port + 1}", f"127.0.0.1:{port + 2}")
        assert ticket.decode.address == ticket.decode.rank_addresses[0]
        assert ticket.prefill.rank_addresses == ()

    run_vllm(scenario, decodes=[decode(num_ranks=2)])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("vllm", ["prefill", "decode"])
def test_engines_mix(vllm, stream):
    async def scenario(cluster: Cluster):
        body = STREAM if stream else PROMPT
        cluster.decodes[0].script = after_prefill(cluster, cluster.decodes[0].script)
        text = await text_of(cluster, body)
        assert "baton" not in text
        (p,), (d,) = cluster.prefills[0].visits, cluster.decodes[0].visits
        sealed = d.body["kv_transfer_params"]["baton_ticket"]
        plain, vllms = (d, p) if vllm == "prefill" else (p, d)
        assert plain.body == {**body, "kv_transfer_params": {"baton_ticket": sealed}}
        part = "do_remote_decode" if vllm == "prefill" else "do_remote_prefill"
        assert vllms.body["kv_transfer_params"] == {"baton_ticket": sealed, part: True}
        assert (p.ticket.prefill.worker, p.ticket.decode.worker) == (
            cluster.prefills[0].name, cluster.decodes[0].name,
        )  # fmt: skip
        assert await cluster.metric("baton_gateway_fallbacks_total") == 0

    mixed = {"prefills": [prefill()]} if vllm == "prefill" else {"decodes": [decode()]}
    run(scenario, **mixed)


# Requests that one server serves whole -----------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"use_beam_search": True}, "use_beam_search"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_a_request_for_which_a_handoff_makes_no_sense_goes_to_decode_alone(extra, field):
    async def scenario(cluster: Cluster):
        body = {**PROMPT, **extra}
        await text_of(cluster, body)
        assert not cluster.prefills[0].visits
        assert cluster.decodes[0].visits[0].body == body
        served = await cluster.metric(
            f'baton_gateway_non_disaggregable_requests_total{{field="{field}"}}'
        )
        assert served == 1
        assert await cluster.metric("baton_gateway_fallbacks_total") == 0
        _, listed = await cluster.get_json("/debug/requests")
        assert listed["requests"][0]["mode"] == "colocated"
        _, shown = await cluster.get_json(f"/debug/requests/{listed['requests'][0]['id']}")
        assert f"'{field}'" in shown["placement"][0]

    run_vllm(scenario)


# What comes of a prefill leg's answer ------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (refuse("invalid_ticket"), "prefill_rejected"),
        (refuse("replayed_ticket"), "prefill_rejected"),
        (refuse("handoff_failed"), "handoff_failed"),
        (refuse("of another version"), "prefill_failed"),
        (lambda visit: visit.answer(200, completion()), "prefill_failed"),
        (lambda visit: visit.answer(200, []), "prefill_failed"),
        (lambda visit: fail_as_vllm(visit, 400), "prefill_rejected"),
        (lambda visit: fail_as_vllm(visit, 500), "prefill_failed"),
        (lambda visit: fail_as_vllm(visit, 503), "prefill_overloaded"),
    ],
)
def test_when_prefill_hands_nothing_over_decode_is_told_at_every_rank(script, cause):
    async def scenario(cluster: Cluster):
        server = cluster.decodes[0]
        server.script = recompute_when_aborted
        cluster.prefills[0].script = script
        assert (await text_of(cluster, STREAM)).endswith("[DONE]\n\n")
        ticket = server.visits[0].ticket.id.hex()
        for control in server.controls:
            await until(lambda control=control: control.aborts)  # the first one sufficed to answer
            assert control.aborts[0][0] == ticket
            assert "vllm-p" in control.aborts[0][1]
        assert await fallbacks(cluster, cause) == 1

    run_vllm(scenario, decodes=[decode(num_ranks=2)])


def test_no_trace_is_missed_of_a_server_that_gets_no_ticket():
    async def scenario(cluster: Cluster):
        await text_of(cluster, STREAM)
        _, listed = await cluster.get_json("/debug/requests")
        _, trace = await cluster.get_json(f"/debug/requests/{listed['requests'][0]['id']}")
        assert (trace["gateway"]["mode"], trace["decode"]) == ("colocated", None)
        assert trace["missing"] == []

    run(scenario, prefills=[], decodes=[decode()])


def test_a_reason_tells_what_vllm_said():
    async def scenario(cluster: Cluster):
        server = cluster.decodes[0]
        server.script = recompute_when_aborted
        cluster.prefills[0].script = lambda visit: fail_as_vllm(visit, 400, "too long a prompt")
        await text_of(cluster, STREAM)
        assert "too long a prompt" in server.controls[0].aborts[0][1]
        assert "400" in server.controls[0].aborts[0][1]

    run_vllm(scenario)


def test_an_offer_is_no_reason_to_tell_anybody():
    async def scenario(cluster: Cluster):
        await text_of(cluster, STREAM)
        await asyncio.sleep(0.1)
        assert not cluster.decodes[0].controls[0].aborts

    run_vllm(scenario)


def test_after_a_stale_ticket_the_request_is_placed_again_with_the_new_epoch():
    async def stale_once(visit: Visit):
        if visit.ticket.prefill.epoch != visit.worker.epoch:
            await refuse("stale_ticket")(visit)
        else:
            await offer(visit)

    async def when_told(visit: Visit):
        if visit.ticket.prefill.epoch != cluster_epoch():
            await never_answer(visit)
        await say_abc_as_vllm(visit)

    server = prefill()

    def cluster_epoch() -> str:
        return server.epoch

    async def scenario(cluster: Cluster):
        server.script, cluster.decodes[0].script = stale_once, when_told
        server.begin_another_life()
        assert "abc" in await text_of(cluster, PROMPT)
        assert [v.ticket.prefill.epoch == server.epoch for v in server.visits] == [False, True]
        assert await fallbacks(cluster, "stale_ticket") == 1
        assert server.num_discoveries == 2

    run_vllm(scenario, prefills=[server], probe_interval_s=30)


# What clients get --------------------------------------------------------------------------------


def test_clients_do_not_learn_what_connectors_say():
    async def scenario(cluster: Cluster):
        answer = json.loads(await text_of(cluster, PROMPT))
        whole = completion("abc")
        del whole["kv_transfer_params"], whole["ec_transfer_params"]
        assert answer == whole

    run_vllm(scenario)


def test_an_answer_keeps_the_text_of_its_numbers():
    async def odd(visit: Visit):
        body = b'{"choices": [{"logprob": -1e-400, "big": 123456789012345678901}], "a": "\\u00e9"}'
        start = [(b"content-type", b"application/json")]
        await visit.send({"type": "http.response.start", "status": 200, "headers": start})
        await visit.send({"type": "http.response.body", "body": body})

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = odd
        text = await text_of(cluster, PROMPT)
        expected = '{"choices":[{"logprob": -1e-400, "big": 123456789012345678901}],"a":"\\u00e9"}'
        assert text == expected

    run_vllm(scenario)


@pytest.mark.parametrize("status", [400, 404, 500])
def test_vllms_errors_reach_the_client_as_they_are(status):
    async def scenario(cluster: Cluster):
        error = lambda visit: fail_as_vllm(visit, status, "scripted")  # noqa: E731
        cluster.decodes[0].script = cluster.prefills[0].script = error
        async with cluster.post(PROMPT) as response:
            assert response.status == status
            told = (await response.json())["error"]
        assert (told["message"], told["code"]) == ("scripted", status)

    run_vllm(scenario)


def test_the_kv_of_a_request_that_decode_refuses_is_not_held():
    async def scenario(cluster: Cluster):
        (server,) = cluster.prefills[0].controls
        assert "abc" in await text_of(cluster, PROMPT)
        cluster.decodes[0].script = lambda visit: fail_as_vllm(visit, 400, "scripted")
        async with cluster.post(PROMPT) as response:
            assert response.status == 400
        await until(lambda: server.aborts)
        assert [reason for _, reason in server.aborts] == ["the decode worker refused the request"]

    run_vllm(scenario)


def test_a_5xx_of_one_server_is_another_ones_chance():
    first, second = decode(), ScriptedVllm("vllm-e", "decode", say_abc_as_vllm)

    async def scenario(cluster: Cluster):
        (server,) = cluster.prefills[0].controls
        first.script = lambda visit: fail_as_vllm(visit, 500)
        assert "abc" in await text_of(cluster, PROMPT)
        assert await fallbacks(cluster, "decode_failed") == 1
        await until(lambda: server.aborts)  # what it held for the first one
        assert [ticket for ticket, _ in server.aborts] == [first.visits[-1].ticket.id.hex()]

    run_vllm(scenario, decodes=[first, second])


def test_an_error_within_a_stream_is_forwarded_and_counted():
    has_begun = asyncio.Event()

    async def broken(visit: Visit):
        await visit.start_stream()
        await visit.token("a")
        await has_begun.wait()
        await visit.write(b"data: " + json.dumps({"error": ERROR}).encode() + b"\n\n")
        await visit.done()

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = broken
        async with cluster.post(STREAM) as response:
            assert response.status == 200
            await response.content.readany()
            has_begun.set()
            assert b"Internal server error" in await response.content.read()
        broken_streams = 'baton_gateway_broken_streams_total{cause="worker_reported"}'
        assert await cluster.metric(broken_streams) == 1

    run_vllm(scenario)


def test_a_stream_that_begins_with_an_error_is_another_servers_chance():
    async def broken(visit: Visit):
        await visit.start_stream()
        await visit.write(b"data: " + json.dumps({"error": ERROR}).encode() + b"\n\n")
        await visit.done()

    first, second = decode(), ScriptedVllm("vllm-e", "decode", say_abc_as_vllm)

    async def scenario(cluster: Cluster):
        first.script = broken
        text = await text_of(cluster, STREAM)
        assert "error" not in text
        assert all(letter in text for letter in "abc")
        second.script = broken
        text = await text_of(cluster, STREAM)
        assert text.count("Internal server error") == 1
        assert text.endswith("data: [DONE]\n\n")

    run_vllm(scenario, decodes=[first, second])


def test_a_client_that_leaves_ends_both_legs():
    async def scenario(cluster: Cluster):
        cluster.prefills[0].script = cluster.decodes[0].script = never_answer
        with suppress(TimeoutError):
            async with asyncio.timeout(0.3), cluster.post(STREAM):
                pass
        for server in (cluster.prefills[0], cluster.decodes[0]):
            await until(lambda server=server: server.visits[0].left_at is not None)

    run_vllm(scenario)


# Traces ------------------------------------------------------------------------------------------


def trace(leg: str) -> dict[str, object]:
    return {
        "request_id": "mine", "worker": f"vllm-{leg[0]}", "epoch": "e" * 32, "role": leg,
        "stamps": {},
    }  # fmt: skip


def test_traces_come_from_the_control_servers():
    async def scenario(cluster: Cluster):
        cluster.prefills[0].trace, cluster.decodes[0].trace = trace("prefill"), trace("decode")
        async with cluster.post(PROMPT, **{"x-request-id": "mine"}) as response:
            assert response.status == 200
        _, shown = await cluster.get_json("/debug/requests/mine")
        assert shown["missing"] == []
        assert shown["decode"]["worker"] == "vllm-d"
        assert shown["prefill"]["worker"] == "vllm-p"

    run_vllm(scenario)


def test_of_several_ranks_a_silent_one_is_named_and_the_others_are_shown():
    async def scenario(cluster: Cluster):
        server = cluster.decodes[0]
        server.trace = trace("decode")
        async with cluster.post(PROMPT, **{"x-request-id": "mine"}) as response:
            assert response.status == 200
        server.controls[0].kill()
        _, shown = await cluster.get_json("/debug/requests/mine")
        assert shown["decode"]["worker"] == "vllm-d"
        assert shown["missing"] == ["decode (vllm-d, rank 0)", "prefill (vllm-p)"]

    run_vllm(scenario, decodes=[decode(num_ranks=2)])


# Servers whose kv_load_failure_policy is "fail" ---------------------------------------------------


def pulling(first: ScriptedVllm | None = None) -> dict[str, list[ScriptedVllm]]:
    modes = {"modes": ["push", "pull"]}
    return {"prefills": [first or prefill(**modes)], "decodes": [decode(**modes)]}


async def fail_without_kv(visit: Visit) -> None:
    """What vLLM does, and what the trace of its rank says then."""
    if visit.ticket is None:
        await say_abc_as_vllm(visit)
        return
    lost = {"ticket": visit.ticket.id.hex(), "fallbacks": ["computed locally: prefill is gone"]}
    visit.worker.trace = trace("decode") | lost
    if visit.body.get("stream"):
        await visit.start_stream()
        await visit.write(b"data: " + json.dumps({"error": ERROR}).encode() + b"\n\n")
        await visit.done()
    else:
        await visit.answer(500, {"error": ERROR})


@pytest.mark.parametrize("body", [PROMPT, STREAM])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_request_that_vllm_failed_for_want_of_its_kv_is_computed_there(body, mode):
    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = fail_without_kv
        text = await text_of(cluster, body)
        assert "error" not in text
        assert all(letter in text for letter in "abc")
        assert [visit.ticket is None for visit in cluster.decodes[0].visits] == [False, True]
        assert await fallbacks(cluster, "handoff_failed") == 1

    run_vllm(scenario, mode=mode, **pulling())


def test_a_500_that_has_another_cause_stays_vllms_own():
    async def broken(visit: Visit):
        visit.worker.trace = trace("decode") | {"ticket": visit.ticket.id.hex()}
        await visit.answer(500, {"error": ERROR})

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = broken
        async with cluster.post(PROMPT) as response:
            assert (response.status, (await response.json())["error"]) == (500, ERROR)
        assert len(cluster.decodes[0].visits) == 1

    run_vllm(scenario)


def test_kv_that_another_ticket_lost_says_nothing_of_this_one():
    async def stale_trace(visit: Visit):
        lost = {"ticket": "ab" * 16, "fallbacks": ["computed locally: prefill is gone"]}
        visit.worker.trace = trace("decode") | lost
        await visit.answer(500, {"error": ERROR})

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = stale_trace
        async with cluster.post(PROMPT) as response:
            assert response.status == 500
        assert len(cluster.decodes[0].visits) == 1

    run_vllm(scenario)


def test_where_nothing_is_left_to_try_the_error_says_that_the_handoff_failed():
    async def stale_once(visit: Visit):
        is_first = len(server.visits) == 1
        await (refuse("stale_ticket") if is_first else offer)(visit)

    server = ScriptedVllm("vllm-p", "prefill", stale_once, modes=["push", "pull"])

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = fail_without_kv
        async with cluster.post(PROMPT) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["type"]) == (
                502,
                "handoff_failed",
                "server_error",
            )
            assert "prefill is gone" in error["message"]

    run_vllm(scenario, mode="pull", **pulling(server))
