"""One request, several answers: what workers are asked, and what becomes of their answers."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.integration.gateway_cluster import PROMPT, STREAM, Cluster, run, until, until_true
from tests.integration.scripted_vllm import ScriptedVllm, offer, say_abc_as_vllm
from tests.integration.scripted_worker import ScriptedWorker, Visit, never_answer, say_abc

CHAT = "/v1/chat/completions"
MESSAGES = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
JSON_FORMAT = {"response_format": {"type": "json_object"}}


async def repeat(visit: Visit) -> None:
    """Answer with the prompt and the seed, in as many chunks as it has letters."""
    text = f"{visit.body['prompt']}{visit.body.get('seed', '')}"
    count = {"prompt_tokens": 5, "completion_tokens": len(text), "total_tokens": 5 + len(text)}
    if not visit.body.get("stream"):
        choice = {"index": 0, "text": text}
        await visit.answer(200, {"id": "x", "choices": [choice], "usage": count})
        return
    await visit.start_stream()
    for letter in text:
        await visit.token(letter)
    if visit.body.get("stream_options"):
        await visit.write(f"data: {json.dumps({'choices': [], 'usage': count})}\n\n".encode())
    await visit.done()


def texts_of_stream(stream: str) -> dict[int, str]:
    texts: dict[int, str] = {}
    for line in stream.split("\n\n"):
        if line and line != "data: [DONE]":
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def ask(cluster: Cluster, body: object, path: str = "/v1/completions") -> tuple[int, str]:
    async with cluster.post(body, path) as response:
        return response.status, await response.text()


async def requests_counted(cluster: Cluster) -> float:
    return await cluster.metric("baton_gateway_requests_total")


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_share_one_handoff(stream):
    async def scenario(cluster: Cluster):
        body = {**(STREAM if stream else PROMPT), "n": 3, "seed": 40, "min_tokens": 2}
        status, text = await ask(cluster, body)
        assert status == 200
        wanted = {0: "hello40", 1: "hello41", 2: "hello42"}
        if stream:
            assert texts_of_stream(text) == wanted
            assert text.count("[DONE]") == 1
        else:
            whole = json.loads(text)
            assert {c["index"]: c["text"] for c in whole["choices"]} == wanted
            assert whole["usage"]["total_tokens"] == 5 + 3 * 7
        prefill, (decode, other) = cluster.prefills[0], cluster.decodes
        assert len(prefill.visits) == 1
        assert not other.visits
        lead, *answers = decode.visits
        assert lead.ticket is not None
        assert lead.body["max_tokens"] == 1
        assert "min_tokens" not in lead.body
        assert all(visit.ticket is None and "n" not in visit.body for visit in answers)
        assert [visit.body["max_tokens"] for visit in answers] == [3] * 3
        _, shown = await cluster.get_json("/debug/requests")
        (request,) = [r for r in shown["requests"] if r["mode"] == "push"]
        assert lead.headers["x-request-id"] == request["id"]
        mine = {visit.headers["x-request-id"] for visit in answers}
        assert mine == {f"{request['id']}-{i}" for i in range(3)}
        assert await requests_counted(cluster) == 1
        first_tokens = "baton_gateway_time_to_first_token_seconds_count"
        assert await cluster.metric(first_tokens) == stream, "not known of a whole answer"
        assert await cluster.metric("baton_gateway_fallbacks_total") == 0
        assert await cluster.metric("baton_gateway_inflight_requests") == 0

    decodes = [ScriptedWorker(f"decode-{i}", "decode", repeat) for i in range(2)]
    run(scenario, decodes=decodes)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["a", "bc", "def"], [[1], [2, 3], [4]]])
def test_each_prompt_of_a_list_is_placed_by_itself(prompts, stream):
    async def scenario(cluster: Cluster):
        body = {**(STREAM if stream else PROMPT), "prompt": prompts}
        status, text = await ask(cluster, body)
        assert status == 200
        wanted = {i: str(prompt) for i, prompt in enumerate(prompts)}
        if stream:
            assert texts_of_stream(text) == wanted
        else:
            whole = json.loads(text)
            assert {c["index"]: c["text"] for c in whole["choices"]} == wanted
            assert whole["usage"]["prompt_tokens"] == 15
        assert len(cluster.prefills[0].visits) == 3
        visits = [visit for worker in cluster.decodes for visit in worker.visits]
        assert all(worker.visits for worker in cluster.decodes)
        assert len({visit.ticket.id for visit in visits}) == 3
        assert await requests_counted(cluster) == 1

    run(scenario, decodes=[ScriptedWorker(f"d{i}", "decode", repeat) for i in range(2)])


def test_n_answers_to_each_prompt_are_numbered_prompt_by_prompt():
    async def scenario(cluster: Cluster):
        body = {**STREAM, "prompt": ["a", "b"], "n": 2, "best_of": 2, "seed": 0}
        _, text = await ask(cluster, {**body, "stream_options": {"include_usage": True}})
        assert texts_of_stream(text) == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}
        usage = json.loads(text.split("\n\n")[-3].removeprefix("data: "))["usage"]
        assert usage == {"prompt_tokens": 10, "completion_tokens": 8, "total_tokens": 18}
        assert len(cluster.prefills[0].visits) == 2

    run(scenario, decodes=[ScriptedWorker("d", "decode", repeat)])


def test_a_list_of_one_is_that_prompt():
    async def scenario(cluster: Cluster):
        await ask(cluster, {**PROMPT, "prompt": ["hello"], "n": 1, "best_of": 1})
        (visit,) = cluster.decodes[0].visits
        assert visit.ticket is not None
        assert {name: visit.body[name] for name in PROMPT} == PROMPT
        assert visit.body.keys() == {*PROMPT, "kv_transfer_params"}

    run(scenario)


# Failures ----------------------------------------------------------------------------------------


def refusing(prompt: str, status: int):
    async def answer(visit: Visit) -> None:
        if visit.body["prompt"] == prompt:
            await visit.fail(status, "scripted")
        else:
            await say_abc(visit)

    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_byte_is_the_requests(stream):
    async def scenario(cluster: Cluster):
        body = {**PROMPT, "prompt": ["bad", "bad"], "stream": stream}
        status, text = await ask(cluster, body)
        assert (status, json.loads(text)["error"]["code"]) == (400, "scripted")
        assert await cluster.metric('baton_gateway_requests_total{code="400"') == 1

    run(scenario, decodes=[ScriptedWorker("d", "decode", refusing("bad", 400))])


def test_an_error_after_the_first_byte_ends_the_stream_and_the_other_answers():
    begun = asyncio.Event()

    async def answer(visit: Visit) -> None:
        await visit.start_stream()
        await visit.token("a")
        if visit.body["prompt"] == "bad":
            await begun.wait()
            await visit.write(b'data: {"error":{"message":"no","code":"broken"}}\n\n')
        await asyncio.Event().wait()

    async def scenario(cluster: Cluster):
        async with cluster.post({**STREAM, "prompt": ["good", "bad"]}) as response:
            assert response.status == 200
            await response.content.readany()
            begun.set()
            text = (await response.content.read()).decode()
        assert text.endswith('data: {"error":{"message":"no","code":"broken"}}\n\ndata: [DONE]\n\n')
        await until(lambda: all(visit.left_at for visit in cluster.decodes[0].visits))
        name = 'baton_gateway_broken_streams_total{cause="worker_reported"}'
        assert await cluster.metric(name) == 1
        assert await cluster.metric("baton_gateway_inflight_requests") == 0

    run(scenario, decodes=[ScriptedWorker("d", "decode", answer)])


def test_an_answer_whose_worker_refuses_it_is_asked_for_elsewhere():
    async def only_the_first(visit: Visit) -> None:
        if visit.body["max_tokens"] == 1:
            await say_abc(visit)
        else:
            await visit.fail(503, "overloaded")

    async def scenario(cluster: Cluster):
        status, text = await ask(cluster, {**PROMPT, "n": 2})
        assert status == 200
        assert [c["text"] for c in json.loads(text)["choices"]] == ["abc", "abc"]
        assert [visit.ticket is not None for visit in cluster.decodes[1].visits] == [True, True]

    full = ScriptedWorker("d0", "decode", only_the_first)
    run(scenario, decodes=[full, ScriptedWorker("d1", "decode", say_abc)])


@pytest.mark.parametrize("body", [{**PROMPT, "n": 3}, {**STREAM, "prompt": ["a", "b", "c"]}])
def test_a_client_that_leaves_ends_every_part(body):
    async def hang(visit: Visit) -> None:
        await (say_abc if visit.body["max_tokens"] == 1 else never_answer)(visit)

    async def scenario(cluster: Cluster):
        client = asyncio.create_task(ask(cluster, body))
        hanging = cluster.decodes[0].visits
        await until(lambda: sum(visit.body["max_tokens"] != 1 for visit in hanging) == 3)
        assert await cluster.metric("baton_gateway_inflight_requests") == 3
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        await until(lambda: all(v.left_at for v in hanging if v.body["max_tokens"] != 1))

        async def is_counted() -> bool:
            return await cluster.metric("baton_gateway_inflight_requests") == 0

        await until_true(is_counted)
        assert await cluster.metric('baton_gateway_requests_total{code="499"') == 1

    run(scenario, decodes=[ScriptedWorker("d", "decode", hang)])


# Bounds ------------------------------------------------------------------------------------------


def test_what_is_too_much_is_refused_before_any_worker_is_asked():
    async def scenario(cluster: Cluster):
        for body in (
            {**PROMPT, "n": 5},
            {**PROMPT, "n": 2, "prompt": ["a", "b", "c"]},
            {**PROMPT, "prompt": [[1]] * 5},
        ):
            status, text = await ask(cluster, body)
            assert (status, json.loads(text)["error"]["code"]) == (400, "too_many_answers")
        status, text = await ask(cluster, {**PROMPT, "n": 2, "best_of": 4})
        assert (status, json.loads(text)["error"]["param"]) == (400, "best_of")
        status, text = await ask(cluster, {**PROMPT, "n": 4, "user": "x" * 4000})
        assert (status, json.loads(text)["error"]["code"]) == (503, "overloaded")
        assert not cluster.prefills[0].visits
        assert (await ask(cluster, {**PROMPT, "n": 4}))[0] == 200

    run(scenario, max_answers=4, max_total_body_bytes=10_000)


def test_answers_together_are_no_longer_than_one_may_be():
    """That is no worker's failure: none is computed again."""

    async def scenario(cluster: Cluster):
        for settings in ({}, {"temperature": 0}, {"seed": 7}):
            for decode in cluster.decodes:
                decode.visits.clear()
            status, text = await ask(cluster, {**PROMPT, "n": 3, **settings})
            error = json.loads(text)["error"]
            assert (status, error["code"]) == (502, "worker_failed")
            assert "gateway.max_answer_bytes" in error["message"]
            num_asked = sum(len(decode.visits) for decode in cluster.decodes)
            assert num_asked <= 4, "for the prompt, and for each answer"

    run(scenario, decodes=2, max_answer_bytes=120)


# vLLM, and fields that only it serves ------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_vllm_gets_one_ticket_for_n_answers_and_never_n(stream):
    async def scenario(cluster: Cluster):
        status, text = await ask(cluster, {**(STREAM if stream else PROMPT), "n": 2})
        assert status == 200
        assert text.count('"index":1') == (3 if stream else 1)
        assert "kv_transfer_params" not in text
        assert len(cluster.prefills[0].visits) == 1
        lead, *answers = cluster.decodes[0].visits
        assert lead.body["kv_transfer_params"]["do_remote_prefill"]
        assert [v.body for v in answers] == [STREAM if stream else PROMPT] * 2

    run(
        scenario,
        prefills=[ScriptedVllm("p", "prefill", offer)],
        decodes=[ScriptedVllm("d", "decode", say_abc_as_vllm)],
    )


def test_where_a_prompt_is_computed_for_each_answer_there_is_no_handoff():
    async def scenario(cluster: Cluster):
        assert (await ask(cluster, {**PROMPT, "n": 2, "echo": True}))[0] == 200
        assert not cluster.prefills[0].visits
        assert [v.body["max_tokens"] for v in cluster.decodes[0].visits] == [3, 3]

    run(
        scenario,
        prefills=[ScriptedVllm("p", "prefill", offer)],
        decodes=[ScriptedVllm("d", "decode", say_abc_as_vllm)],
    )


@pytest.mark.parametrize(
    ("extra", "engine"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "vllm"),
        ({"tool_choice": "required"}, "vllm"),
        (JSON_FORMAT, "vllm"),
        ({"structured_outputs": {"regex": "a+"}}, "vllm"),
        ({"presence_penalty": 0.5}, "vllm"),
        ({"guided_json": {"type": "object"}}, "structured_outputs"),
    ],
)
def test_what_no_worker_here_serves_is_a_400_that_names_what_can(extra, engine):
    async def scenario(cluster: Cluster):
        status, text = await ask(cluster, {**MESSAGES, **extra}, CHAT)
        error = json.loads(text)["error"]
        assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", *extra)
        assert engine in error["message"]
        assert not cluster.decodes[0].visits

    run(scenario)


def test_off_is_served_everywhere():
    off = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {},
        "guided_json": None, "presence_penalty": 0,
    }  # fmt: skip

    async def scenario(cluster: Cluster):
        for _ in range(2):
            assert (await ask(cluster, {**MESSAGES, **off}, CHAT))[0] == 200
        for worker in cluster.decodes:
            (visit,) = worker.visits
            assert not visit.body.keys() & {"tools", "tool_choice"}, "vLLM refuses an empty list"

    run(
        scenario,
        decodes=[
            ScriptedWorker("d", "decode", say_abc),
            ScriptedVllm("vd", "decode", say_abc_as_vllm),
        ],
    )


def test_in_a_mixed_fleet_such_a_request_goes_to_those_that_serve_it():
    async def scenario(cluster: Cluster):
        for _ in range(4):
            assert (await ask(cluster, {**MESSAGES, **JSON_FORMAT}, CHAT))[0] == 200
        (ours, vllms), (our_prefill, vllm_prefill) = cluster.decodes, cluster.prefills
        assert not ours.visits
        assert not our_prefill.visits
        assert [v.body["response_format"] for v in vllms.visits] == [{"type": "json_object"}] * 4
        assert len(vllm_prefill.visits) == 4
        assert await cluster.metric("baton_gateway_fallbacks_total") == 0

    run(
        scenario,
        prefills=[
            ScriptedWorker("p", "prefill", never_answer),
            ScriptedVllm("vp", "prefill", offer),
        ],
        decodes=[
            ScriptedWorker("d", "decode", say_abc),
            ScriptedVllm("vd", "decode", say_abc_as_vllm),
        ],
    )
