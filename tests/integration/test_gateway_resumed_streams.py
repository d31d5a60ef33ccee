"""A stream whose decode worker dies in the middle goes on at another one, or ends with an error."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from baton.gateway.targets import Targets
from baton.router.failover import MAX_ATTEMPTS
from tests.integration.gateway_cluster import MODEL, Cluster, run, until
from tests.integration.scripted_vllm import ScriptedVllm, offer
from tests.integration.scripted_worker import ScriptedWorker, Visit
from tests.stream_answers import StreamedAnswer

if TYPE_CHECKING:
    from tests.integration.scripted_worker import Script

GREEDY = {"model": MODEL, "prompt": "hello", "max_tokens": 9, "stream": True, "temperature": 0}
SAMPLED = {**GREEDY, "temperature": 1.0}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "stream": True,
    "temperature": 0,
    "tools": [{"type": "function", "function": {"name": "get"}}],
}
ERROR = {"message": "x", "type": "InternalServerError", "param": None, "code": 500}


def event(name: str, choice: dict[str, Any] | None = None, **more: object) -> bytes:
    choices = [] if choice is None else [{"index": 0, "finish_reason": None, **choice}]
    return (
        b"data: "
        + json.dumps({"id": name, "created": len(name), "choices": choices, **more}).encode()
        + b"\n\n"
    )


def stream(*parts: bytes, then: str = "done", header: bool = False, seeded: bool = False) -> Script:
    """A worker that sends these parts, and then ends its stream, dies or leaves it open.

    `seeded`: it samples with the gateway's seed.
    """

    async def script(visit: Visit) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        headers += [(b"x-baton-token-ids", b"1")] if header else []
        if seeded:
            headers += [(b"x-baton-seed", visit.headers["x-baton-seed"].encode())]
        await visit.send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await visit.write(part)
            await asyncio.sleep(0.02)
        if then == "die":
            visit.worker.kill()
        elif then == "hang":
            visit.worker.health_status = 500
            await asyncio.Event().wait()
        elif then == "done":
            await visit.done()

    return script


def vllms(*scripts: Script, **info: object) -> dict[str, Any]:
    return {
        "prefills": [ScriptedVllm("vllm-p", "prefill", offer, **info)],
        "decodes": [
            ScriptedVllm(f"vllm-{i}", "decode", each, **info) for i, each in enumerate(scripts)
        ],
        "mode": "push",
    }


def batons(*scripts: Script) -> dict[str, Any]:
    return {"decodes": [ScriptedWorker(f"d{i}", "decode", each) for i, each in enumerate(scripts)]}


async def ask(cluster: Cluster, body: object, path: str = "/v1/completions") -> StreamedAnswer:
    async with cluster.post(body, path, **{"x-request-id": "mine"}) as response:
        assert response.status == 200
        return StreamedAnswer().read_all(await response.read())


async def results(cluster: Cluster) -> dict[str, float]:
    """What became of streams: what is not 0."""
    names = ["resumed", "differed", "refused", "sampled", "not_kept", "no_worker"]
    series = 'baton_gateway_resumed_streams_total{{result="{}"}}'
    counts = {name: await cluster.metric(series.format(name)) for name in names}
    return {name: count for name, count in counts.items() if count}


def texts(name: str, *pieces: str) -> list[bytes]:
    return [event(name, {"text": piece}) for piece in pieces]


END = event("b", {"text": "", "finish_reason": "length"})


@pytest.mark.parametrize("body", [GREEDY, {**SAMPLED, "seed": 3}])
def test_vllm_answers_again_and_the_client_gets_what_it_lacks(body: dict[str, Any]) -> None:
    half = texts("a", "lost")[0][:20]
    first = stream(*texts("a", "ab", "cd"), half, then="die")
    second = stream(*texts("b", "a", "bcde", "f"), END)

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, body)
        assert (answer.text, answer.finishes, answer.errors) == ("abcdef", ["length"], [])
        assert answer.ids == {("a", 1)}
        assert answer.is_done
        assert await results(cluster) == {"resumed": 1}
        assert await cluster.metric("baton_gateway_resumed_tokens_total") == 2
        assert await cluster.metric("baton_gateway_broken_streams_total") == 0
        _, debug = await cluster.get_json("/debug/requests/mine")
        assert "the stream goes on after 2 events" in debug["gateway"]["fallbacks"]
        assert any(each.startswith("decode_lost") for each in debug["gateway"]["fallbacks"])
        ttft = "baton_gateway_time_to_first_token_seconds_count"
        assert await cluster.metric(ttft + '{mode="push"') == 1

    run(scenario, **vllms(first, second))


def test_what_a_vllm_server_samples_with_the_gateways_seed_another_one_samples_again() -> None:
    first = stream(*texts("a", "ab", "cd"), then="die", seeded=True)
    second = stream(*texts("b", "a", "bcde"), then="die", seeded=True)
    third = stream(*texts("c", "abcdef"), END, seeded=True)

    async def scenario(cluster: Cluster) -> None:
        async with cluster.post(SAMPLED) as response:
            assert "x-baton-seed" not in response.headers
            answer = StreamedAnswer().read_all(await response.read())
        assert (answer.text, answer.is_broken) == ("abcdef", False)
        visits = [worker.visits[0] for worker in cluster.decodes]
        assert len({visit.headers["x-baton-seed"] for visit in visits}) == 1
        assert all("seed" not in visit.body for visit in visits)
        assert await results(cluster) == {"resumed": 2}

    run(scenario, **vllms(first, second, third, resumes_streams=True))


def test_a_worker_that_hangs_is_replaced_once_it_is_given_up() -> None:
    first = stream(b":5\n" + texts("a", "a")[0], then="hang", header=True)
    second = stream(b":6\n" + texts("a", "b")[0], header=True)

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, SAMPLED)
        assert (answer.text, answer.is_broken) == ("ab", False)
        assert await results(cluster) == {"resumed": 1}

    run(scenario, **batons(first, second), abandon_after_s=0.3)


def test_an_error_that_is_the_clients_is_no_other_workers_chance() -> None:
    refusal = {**ERROR, "type": "BadRequestError", "code": 400}
    error = b"data: " + json.dumps({"error": refusal}).encode()

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, GREEDY)
        assert [each["type"] for each in answer.errors] == ["BadRequestError"]
        assert not cluster.decodes[1].visits
        assert await results(cluster) == {}

    run(scenario, **vllms(stream(error + b"\n\n"), stream(END)))


@pytest.mark.parametrize("body", [SAMPLED, GREEDY])
def test_a_vllm_server_goes_on_from_the_tokens_that_another_named(body: dict[str, Any]) -> None:
    first = stream(
        b":5\n" + texts("a", "ab")[0], b":6,7\n" + texts("a", "c")[0], then="die", header=True
    )
    again = [b":5,6\n" + texts("b", "abc")[0], b":7\n" + texts("b", "d")[0]]
    second = stream(*again, then="die", header=True)
    third = stream(*again, b":8\n" + texts("b", "e")[0], END, header=True)

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, body)
        assert (answer.text, answer.finishes, answer.errors) == ("abcde", ["length"], [])
        assert answer.ids == {("a", 1)}
        given = [w.visits[0].body["kv_transfer_params"] for w in cluster.decodes]
        assert "baton_resume" not in given[0]
        for params in given[1:]:
            # The second one sent these again, and no more.
            assert params["baton_resume"] == {"token_ids": [5, 6, 7]}
            assert params["do_remote_prefill"]
        for visit in cluster.prefills[0].visits[1:]:
            params = visit.body["kv_transfer_params"]
            assert params["baton_resume"] == {"token_ids": [5, 6, 7]}
            assert params["do_remote_decode"]
            assert (visit.body["max_tokens"], visit.body["stream"]) == (1, False)
        assert await results(cluster) == {"resumed": 2}
        assert await cluster.metric("baton_gateway_resumed_tokens_total") == 6

    run(scenario, **vllms(first, second, third, resumes_streams=True))


def test_a_vllm_server_that_baton_did_not_start_answers_again() -> None:
    first = stream(b":5\n" + texts("a", "ab")[0], then="die", header=True)
    second = stream(*texts("b", "a", "bc"), END)

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, GREEDY)
        assert (answer.text, answer.is_broken) == ("abc", False)
        (visit,) = cluster.decodes[1].visits
        assert "baton_resume" not in visit.body["kv_transfer_params"]

    run(scenario, **vllms(first, second))


def test_a_vllm_server_gets_tokens_in_groups_and_those_without_an_event() -> None:
    """As where its client does not want the reasoning, or its drafts were accepted."""
    first = stream(b":5, 6\n" + texts("a", "ab")[0], b":7,", b"8, 9,1", then="die", header=True)
    again = b":5, 6,7,8, 9\n" + texts("b", "ab")[0]
    second = stream(again, b":10\n" + texts("b", "c")[0], END, header=True)

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, SAMPLED)
        assert (answer.text, answer.is_broken) == ("abc", False)
        params = cluster.decodes[1].visits[0].body["kv_transfer_params"]
        resume = {"token_ids": [5, 6, 7, 8, 9], "group_sizes": [2, 1, 2]}
        assert params["baton_resume"] == resume
        assert await results(cluster) == {"resumed": 1}

    run(scenario, **vllms(first, second, resumes_streams=True))


@pytest.mark.parametrize("other", ["prefill", "decode"])
def test_a_sampled_answer_goes_on_without_servers_that_baton_did_not_start(other: str) -> None:
    first = stream(b":5\n" + texts("a", "ab")[0], then="die", header=True)
    second = stream(*texts("b", "X"), END)
    third = stream(b":5\n" + texts("b", "ab")[0], b":6\n" + texts("b", "c")[0], END, header=True)
    scripts = (first, third) if other == "prefill" else (first, second, third)
    workers = vllms(*scripts, resumes_streams=True)
    foreign = workers["prefills"][0] if other == "prefill" else workers["decodes"][1]
    foreign.extra_info = {"resumes_streams": False}

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, SAMPLED)
        assert (answer.text, answer.is_broken) == ("abc", False)
        visit = cluster.decodes[-1].visits[0]
        assert visit.body["kv_transfer_params"]["baton_resume"] == {"token_ids": [5]}
        assert (visit.ticket is None) is (other == "prefill")
        assert await results(cluster) == {"resumed": 1}

    run(scenario, **workers)


def test_a_tools_call_goes_on_in_the_middle_of_its_arguments() -> None:
    def call(name: str, *, arguments: str, is_first: bool = False) -> bytes:
        head = {"id": f"call-{name}", "type": "function"} if is_first else {}
        function = {"arguments": arguments, **({"name": "get"} if is_first else {})}
        delta = {"tool_calls": [{"index": 0, **head, "function": function}]}
        return event(name, {"delta": delta})

    role = {"delta": {"role": "assistant", "content": ""}}
    finish = {"delta": {}, "finish_reason": "tool_calls"}
    first = stream(
        event("a", role),
        call("a", arguments='{"a', is_first=True),
        call("a", arguments='": '),
        then="die",
    )
    second = stream(
        event("b", role),
        call("b", arguments="", is_first=True),
        call("b", arguments='{"a": 1, '),
        call("b", arguments='"b": 2}'),
        event("b", finish),
        event("b", usage={"completion_tokens": 7}),
    )

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, CHAT, "/v1/chat/completions")
        assert answer.calls == {0: {"name": "get", "arguments": '{"a": 1, "b": 2}', "ids": "."}}
        assert (answer.roles, answer.finishes) == (["assistant"], ["tool_calls"])
        assert answer.usages == [{"completion_tokens": 7}]
        assert not answer.is_broken

    run(scenario, **vllms(first, second))


@pytest.mark.parametrize(
    ("body", "second", "options", "result", "code"),
    [
        (GREEDY, texts("b", "abX"), {}, "differed", "worker_failed"),
        (GREEDY, texts("b", "a"), {}, "differed", "worker_failed"),
        (SAMPLED, texts("b", "abcd"), {}, "sampled", "worker_failed"),
        (GREEDY, texts("b", "abcd"), {"max_total_record_bytes": 0}, "not_kept", "worker_failed"),
    ],
)
def test_what_cannot_go_on_ends_with_an_error(
    body: dict[str, Any], second: list[bytes], options: dict[str, Any], result: str, code: str
) -> None:
    first = stream(*texts("a", "ab", "c"), then="die")

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, body)
        assert answer.text == "abc"
        assert [error["code"] for error in answer.errors] == [code]
        assert answer.is_done
        assert await results(cluster) == {result: 1}

    run(scenario, **vllms(first, stream(*second, END)), **options)


@pytest.mark.parametrize(
    ("kind", "is_resumed"), [("InternalServerError", True), ("BadRequestError", False)]
)
def test_an_error_within_a_stream_is_the_workers_or_the_clients(
    kind: str, is_resumed: bool
) -> None:
    error = b"data: " + json.dumps({"error": {**ERROR, "type": kind}}).encode() + b"\n\n"
    first = stream(*texts("a", "ab"), error)

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, GREEDY)
        assert answer.is_done
        if is_resumed:
            assert (answer.text, answer.errors) == ("abc", [])
        else:
            assert (answer.text, [each["type"] for each in answer.errors]) == ("ab", [kind])
        assert await results(cluster) == {"resumed" if is_resumed else "refused": 1}

    run(scenario, **vllms(first, stream(*texts("b", "abc"), END)))


def test_a_baton_worker_goes_on_from_the_tokens() -> None:
    """In two pieces, one of which is an event and half the next one's tokens."""
    b, c = (b":%d\n" % number + texts("a", text)[0] for number, text in ((7, "b"), (8, "c")))
    sent = [b":5,6\n" + texts("a", "a")[0] + b[:2], b[2:], c[:30]]
    first = stream(*sent, then="die", header=True)
    second = stream(b":8\n" + texts("a", "c")[0], header=True)

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, SAMPLED)
        assert (answer.text, answer.errors) == ("abc", [])
        (lost,), (visit,) = (worker.visits for worker in cluster.decodes)
        assert visit.body["kv_transfer_params"]["baton_resume"] == {"token_ids": [5, 6, 7]}
        prefilled = cluster.prefills[0].visits[-1]
        assert prefilled.body == visit.body
        for name in ("x-baton-seed", "x-baton-created", "x-request-id"):
            assert lost.headers[name] == visit.headers[name]
        assert "baton_resume" not in lost.body["kv_transfer_params"]
        assert await cluster.metric("baton_gateway_resumed_tokens_total") == 3

    run(scenario, **batons(first, second))


def test_the_pace_of_a_stream_that_went_on_is_of_all_its_tokens() -> None:
    first = stream(*(b":%d\n" % n + texts("a", "a")[0] for n in range(5)), then="die", header=True)
    second = stream(b":5\n" + texts("a", "b")[0], header=True)

    async def scenario(cluster: Cluster) -> None:
        assert (await ask(cluster, SAMPLED)).text == "aaaaab"
        counted = f'baton_gateway_target_{{}}_total{{{{model="{MODEL}",objective="tpot"}}}}'
        assert await cluster.metric(counted.format("requests")) == 1
        assert await cluster.metric(counted.format("misses")) == 0

    targets = {MODEL: Targets(tpot_s=60.0)}
    run(scenario, **batons(first, second), targets=targets)


def test_of_an_answer_that_lacks_only_its_end_nothing_is_computed_again() -> None:
    last = event("a", {"text": "b", "finish_reason": "stop"})
    first = stream(b":5\n" + texts("a", "a")[0], b":6\n" + last, then="die", header=True)

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, SAMPLED)
        assert (answer.text, answer.finishes, answer.is_broken) == ("ab", ["stop"], False)
        (visit,) = cluster.decodes[1].visits
        resume = {"token_ids": [5, 6], "is_complete": True}
        assert visit.body["kv_transfer_params"] == {"baton_resume": resume}
        assert len(cluster.prefills[0].visits) == 1

    run(scenario, **batons(first, stream(header=True)))


def test_a_request_that_ends_its_workers_ends_no_more_than_another_does() -> None:
    first = stream(b":5\n" + texts("a", "a")[0], then="die", header=True)
    scripts = [first, *(stream(then="die", header=True) for _ in range(3))]

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, SAMPLED)
        assert answer.text == "a"
        assert [error["code"] for error in answer.errors] == ["worker_failed"]
        assert sum(len(worker.visits) for worker in cluster.decodes) == MAX_ATTEMPTS
        assert await results(cluster) == {"no_worker": 1}

    run(scenario, **batons(*scripts))


OTHER_MODEL = {"fingerprint": "g" * 32, "model": "/models/v2"}


@pytest.mark.parametrize("make", [batons, partial(vllms, resumes_streams=True)])
def test_a_stream_goes_on_at_no_other_model_of_the_same_name(make: Any) -> None:
    """As while a fleet gets new weights: the same token ids are other text there."""
    first = stream(b":5\n" + texts("a", "a")[0], then="die", header=True)
    again = [b":5\n" + texts("b", "a")[0]] if make is not batons else []
    third = stream(*again, b":6\n" + texts("b", "b")[0], header=True)
    setup = make(first, stream(b":9\n" + texts("a", "X")[0], header=True), third)
    setup["decodes"][1].extra_info = {**setup["decodes"][1].extra_info, **OTHER_MODEL}

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, SAMPLED)
        assert (answer.text, answer.is_broken) == ("ab", False)
        assert not cluster.decodes[1].visits
        assert await results(cluster) == {"resumed": 1}

    run(scenario, **setup)


def test_where_only_another_model_is_left_a_stream_ends_with_an_error() -> None:
    first = stream(b":5\n" + texts("a", "a")[0], then="die", header=True)
    setup = batons(first, stream(b":9\n" + texts("a", "X")[0], header=True))
    setup["decodes"][1].extra_info = OTHER_MODEL

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, SAMPLED)
        assert answer.text == "a"
        assert [error["code"] for error in answer.errors] == ["worker_failed"]
        assert not cluster.decodes[1].visits
        assert await results(cluster) == {"no_worker": 1}

    run(scenario, **setup)


@pytest.mark.parametrize(
    ("context", "text", "is_broken"),
    [
        (4096, "aS", False),
        pytest.param(256, "abcS", False, id="less: once no other is left, after the second death"),
        pytest.param(1, "abc", True, id="too little for what the client has"),
    ],
)
def test_a_stream_goes_on_where_its_answer_has_room(
    context: int, text: str, is_broken: bool
) -> None:
    first = stream(b":5\n" + texts("a", "a")[0], then="die", header=True)
    small = stream(b":7\n" + texts("a", "S")[0], header=True)
    third = stream(b":6\n" + texts("a", "bc")[0], then="die", header=True)
    setup = batons(first, small, third)
    setup["decodes"][1].extra_info = {"max_context_tokens": context}

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, SAMPLED)
        assert (answer.text, answer.is_broken) == (text, is_broken)
        assert bool(cluster.decodes[1].visits) is not is_broken

    run(scenario, **setup)


def test_a_stream_survives_several_workers_one_after_the_other() -> None:
    scripts = [
        stream(b":%d\n" % number + texts("a", str(number))[0], then="die", header=True)
        for number in range(3)
    ]

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, SAMPLED)
        assert (answer.text, answer.is_broken) == ("0123", False)
        assert await results(cluster) == {"resumed": 3}

    last = stream(b":3\n" + texts("a", "3")[0], header=True)
    run(scenario, **batons(*scripts, last))


@pytest.mark.parametrize("chosen", ["b", "X"])
def test_a_sampled_answer_of_vllm_that_lacks_only_its_end_is_not_sampled_again(chosen: str) -> None:
    """Its last token is not known: the next server samples another one, which is not sent."""
    end = event("a", {"text": "b", "finish_reason": "stop"})
    first = stream(b":5\n" + texts("a", "a")[0], end, then="die", header=True)
    other_end = event("b", {"text": chosen, "finish_reason": "length"})
    usage = event("b", usage={"completion_tokens": 2})
    second = stream(b":5\n" + texts("b", "a")[0], other_end, usage, header=True)

    async def scenario(cluster: Cluster) -> None:
        answer = await ask(cluster, {**SAMPLED, "max_completion_tokens": 9})
        assert (answer.text, answer.finishes, answer.errors) == ("ab", ["stop"], [])
        assert answer.usages == [{"completion_tokens": 2}]
        assert answer.is_done
        assert answer.ids == {("a", 1)}
        (visit,) = cluster.decodes[1].visits
        assert (visit.body["max_tokens"], visit.body["max_completion_tokens"]) == (2, 2)

    run(scenario, **vllms(first, second, resumes_streams=True))


def test_what_clients_say_of_an_answer_before_this_one_reaches_no_worker() -> None:
    async def scenario(cluster: Cluster) -> None:
        resume = {"baton_resume": {"token_ids": [1, 2]}}
        await ask(cluster, {**SAMPLED, "kv_transfer_params": resume})
        (visit,) = cluster.decodes[0].visits
        assert "baton_resume" not in visit.body["kv_transfer_params"]

    run(scenario, **batons(stream(*texts("a", "a"))))


def test_a_client_that_reads_late_gets_all_of_answers_that_went_on() -> None:
    """Whatever its gateway is about to send when their workers are given up."""
    num_events, may_end = 200, asyncio.Event()

    async def send_much(visit: Visit) -> None:
        """More than what fits between a gateway and a client that does not read."""
        headers = [(b"content-type", b"text/event-stream"), (b"x-baton-token-ids", b"1")]
        await visit.send({"type": "http.response.start", "status": 200, "headers": headers})
        params = visit.body.get("kv_transfer_params") or {}
        first = len(params.get("baton_resume", {}).get("token_ids", []))
        for index in range(first, num_events):
            text = f"{index},".ljust(60_000)
            await visit.write(b":%d\n" % index + event("a", {"text": text}))
        await may_end.wait()
        await visit.done()

    async def scenario(cluster: Cluster) -> None:
        async with cluster.post({**SAMPLED, "prompt": ["a", "b"]}) as response:
            hanging = [worker for worker in cluster.decodes if worker.visits]
            assert len(hanging) == 2
            await asyncio.sleep(0.5)  # all that fits is sent
            for worker in hanging:
                worker.health_status = 500
            await until(lambda: all(worker.visits[0].left_at for worker in hanging))
            may_end.set()
            answer = await response.read()
        got = ["", ""]
        for data in answer.split(b"\n\n")[:-2]:
            (choice,) = json.loads(data.removeprefix(b"data: "))["choices"]
            got[choice["index"]] += choice["text"].replace(" ", "")
        assert got == ["".join(f"{index}," for index in range(num_events))] * 2

    workers = batons(*[send_much] * 4)
    run(scenario, **workers, prefills=0, policy="round_robin", abandon_after_s=0.3)
