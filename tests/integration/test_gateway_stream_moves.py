"""Why streams move to another worker, what both are asked for then, and why they stay."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from baton.gateway import stream_moves
from baton.ids import new_epoch
from baton.router import rebalance
from baton.router.division import Division
from baton.router.rebalance import MoveCause
from tests.integration.gateway_cluster import MODEL, Cluster, run, until, until_true
from tests.integration.scripted_vllm import ScriptedVllm, completion
from tests.integration.scripted_worker import ScriptedWorker, Visit, prefill_at_once
from tests.stream_answers import StreamedAnswer

if TYPE_CHECKING:
    from baton.ids import WorkerId
    from baton.router.fleet import WorkerView
    from tests.integration.scripted_worker import Script

NUM_TOKENS = 200
ASKED = {"model": MODEL, "prompt": [1] * 100, "max_tokens": NUM_TOKENS, "stream": True, "n": 1}
WHOLE = "".join(f"{index}," for index in range(NUM_TOKENS))
STAYING_S = 0.01
"""A token, of a stream that is to stay: 2 s; one that is to move begins to in a second."""
FREE = {"num_waiting": 0, "num_blocks": 64, "num_free_blocks": 60, "block_size": 16}
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"x-baton-token-ids", b"1"),
    (b"x-baton-prompt-tokens", b"100"),
]
SHORT = {**FREE, "num_waiting": 2, "num_free_blocks": 2}


@pytest.fixture(autouse=True)
def settles_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is slow, or lacks blocks, is so for long enough in less time.

    What the time is for, tests/property/router/test_rebalance.py holds.
    """
    monkeypatch.setattr(rebalance, "SETTLE_S", 0.5)


def counting(step_s: float, *, copy_status: int = 200) -> Script:
    """A worker whose token number i is `i,`; it hands over, and takes what is handed over."""

    async def script(visit: Visit) -> None:
        ticket = visit.ticket
        if ticket is not None and ticket.prefill.worker == visit.worker.name:
            await prefill_at_once(visit)
            return
        if ticket is not None and copy_status != 200:
            await visit.fail(copy_status, "overloaded")
            return
        await stream(visit, step_s)

    return script


async def stream(visit: Visit, step_s: float) -> None:
    await visit.send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    first, most = len(resumed_ids(visit)), visit.body["max_tokens"]
    if visit.body.get("kv_transfer_params", {}).get("baton_resume", {}).get("standby"):
        first = await wait_for_tokens(visit, first)
    for index in range(first, most):
        await write_token(visit, index, most)
        await asyncio.sleep(step_s)
    await visit.done()


async def wait_for_tokens(visit: Visit, num_known: int) -> int:
    """As a standby request: how many tokens are known once it is to generate."""
    fed: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    visit.worker.on_feed = fed.put_nowait
    while True:
        tokens = await fed.get()
        assert tokens["start"] == num_known
        num_known += len(tokens["token_ids"])
        assert tokens["token_ids"] == list(range(tokens["start"], num_known))
        if tokens.get("generates"):
            return num_known


async def write_token(visit: Visit, index: int, most: int = NUM_TOKENS) -> None:
    reason = "length" if index == most - 1 else None
    choice = {"index": 0, "text": f"{index},", "finish_reason": reason}
    event = json.dumps({"id": "x", "created": 1, "choices": [choice]})
    await visit.write(b":%d\ndata: %b\n\n" % (index, event.encode()))


def resumed_ids(visit: Visit) -> list[int]:
    params = visit.body.get("kv_transfer_params") or {}
    ids: list[int] = params.get("baton_resume", {}).get("token_ids", [])
    return ids


def two(first: Script, second: Script) -> dict[str, Any]:
    return several(first, second)


def several(*scripts: Script, **info: object) -> dict[str, Any]:
    decodes = [ScriptedWorker(f"d{i}", "decode", each, **info) for i, each in enumerate(scripts)]
    return {"prefills": 0, "decodes": decodes}


async def ask(cluster: Cluster, body: object, **headers: str) -> StreamedAnswer:
    async with cluster.post(body, **headers) as response:
        assert response.status == 200, await response.text()
        return StreamedAnswer().read_all(await response.read())


async def begin(
    cluster: Cluster, worker: ScriptedWorker, **headers: str
) -> tuple[asyncio.Task[StreamedAnswer], Visit]:
    """A stream that flows at a worker."""
    before = len(worker.visits)
    asking = asyncio.create_task(ask(cluster, ASKED, **headers))
    await until(lambda: len(worker.visits) > before or asking.done())
    await asyncio.sleep(0.05)
    return asking, worker.visits[before]


async def results(cluster: Cluster) -> dict[str, float]:
    """What became of moves: what is not 0."""
    series = 'baton_gateway_moved_streams_total{{cause="{}",result="{}"}}'
    names = [(c, r) for c in MoveCause for r in ("moved", "not_copied", "ended", "lost")]
    counts = {f"{c} {r}": await cluster.metric(series.format(c, r)) for c, r in names}
    return {name: count for name, count in counts.items() if count}


def check_moved(source: ScriptedWorker, target: ScriptedWorker, left: Visit) -> None:
    """The two were asked for a handoff of what the client had; then the other one for the rest."""
    assert left.left_at is not None, "the old worker's stream was cut"
    sent = [visit for visit in source.visits if visit.ticket is not None]
    (rest,) = (visit for visit in target.visits if visit.ticket is None and resumed_ids(visit))
    taken = [visit for visit in target.visits if visit.ticket is not None]
    assert len(sent) == len(taken) >= 1
    for one, other in zip(sent, taken, strict=True):
        assert one.body == other.body
        ticket: Any = other.ticket
        parts: tuple[WorkerId, WorkerId] = (ticket.prefill.worker, ticket.decode.worker)
        assert parts == (source.name, target.name)
        ids = resumed_ids(other)
        assert ids == list(range(len(ids)))
        assert other.body["max_tokens"] == len(ids) + 1
        assert other.headers["x-request-id"] == ticket.request_id
        assert other.headers["x-request-id"] != left.headers["x-request-id"]
    assert rest.ticket is None
    assert rest.headers["x-request-id"] == left.headers["x-request-id"]
    assert rest.headers["x-baton-seed"] == left.headers["x-baton-seed"]
    assert rest.body["max_tokens"] == NUM_TOKENS
    ends = [len(resumed_ids(visit)) for visit in (*taken, rest)]
    assert ends == sorted(ends)


def test_a_worker_that_lacks_blocks_is_relieved() -> None:
    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        first.load = second.load = FREE
        asking, left = await begin(cluster, first)
        await asyncio.sleep(0.3)
        first.load = SHORT
        answer = await asking
        assert answer.text == WHOLE
        assert not answer.is_broken
        assert await results(cluster) == {"pressure moved": 1}
        check_moved(first, second, left)
        _, trace = await cluster.get_json(f"/debug/requests/{left.headers['x-request-id']}")
        (move,) = trace["gateway"]["moves"]
        assert "(pressure)" in move
        assert trace["placement"] == ["moved from d0 (pressure)"]
        _, demand = await cluster.get_json("/debug/demand")
        assert demand["models"][0]["num_begun"] == 1, "a stream that moves is one request"

    run(scenario, **two(counting(0.03), counting(0.001)), policy="cost")


@pytest.mark.parametrize(("target", "step_s"), [("tpot", 0.1), ("itl", 0.07)])
def test_a_worker_that_is_slow_is_relieved(target: str, step_s: float) -> None:
    """Each is known by eight requests, which the other one does not take."""

    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes

        async def alone(worker: ScriptedWorker) -> None:
            for each in (first, second):
                each.health_status = 200 if each is worker else 503

            async def is_alone() -> bool:
                up = [
                    await cluster.metric(f'baton_gateway_worker_up{{role="decode",url="{w.url}"')
                    for w in (first, second)
                ]
                return up == [worker is first, worker is second]

            await until_true(is_alone)

        for worker in (second, first):
            await alone(worker)
            warm = {**ASKED, "max_tokens": 6}
            await asyncio.gather(*(ask(cluster, warm) for _ in range(8)))
        asking, left = await begin(cluster, first, **{f"x-baton-{target}-ms": "50"})
        second.visits.clear()
        second.health_status = 200
        answer = await asking
        assert answer.text == WHOLE
        assert await results(cluster) == {"slow moved": 1}
        check_moved(first, second, left)

    run(scenario, **two(counting(step_s), counting(0.001)), policy="cost")


# By costs: `test_where_a_stream_can_go_is_no_reason_to_divide_labour`.
@pytest.mark.parametrize("policy", ["round_robin", pytest.param("cost", marks=pytest.mark.every)])
def test_a_worker_that_ends_is_left(policy: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking, left = await begin(cluster, first)
        first.health_status = 503
        answer = await asking
        assert answer.text == WHOLE
        assert await results(cluster) == {"drain moved": 1}
        check_moved(first, second, left)

    run(scenario, **two(counting(0.02), counting(0.001)), policy=policy)


@pytest.mark.parametrize("cause", ["drain", "pressure"])
@pytest.mark.parametrize(("num_tokens", "is_moved"), [(299, False), (300, True)])
def test_a_stream_moves_only_where_its_answer_has_room(
    cause: str, num_tokens: int, is_moved: bool
) -> None:
    """It may have 300 tokens, with its prompt's."""
    setup = two(counting(0.006), counting(0.001))
    setup["decodes"][1].extra_info = {"max_context_tokens": num_tokens}

    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        first.load = second.load = FREE
        asking, _ = await begin(cluster, first)
        if cause == "drain":
            first.health_status = 503
        else:
            await asyncio.sleep(0.2)
            first.load = SHORT
        answer = await asking
        assert (answer.text, answer.is_broken) == (WHOLE, False)
        assert await results(cluster) == ({f"{cause} moved": 1} if is_moved else {})
        assert bool(second.visits) == is_moved

    run(scenario, **setup, policy="cost")


def test_where_a_stream_can_go_is_no_reason_to_divide_labour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two workers that are left one cannot take its KV: both do both parts all the same."""
    looked_at: list[int] = []

    def look(self: Division, workers: list[WorkerView], *args: object) -> None:
        looked_at.append(len(workers))

    monkeypatch.setattr(Division, "look", look)
    monkeypatch.setattr(Division, "is_due", lambda *_: True)
    workers = [ScriptedWorker(f"w{i}", "both", counting(0.01)) for i in range(3)]
    workers[2].extra_info = {"fingerprint": "g" * 32}

    async def scenario(cluster: Cluster) -> None:
        first, second, _ = workers
        asking, left = await begin(cluster, first)
        first.health_status = 503
        assert (await asking).text == WHOLE
        check_moved(first, second, left)
        assert set(looked_at) == {3}

    run(scenario, prefills=0, decodes=workers, policy="cost")


def as_vllm(step_s: float) -> Script:
    """A vLLM server that goes on: it names each token, and sends those that it is given again."""

    async def script(visit: Visit) -> None:
        num_given = len(resumed_ids(visit))
        if not visit.body["stream"]:
            await visit.answer(200, completion(params={"baton": {"status": "offered"}}))
            return
        await visit.send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        for index in range(NUM_TOKENS):
            await write_token(visit, index)
            await asyncio.sleep(step_s if index >= num_given else 0)
        await visit.done()

    return script


def vllm_servers(*, resumes_streams: bool, step_s: float = 0.02) -> dict[str, Any]:
    scripts = {"vllm-0": as_vllm(step_s), "vllm-1": as_vllm(0.001)}
    servers = [
        ScriptedVllm(name, "decode", script, resumes_streams=resumes_streams)
        for name, script in scripts.items()
    ]
    return {"prefills": 0, "decodes": servers}


@pytest.mark.parametrize("cause", ["drain", "pressure"])
def test_a_stream_of_vllm_moves_with_its_tokens(cause: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking, left = await begin_with_loads(cluster)
        await asyncio.sleep(0.3)
        if cause == "drain":
            first.is_draining = True
        else:
            first.load = SHORT
        answer = await asking
        assert (answer.text, answer.is_broken) == (WHOLE, False)
        assert await results(cluster) == {f"{cause} moved": 1}
        assert left.left_at is not None
        copies = {"do_remote_decode": first.visits[1:], "do_remote_prefill": second.visits[:-1]}
        for part, visits in copies.items():
            assert visits
            for visit in visits:
                assert (visit.body["max_tokens"], visit.body["stream"]) == (1, False)
                assert visit.body["kv_transfer_params"][part] is True
                assert visit.headers["x-baton-moves-stream"] == "1"
                ids = resumed_ids(visit)
                assert ids == list(range(len(ids)))
                assert (100 + len(ids)) % FREE["block_size"] == 1, "one is computed"
                assert visit.headers["x-request-id"] == visit.ticket.request_id
        last_copy, rest = second.visits[-2:]
        assert rest.ticket is None
        assert rest.body["max_tokens"] == NUM_TOKENS
        assert rest.headers["x-request-id"] == left.headers["x-request-id"]
        assert len(resumed_ids(rest)) >= len(resumed_ids(last_copy)) > 0

    run(scenario, **vllm_servers(resumes_streams=True), policy="cost")


def test_a_stream_of_an_adapter_stays_where_no_other_server_has_it() -> None:
    setup = vllm_servers(resumes_streams=True, step_s=STAYING_S)
    setup["decodes"][0].adapters = ("sql",)

    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking = asyncio.create_task(ask(cluster, {**ASKED, "model": "sql"}))
        await until(lambda: first.visits)
        first.load, second.load = SHORT, FREE
        assert (await asking).text == WHOLE
        assert await results(cluster) == {}
        assert not second.visits

    run(scenario, **setup, policy="cost")


def test_streams_of_vllm_that_baton_did_not_start_stay() -> None:
    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking, left = await begin(cluster, first)
        first.is_draining = True
        assert (await asking).text == WHOLE
        assert left.left_at is None
        assert not second.visits
        assert await results(cluster) == {}

    run(scenario, **vllm_servers(resumes_streams=False, step_s=STAYING_S))


def test_a_stream_stays_where_its_kv_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_moves, "AGAIN_AFTER_S", 0.2)

    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking, left = await begin(cluster, first)
        first.health_status = 503
        answer = await asking
        assert answer.text == WHOLE
        assert left.left_at is None
        counts = await results(cluster)
        # The stream's end may come while it is tried for the last time.
        assert counts.keys() - {"drain ended"} == {"drain not_copied"}
        taken = [visit.arrived_at for visit in second.visits if visit.ticket is not None]
        assert counts["drain not_copied"] <= len(taken) <= sum(counts.values())
        assert len(taken) > 4, "a refusal costs little: no longer each time"
        assert min(other - one for one, other in pairwise(taken)) > 0.15

    run(scenario, **two(counting(STAYING_S), counting(0.001, copy_status=503)))


def test_streams_that_were_not_moved_in_time_have_the_link_to_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_moves, "COPY_TIMEOUT_S", 0.4)
    monkeypatch.setattr(stream_moves, "AGAIN_AFTER_S", 0.1)

    async def hold(visit: Visit) -> None:
        if visit.ticket is None:
            await stream(visit, STAYING_S)
        await asyncio.Event().wait()

    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking = [asyncio.create_task(ask(cluster, ASKED)) for _ in range(6)]
        await until(lambda: len(first.visits) == len(second.visits) == 3)
        await asyncio.sleep(0.05)
        first.health_status = 503

        def copies() -> list[Visit]:
            return [visit for visit in second.visits if visit.ticket is not None]

        await until(lambda: len(copies()) >= 5)
        overlaps = [
            one.left_at is None or other.arrived_at < one.left_at
            for one, other in pairwise(copies()[:5])
        ]
        assert overlaps == [True, True, False, False]
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    run(scenario, **two(hold, hold))


def test_the_new_worker_may_die_after_the_cut() -> None:
    """It has the KV, and dies before its first event: the stream goes on at a third one."""

    async def die(visit: Visit) -> None:
        if visit.ticket is not None:
            await stream(visit, 0.0)
        elif resumed_ids(visit):
            visit.worker.kill()

    async def scenario(cluster: Cluster) -> None:
        first, *_ = cluster.decodes
        asking, _ = await begin(cluster, first)
        first.health_status = 503
        answer = await asking
        assert answer.text == WHOLE
        assert await results(cluster) == {"drain lost": 1}
        resumed = await cluster.metric('baton_gateway_resumed_streams_total{result="resumed"}')
        assert resumed == 1

    scripts = [counting(0.02), die, counting(0.001)]
    decodes = [ScriptedWorker(f"d{i}", "decode", script) for i, script in enumerate(scripts)]
    run(scenario, prefills=0, decodes=decodes)


@pytest.mark.parametrize("setting", ["never", "drain"])
def test_the_operator_may_keep_streams_where_they_are(setting: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        first.load = second.load = SHORT if setting == "drain" else FREE
        second.load = FREE
        asking, left = await begin(cluster, first)
        if setting == "never":
            first.health_status = 503
        assert (await asking).text == WHOLE
        assert left.left_at is None
        assert await results(cluster) == {}

    scripts = two(counting(STAYING_S), counting(0.001))
    run(scenario, **scripts, policy="cost", move_streams=setting)


def test_a_client_that_leaves_ends_the_move() -> None:
    async def hold(visit: Visit) -> None:
        if visit.ticket is None:
            await stream(visit, 0.02)
        await asyncio.Event().wait()

    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking, left = await begin(cluster, first)
        first.health_status = 503
        await until(lambda: any(visit.ticket for visit in second.visits))
        await until(lambda: any(visit.ticket for visit in first.visits))
        asking.cancel()
        await until(lambda: left.left_at is not None)
        for worker in (first, second):
            (copy,) = (visit for visit in worker.visits if visit.ticket is not None)
            await until(lambda copy=copy: copy.left_at is not None)
        assert await results(cluster) == {"drain ended": 1}

    run(scenario, **two(hold, hold))


async def begin_with_loads(
    cluster: Cluster, **headers: str
) -> tuple[asyncio.Task[StreamedAnswer], Visit]:
    """A stream at the first worker, of which the gateway knows how large blocks are."""
    for worker in cluster.decodes:
        worker.load = FREE
    await asyncio.sleep(0.3)
    return await begin(cluster, cluster.decodes[0], **headers)


def is_standby(visit: Visit) -> bool:
    return "standby" in visit.body.get("kv_transfer_params", {}).get("baton_resume", {})


def test_a_stream_moves_to_the_request_that_waits_for_it() -> None:
    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking, left = await begin_with_loads(cluster)
        first.health_status = 503
        answer = await asking
        assert answer.text == WHOLE
        assert await results(cluster) == {"drain moved": 1}
        assert left.left_at is not None, "the old worker's stream was cut"

        (sent,) = (visit for visit in first.visits if visit.ticket is not None)
        (waited,) = second.visits
        assert is_standby(waited)
        assert not is_standby(sent)
        assert waited.ticket == sent.ticket
        ids = resumed_ids(waited)
        assert resumed_ids(sent) == ids == list(range(len(ids)))
        ticket: Any = sent.ticket
        assert ticket.num_prefix_tokens == (100 + len(ids) - 1) // 16 * 16
        assert waited.body["max_tokens"] == NUM_TOKENS
        for name in ("x-request-id", "x-baton-seed", "x-baton-created"):
            assert waited.headers[name] == left.headers[name]
        assert sent.headers["x-request-id"] == ticket.request_id != left.headers["x-request-id"]

        standby = waited.body["kv_transfer_params"]["baton_resume"]["standby"]
        assert {name for name, _ in second.feeds} == {standby}
        *_, (_, last) = second.feeds
        assert last["generates"]
        assert len(last["token_ids"]) <= 3, "what is left to compute after the cut"
        _, trace = await cluster.get_json(f"/debug/requests/{left.headers['x-request-id']}")
        (move,) = trace["gateway"]["moves"]
        assert move.endswith("(drain)")

    run(scenario, **several(counting(0.02), counting(0.001), has_standby=True))


def test_tokens_that_are_refused_after_the_cut_cost_time_only() -> None:
    """The new worker is asked anew: it has the KV as a prefix."""

    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking, left = await begin_with_loads(cluster)

        async def refuse_last(visit: Visit) -> None:
            def take(tokens: dict[str, Any]) -> None:
                second.feed_status = 409 if tokens["generates"] else 204

            if is_standby(visit):
                second.on_feed = take
                headers = [(b"content-type", b"text/event-stream"), (b"x-baton-token-ids", b"1")]
                start = {"type": "http.response.start", "status": 200, "headers": headers}
                await visit.send(start)
                await visit.send({"type": "http.response.body", "body": b"", "more_body": True})
                await asyncio.Event().wait()
            await stream(visit, 0.001)

        second.script = refuse_last
        first.health_status = 503
        assert (await asking).text == WHOLE
        assert await results(cluster) == {"drain moved": 1}
        waited, anew = second.visits
        assert second.feeds[-1][1]["generates"]
        assert resumed_ids(anew) == list(range(len(resumed_ids(anew))))
        await until(lambda: waited.left_at is not None)
        _, trace = await cluster.get_json(f"/debug/requests/{left.headers['x-request-id']}")
        assert trace["gateway"]["moves"][1:] == ["its standby could not be used"]

    run(scenario, **several(counting(0.02), counting(0.001), has_standby=True))


@pytest.mark.parametrize("refused", ["request", "tokens"])
def test_a_stream_stays_where_no_request_waits_for_it(refused: str) -> None:
    async def refuse(visit: Visit) -> None:
        if refused == "request":
            await visit.fail(503, "overloaded")
            return
        await asyncio.sleep(0.1)  # of which the client gets ten tokens
        visit.worker.feed_status = 409
        await stream(visit, 0.0)

    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking, left = await begin_with_loads(cluster)
        first.health_status = 503
        assert (await asking).text == WHOLE
        assert left.left_at is None
        counts = await results(cluster)
        num_ended = counts.pop("drain ended", 0)  # the last move, by the end of the stream
        assert counts.keys() == {"drain not_copied"}
        assert all(is_standby(visit) for visit in second.visits)
        assert len(second.visits) == counts["drain not_copied"] + num_ended <= 5, "once a second"
        if refused == "tokens":
            assert len(second.feeds) >= counts["drain not_copied"]
            for waited in second.visits:
                await until(lambda waited=waited: waited.left_at is not None)

    run(scenario, **several(counting(STAYING_S), refuse, has_standby=True))


def test_the_worker_where_a_request_waits_may_die_after_the_cut() -> None:
    async def scenario(cluster: Cluster) -> None:
        first, second, _ = cluster.decodes
        asking, _ = await begin_with_loads(cluster)

        def take(tokens: dict[str, Any]) -> None:
            if tokens.get("generates"):
                second.kill()

        async def wait(visit: Visit) -> None:
            headers = [(b"content-type", b"text/event-stream"), (b"x-baton-token-ids", b"1")]
            await visit.send({"type": "http.response.start", "status": 200, "headers": headers})
            await visit.send({"type": "http.response.body", "body": b"", "more_body": True})
            second.on_feed = take
            await asyncio.Event().wait()

        second.script = wait
        first.health_status = 503
        assert (await asking).text == WHOLE
        assert await results(cluster) == {"drain lost": 1}
        assert second.feeds[-1][1]["generates"]
        resumed = await cluster.metric('baton_gateway_resumed_streams_total{result="resumed"}')
        assert resumed == 1

    scripts = [counting(0.02), counting(0.001), counting(0.001)]
    run(scenario, **several(*scripts, has_standby=True))


def test_the_old_worker_may_die_once_its_stream_is_to_be_cut() -> None:
    """The client has the same stream, from the worker where a request waits."""

    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking, left = await begin_with_loads(cluster)
        first.health_status = 503
        await until(lambda: bool(second.visits))
        await asyncio.sleep(0.1)  # it is ready at once, and nothing came meanwhile
        assert left.left_at is None
        first.kill()
        assert (await asking).text == WHOLE
        assert await results(cluster) == {"drain moved": 1}
        resumed = await cluster.metric('baton_gateway_resumed_streams_total{result="resumed"}')
        assert resumed == 0

    run(scenario, **several(counting(3.0), counting(0.001), has_standby=True))


def test_a_client_that_leaves_ends_the_request_that_waits() -> None:
    async def hold(visit: Visit) -> None:
        if is_standby(visit):
            await asyncio.Event().wait()
        await stream(visit, 0.02)

    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking, left = await begin_with_loads(cluster)
        first.health_status = 503
        await until(lambda: bool(second.visits))
        asking.cancel()
        await until(lambda: left.left_at is not None)
        (waited,) = second.visits
        await until(lambda: waited.left_at is not None)
        assert await results(cluster) == {"drain ended": 1}

    run(scenario, **several(counting(0.02), hold, has_standby=True))


@pytest.mark.parametrize("kind", [ScriptedWorker, ScriptedVllm])
def test_a_stream_that_ends_with_the_event_behind_which_it_is_cut_stays(
    kind: type[ScriptedWorker],
) -> None:
    """vLLM would sample its last token again."""
    is_cut = asyncio.Event()

    async def script(visit: Visit) -> None:
        if visit.ticket is not None:
            offered = completion(params={"baton": {"status": "offered"}})
            await (visit.answer(200, offered) if kind is ScriptedVllm else prefill_at_once(visit))
            return
        await visit.send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await write_token(visit, 0, 2)
        await is_cut.wait()
        await write_token(visit, 1, 2)
        await asyncio.sleep(0.1)
        await visit.done()

    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking, left = await begin(cluster, first)
        if isinstance(first, ScriptedVllm):
            first.is_draining = True
        else:
            first.health_status = 503
        await until(lambda: bool(second.visits))
        await asyncio.sleep(0.2)  # it is answered, and nothing came meanwhile
        is_cut.set()
        answer = await asking
        assert (answer.text, answer.finishes, answer.is_broken) == ("0,1,", ["length"], False)
        assert left.left_at is None
        assert all(visit.ticket is not None for visit in second.visits), "it got copies alone"
        assert await results(cluster) == {"drain ended": 1}

    decodes = [kind(f"d{i}", "decode", script, resumes_streams=True) for i in range(2)]
    run(scenario, prefills=0, decodes=decodes)


def test_a_stream_of_which_not_all_is_kept_stays() -> None:
    """Elsewhere it would begin anew, behind what the client has."""
    is_planned, is_cut = asyncio.Event(), asyncio.Event()

    async def generate(visit: Visit) -> None:
        await visit.send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await write_token(visit, 0)
        await is_planned.wait()
        choices = [{"index": 0, "text": "1,"}]
        event = json.dumps({"id": "x", "created": 1, "choices": choices}).encode()
        await visit.write(b":%b\ndata: %b\n\n" % (b",".join([b"1"] * 50_000), event))
        await is_cut.wait()
        for index in range(2, 5):
            await write_token(visit, index, 5)
            await asyncio.sleep(0.05)
        await visit.done()

    async def take(visit: Visit) -> None:
        if visit.ticket is None:
            await generate(visit)
            return
        is_planned.set()
        await asyncio.sleep(0.1)
        await visit.answer(200, {})

    async def hand_over(visit: Visit) -> None:
        await (prefill_at_once if visit.ticket else generate)(visit)

    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.decodes
        asking, left = await begin(cluster, first)
        first.health_status = 503
        await until(is_planned.is_set)
        await asyncio.sleep(0.3)  # it is to be cut
        is_cut.set()
        answer = await asking
        assert (answer.text, answer.is_broken) == ("0,1,2,3,4,", False)
        assert left.left_at is None
        assert len(second.visits) == 1
        assert await results(cluster) == {"drain not_copied": 1}

    run(scenario, **two(hand_over, take), max_total_record_bytes=70_000)


def test_a_request_that_waits_at_a_worker_that_left_is_not_used_at_another() -> None:
    goes_on = asyncio.Event()

    async def pause(visit: Visit) -> None:
        if visit.ticket is not None:
            await prefill_at_once(visit)
            return
        start = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
        await visit.send(start)
        await write_token(visit, 0)
        await goes_on.wait()
        for index in range(1, NUM_TOKENS):
            await write_token(visit, index)
            await asyncio.sleep(0.02)
        await visit.done()

    async def scenario(cluster: Cluster) -> None:
        first, second, third = cluster.decodes
        asking, left = await begin_with_loads(cluster)
        first.health_status = 503
        await until(lambda: bool(second.visits))
        second.extra_info["role"] = "prefill"
        second.epoch = new_epoch()
        up = f'baton_gateway_worker_up{{role="decode",url="{second.url}"'

        async def is_rejected() -> bool:
            return await cluster.metric(up) == 0

        await until_true(is_rejected)
        second.kill()
        assert left.left_at is None, "it is cut with its next event"
        goes_on.set()
        assert (await asking).text == WHOLE
        assert await results(cluster) == {"drain lost": 1}
        assert [visit.ticket for visit in third.visits] == [None]

    scripts = [pause, counting(0.001), counting(0.001)]
    run(scenario, **several(*scripts, has_standby=True))
