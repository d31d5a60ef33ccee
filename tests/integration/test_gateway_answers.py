"""What clients get from a gateway whose workers are well."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from baton.auth.ticket import unseal
from tests.integration.gateway_cluster import JSON, PROMPT, STREAM, Cluster, after_prefill, run
from tests.integration.scripted_worker import KEY, Visit
from tests.lazy_modules import openai


def test_both_legs_get_the_same_ticketed_body_at_once():
    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = after_prefill(cluster, cluster.decodes[0].script)
        async with cluster.post(STREAM, **{"x-request-id": "mine-1"}) as response:
            text = await response.text()
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"] == "mine-1"
        assert text.endswith("data: [DONE]\n\n")
        (prefill,), (decode,) = cluster.prefills[0].visits, cluster.decodes[0].visits
        assert prefill.body == decode.body
        assert {k: v for k, v in decode.body.items() if k != "kv_transfer_params"} == STREAM
        assert decode.headers["x-request-id"] == prefill.headers["x-request-id"] == "mine-1"
        assert 0 < float(decode.headers["x-baton-timeout-s"]) <= 600
        ticket = decode.ticket
        assert ticket.prefill.worker == "prefill-0"
        assert ticket.prefill.epoch == cluster.prefills[0].epoch
        assert ticket.decode.address == cluster.decodes[0].info()["handoff_address"]
        assert ticket.request_id == "mine-1"
        assert abs(prefill.arrived_at - decode.arrived_at) < 0.5

    run(scenario)


def test_the_bytes_are_the_workers_own():
    sent = [b'data: {"a": 1}\n', b"\n", b": comment\n\ndata: {", b'"b":"\xc3', b'\xa9"}\n\n']

    async def odd_chunks(visit: Visit):
        await visit.start_stream()
        for chunk in sent:
            await visit.write(chunk)
            await asyncio.sleep(0.01)
        await visit.done()

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = odd_chunks
        async with cluster.post(STREAM) as response:
            assert await response.read() == b"".join(sent) + b"data: [DONE]\n\n"

    run(scenario)


def test_a_chunk_is_forwarded_before_the_next_one_exists():
    gates = [asyncio.Event() for _ in range(3)]

    async def gated(visit: Visit):
        await visit.start_stream()
        for i, gate in enumerate(gates):
            await gate.wait()
            await visit.token(str(i))
        await visit.done()

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = gated
        async with cluster.post(STREAM) as response:
            assert response.status == 200  # the headers did not wait for a token
            for i, gate in enumerate(gates):
                gate.set()
                assert f'"text": "{i}"'.encode() in await response.content.readany()

    run(scenario)


def test_an_answer_in_one_piece():
    async def scenario(cluster: Cluster):
        async with cluster.post(PROMPT) as response:
            body = await response.read()
            assert response.status == 200
            assert response.headers["content-length"] == str(len(body))
            assert json.loads(body)["choices"][0]["text"] == "abc"

    run(scenario)


def test_a_large_body_reaches_both_workers():
    async def scenario(cluster: Cluster):
        prompt = "x" * 1_900_000
        body = io.BytesIO(json.dumps({**PROMPT, "prompt": prompt}).encode())
        async with cluster.client.post(
            cluster.url + "/v1/completions", data=body, headers=JSON
        ) as response:
            assert response.status == 200
        assert cluster.decodes[0].visits[0].body["prompt"] == prompt
        assert cluster.prefills[0].visits[0].body["prompt"] == prompt

    run(scenario, max_body_bytes_per_token=1024)


def test_what_clients_may_not_say_does_not_reach_workers():
    async def scenario(cluster: Cluster):
        body = (
            '{"model":"demo","prompt":"x","kv_transfer_params":{"baton_ticket":"forged"},'
            '"kv_transfer_par\\u0061ms":{"remote_host":"10.0.0.1"}}'
        )
        headers = {
            **JSON,
            "x-baton-timeout-s": "1",
            "x-baton-anything": "forged",
            "authorization": "Bearer forged",
            "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        }
        async with cluster.client.post(
            cluster.url + "/v1/completions", data=body, headers=headers
        ) as response:
            assert response.status == 200
        for worker in (cluster.prefills[0], cluster.decodes[0]):
            (visit,) = worker.visits
            assert visit.body["kv_transfer_params"].keys() == {"baton_ticket"}
            assert unseal(visit.body["kv_transfer_params"]["baton_ticket"], KEY)
            assert "forged" not in str(visit.headers)
            assert float(visit.headers["x-baton-timeout-s"]) > 1
            # The client's trace; the parent is the gateway's own span.
            assert visit.headers["traceparent"].startswith(headers["traceparent"][:35])

    run(scenario)


def test_the_prompt_of_the_other_kind_of_completion_does_not_reach_workers():
    both = {**PROMPT, "messages": [{"role": "user", "content": "another"}]}

    async def scenario(cluster: Cluster):
        for path, kept in (("completions", "prompt"), ("chat/completions", "messages")):
            async with cluster.post(both, f"/v1/{path}") as response:
                assert response.status == 200
            assert {"prompt", "messages"} & cluster.decodes[0].visits[-1].body.keys() == {kept}

    run(scenario)


def test_a_worker_of_both_roles_gets_no_ticket():
    async def scenario(cluster: Cluster):
        body = {**PROMPT, "kv_transfer_params": {"baton_ticket": "forged"}}
        async with cluster.post(body) as response:
            assert response.status == 200
        assert cluster.decodes[0].visits[0].body == PROMPT
        assert await cluster.metric('baton_gateway_requests_total{code="200",mode="colocated"') == 1

    run(scenario, prefills=0, decodes=0, boths=1)


def test_requests_take_turns():
    async def scenario(cluster: Cluster):
        for _ in range(4):
            async with cluster.post(PROMPT) as response:
                assert response.status == 200
        for worker in (*cluster.prefills, *cluster.decodes):
            assert len(worker.visits) == 2

    run(scenario, prefills=2, decodes=2)


def test_connections_to_workers_are_used_again():
    async def scenario(cluster: Cluster):
        for _ in range(5):
            async with cluster.post(STREAM) as response:
                await response.read()
        assert len(cluster.decodes[0]._server.server_state.connections) <= 2, "probes need one too"

    run(scenario, probe_interval_s=30)


def test_openai_client():
    def ask(url: str) -> tuple[str, list[str]]:
        client = openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
        whole = client.completions.create(model="demo", prompt="hello", max_tokens=3)
        stream = client.completions.create(model="demo", prompt="hello", stream=True)
        models = [model.id for model in client.models.list()]
        assert models == ["demo"]
        return whole.choices[0].text, [chunk.choices[0].text for chunk in stream]

    async def scenario(cluster: Cluster):
        assert await asyncio.to_thread(ask, cluster.url) == ("abc", ["a", "b", "c"])

    run(scenario)


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [
        ("/", "GET", 404, "not_found"),
        ("/baton/v1/info", "GET", 404, "not_found"),
        ("/v1/embeddings", "POST", 404, "not_found"),
        ("/v1/completions/", "POST", 404, "not_found"),
        ("/v1/../baton/v1/info", "GET", 404, "not_found"),
        ("/debug/requests/unknown", "GET", 404, "not_found"),
        ("/debug", "GET", 404, "not_found"),
        ("/debug/requestsunknown", "GET", 404, "not_found"),
        ("/v1/completions", "GET", 405, "method_not_allowed"),
        ("/health", "POST", 405, "method_not_allowed"),
        ("/metrics", "DELETE", 405, "method_not_allowed"),
    ],
)
def test_other_paths_do_not_exist(path, method, status, code):
    async def scenario(cluster: Cluster):
        async with cluster.client.request(method, cluster.url + path) as response:
            assert response.status == status
            error = (await response.json())["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["code"] == code

    run(scenario)


def test_short_answers():
    async def scenario(cluster: Cluster):
        assert await cluster.get_json("/health") == (200, {"status": "ok"})
        assert await cluster.get_json("/ready") == (200, {"status": "ready"})
        assert (await cluster.get_json("/version"))[1]["version"]
        _, models = await cluster.get_json("/v1/models")
        assert models["data"][0]["id"] == "demo"
        assert models["data"][0]["max_model_len"] == 4096

    run(scenario)


def test_series_begin_at_zero():
    async def scenario(cluster: Cluster):
        for line in (
            'baton_gateway_requests_total{code="200",mode="push",model="demo"}',
            'baton_gateway_client_disconnects_total{phase="decode"}',
            'baton_gateway_fallbacks_total{cause="prefill_lost"}',
            "baton_gateway_inflight_requests",
            'baton_gateway_time_to_first_token_seconds_count{mode="push",model="demo"}',
        ):
            assert await cluster.metric(line) == 0

    run(scenario)


def test_a_served_request_is_counted():
    async def scenario(cluster: Cluster):
        async with cluster.post(STREAM) as response:
            await response.read()
        label = '{mode="push",model="demo"}'
        assert await cluster.metric('baton_gateway_requests_total{code="200",mode="push"') == 1
        for name in ("time_to_first_token", "request_duration"):
            assert await cluster.metric(f"baton_gateway_{name}_seconds_count{label}") == 1
        assert await cluster.metric("baton_gateway_inflight_requests") == 0

    run(scenario)


@pytest.mark.parametrize("age", [b"0.150000", None, b"99999"])
def test_of_an_answer_in_one_piece_the_first_token_is_the_workers(age):
    """What a worker does not report is not known; one that was before the request is none."""

    async def answer_late(visit: Visit):
        headers = () if age is None else ((b"x-baton-first-token-s-ago", age),)
        await asyncio.sleep(0.2)
        await visit.answer(200, {"id": "x", "choices": [{"index": 0, "text": "abc"}]}, *headers)

    async def scenario(cluster: Cluster):
        cluster.decodes[0].script = answer_late
        async with cluster.post(PROMPT, **{"x-request-id": "r"}) as response:
            assert response.status == 200
            await response.read()
        _, shown = await cluster.get_json("/debug/requests/r")
        stamps = shown["gateway"]["stamps"]
        metric = "baton_gateway_time_to_first_token_seconds"
        assert await cluster.metric(f"{metric}_count") == (age is not None)
        if age is None:
            assert "first_token" not in stamps
            ttft = next(each for each in shown["compared"] if each["part"] == "ttft")
            assert ttft["actual_s"] is None
        elif age == b"99999":
            assert stamps["first_token"] == stamps["received"]
        else:
            assert stamps["first_token"] - stamps["received"] > 0.04
            assert stamps["finished"] - stamps["first_token"] > 0.149

    run(scenario)


def test_the_trace_of_a_request_is_merged():
    async def scenario(cluster: Cluster):
        leg = {"request_id": "r/1", "worker": "decode-0", "epoch": "e", "role": "decode"}
        cluster.decodes[0].trace = {**leg, "num_output_tokens": 3, "stamps": {"received": 1.0}}
        async with cluster.post(STREAM, **{"x-request-id": "r/1"}) as response:
            await response.read()
        _, listed = await cluster.get_json("/debug/requests")
        assert listed["requests"][0]["id"] == "r/1"
        status, trace = await cluster.get_json("/debug/requests/r/1")
        assert status == 200
        assert trace["decode"]["num_output_tokens"] == 3
        assert trace["summary"]["num_output_tokens"] == 3
        assert trace["summary"]["mode"] == "push"
        assert trace["missing"] == ["prefill (prefill-0)"]
        stamps = trace["gateway"]["stamps"]
        names = ["received", "admitted", "tokenized", "dequeued", "placed", "first_token"]
        assert list(stamps) == [*names, "finished"]
        assert sorted(stamps.values()) == list(stamps.values())

    run(scenario)
