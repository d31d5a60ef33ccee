"""Who is taken out and comes back, what waits for whom: a gateway and scripted workers."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.gateway.waiting import WaitingRequests
from baton.ids import new_epoch
from baton.router.health import REQUESTS_TO_EJECT
from tests.integration.gateway_cluster import STREAM, Cluster, run, until, until_true
from tests.integration.scripted_worker import (
    ScriptedWorker,
    Visit,
    never_answer,
    one_token_and_wait,
    prefill_at_once,
    say_abc,
)

QUICK = {"ejection_s": 0.3, "slow_start_s": 0.3}


class LateWorker(ScriptedWorker):
    """Answers `/health` after `health_takes_s`."""

    health_takes_s = 0.0
    num_late = 0

    async def _describe(self, path: str, body: bytes, visit: Visit) -> None:
        if path == "/health" and self.health_takes_s:
            await asyncio.sleep(self.health_takes_s)
            self.num_late += 1
        await super()._describe(path, body, visit)


async def shown(cluster: Cluster, name: str) -> dict:
    _, body = await cluster.get_json("/debug/workers")
    return next(worker for worker in body["workers"] if worker["worker"] == name)


async def ask(cluster: Cluster, **headers: str) -> int:
    async with cluster.post(STREAM, **headers) as response:
        text = await response.text()
        if response.status == 200:
            assert text.endswith("[DONE]\n\n")
            assert '"error"' not in text
        return response.status


async def fail(visit: Visit) -> None:
    await visit.fail(500, "engine_failed")


async def many_tokens(visit: Visit) -> None:
    await visit.start_stream()
    for _ in range(60):
        await visit.token("a")
        await asyncio.sleep(0.02)
    await visit.done()


def has_state(cluster: Cluster, name: str, *states: str):
    async def condition() -> bool:
        return (await shown(cluster, name))["health"] in states

    return condition


def is_shown(cluster: Cluster, name: str, state: str):
    async def condition() -> bool:
        return (await shown(cluster, name))["state"] == state

    return condition


# Late probes --------------------------------------------------------------------------------------


def test_late_probes_of_a_worker_that_answers_are_no_death():
    """One of two, so that it might be ejected: its stream shows that it lives."""
    late, other = LateWorker("late", "both", many_tokens), ScriptedWorker("other", "both", say_abc)

    async def scenario(cluster: Cluster):
        late.health_takes_s = 0.2
        assert await ask(cluster) == 200
        assert late.visits
        assert late.num_late >= 3
        assert (await shown(cluster, "late"))["state"] == "up"
        assert await cluster.metric("baton_gateway_ejections_total") == 0

    run(scenario, prefills=0, decodes=[late, other], probe_timeout_s=0.1, probe_interval_s=0.05)


def test_the_last_worker_is_not_ejected_for_late_probes():
    late = LateWorker("late", "both", say_abc)

    async def scenario(cluster: Cluster):
        late.health_takes_s = 0.2
        await until(lambda: late.num_late >= 5)
        assert (await shown(cluster, "late"))["health"] == "doubted"
        assert "in time" in (await shown(cluster, "late"))["reason"]
        assert await ask(cluster) == 200
        late.health_takes_s = 0
        await until_true(has_state(cluster, "late", "healthy"))

    run(scenario, prefills=0, decodes=[late], probe_timeout_s=0.1, probe_interval_s=0.05)


def test_a_silent_worker_beside_another_is_down_until_it_answers_its_probes():
    late, other = LateWorker("late", "both", say_abc), ScriptedWorker("other", "both", say_abc)

    async def scenario(cluster: Cluster):
        late.health_takes_s = 0.2
        await until_true(is_shown(cluster, "late", "down"))
        assert await cluster.metric('baton_gateway_ejections_total{cause="late"}') == 1
        for _ in range(4):
            assert await ask(cluster) == 200
        assert not late.visits
        late.health_takes_s = 0
        await until_true(has_state(cluster, "late", "recovering"))
        await until_true(has_state(cluster, "late", "healthy"))
        assert await ask(cluster) == await ask(cluster) == 200
        assert late.visits

    run(
        scenario, prefills=0, decodes=[late, other], probe_timeout_s=0.1, probe_interval_s=0.05,
        **QUICK,
    )  # fmt: skip


def test_the_last_worker_is_given_up_once_it_hangs():
    late = LateWorker("late", "both", never_answer)

    async def scenario(cluster: Cluster):
        late.health_takes_s = 2
        assert await ask(cluster) == 503, "no other one came in time"
        assert (await shown(cluster, "late"))["state"] == "down"

    run(
        scenario, prefills=0, decodes=[late], probe_timeout_s=0.1, probe_interval_s=0.05,
        abandon_after_s=0.5,
    )  # fmt: skip


# Failed requests ----------------------------------------------------------------------------------


async def until_ejected(cluster: Cluster, name: str) -> None:
    """Ask until a worker that fails every request gets no more."""

    async def ejected() -> bool:
        assert await ask(cluster) == 200
        await asyncio.sleep(0.06)
        return (await shown(cluster, name))["health"] == "ejected"

    await until_true(ejected)


def test_a_worker_that_fails_every_request_is_ejected_and_comes_back_by_a_trial():
    async def scenario(cluster: Cluster):
        broken, other = cluster.decodes
        broken.script = fail
        await until_ejected(cluster, "worker-0")
        assert len(broken.visits) >= REQUESTS_TO_EJECT
        assert "500" in (await shown(cluster, "worker-0"))["reason"]
        up = f'baton_gateway_worker_up{{role="both",url="{broken.url}"}}'
        assert await cluster.metric(up) == 0
        state = f'baton_gateway_worker_state{{role="both",state="ejected",url="{broken.url}"}}'
        assert await cluster.metric(state) == 1
        assert await cluster.metric('baton_gateway_ejections_total{cause="failed"}') == 1

        num_before = len(broken.visits)
        await until_true(has_state(cluster, "worker-0", "half_open"))
        assert await ask(cluster) == 200  # the trial, which fails, and is answered by the other one
        assert len(broken.visits) == num_before + 1
        assert (await shown(cluster, "worker-0"))["health"] == "ejected"
        assert await ask(cluster) == 200
        assert len(broken.visits) == num_before + 1

        broken.script = say_abc
        await until_true(has_state(cluster, "worker-0", "half_open"))
        num_others = len(other.visits)
        assert await ask(cluster) == 200
        assert len(other.visits) == num_others, "the trial was answered where it was sent"
        assert (await shown(cluster, "worker-0"))["health"] == "recovering"
        assert await cluster.metric(up) == 1
        await until_true(has_state(cluster, "worker-0", "healthy"))

    run(scenario, prefills=0, decodes=0, boths=2, **QUICK, probe_interval_s=0.05)


def test_one_trial_at_a_time():
    async def scenario(cluster: Cluster):
        broken = cluster.decodes[0]
        broken.script = fail
        await until_ejected(cluster, "worker-0")
        await until_true(has_state(cluster, "worker-0", "half_open"))
        num_before = len(broken.visits)
        broken.script = one_token_and_wait
        trial = asyncio.create_task(ask(cluster))
        await until(lambda: len(broken.visits) > num_before)
        for _ in range(3):
            assert await ask(cluster) == 200
        assert len(broken.visits) == num_before + 1
        trial.cancel()  # its client leaves: nothing is shown, and another one may try
        await asyncio.gather(trial, return_exceptions=True)
        broken.script = say_abc

        async def tried_again() -> bool:
            assert await ask(cluster) == 200
            return len(broken.visits) > num_before + 1

        await until_true(tried_again)
        assert (await shown(cluster, "worker-0"))["health"] in {"recovering", "healthy"}

    run(scenario, prefills=0, decodes=0, boths=2, **QUICK, probe_interval_s=0.05)


def test_a_worker_that_was_drained_while_it_was_ejected_comes_back_by_a_trial():
    async def scenario(cluster: Cluster):
        broken = cluster.decodes[0]
        broken.script = fail
        await until_ejected(cluster, "worker-0")
        broken.health_status = 503
        await until_true(is_shown(cluster, "worker-0", "draining"))
        broken.script, broken.health_status = say_abc, 200
        await until_true(is_shown(cluster, "worker-0", "up"))
        assert (await shown(cluster, "worker-0"))["health"] in {"ejected", "half_open"}
        await until_true(has_state(cluster, "worker-0", "half_open"))
        num_before = len(broken.visits)
        assert await ask(cluster) == 200
        assert len(broken.visits) == num_before + 1
        await until_true(has_state(cluster, "worker-0", "healthy"))

    run(scenario, prefills=0, decodes=0, boths=2, **QUICK, probe_interval_s=0.05)


def test_the_ejected_worker_is_used_where_there_is_no_other():
    async def scenario(cluster: Cluster):
        broken, other = cluster.decodes
        broken.script = fail
        await until_ejected(cluster, "worker-0")
        broken.script = say_abc
        other.kill()
        assert await ask(cluster) == 200
        assert (await cluster.get_json("/ready"))[0] == 200

    run(
        scenario, prefills=0, decodes=0, boths=2, probe_interval_s=0.05,
        ejection_s=30,
    )  # fmt: skip


@pytest.mark.parametrize(("status", "code"), [(400, "invalid_request"), (503, "overloaded")])
def test_what_is_no_fault_of_the_worker_ejects_none(status, code):
    async def refuse(visit: Visit):
        await visit.fail(status, code)

    async def scenario(cluster: Cluster):
        for worker in cluster.decodes:
            worker.script = refuse
        for _ in range(3 * REQUESTS_TO_EJECT):
            async with cluster.post(STREAM) as response:
                assert response.status == status
            await asyncio.sleep(0.06)
        assert await cluster.metric("baton_gateway_ejections_total") == 0
        assert await cluster.metric("baton_gateway_worker_up{") == 2

    run(scenario, prefills=0, decodes=0, boths=2)


@pytest.mark.parametrize("policy", ["round_robin", "cost"])
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_that_refuses_handoffs_gets_none_until_its_next_life(name, policy):
    """As a vLLM server whose weights were replaced."""

    async def scenario(cluster: Cluster):
        prefill, decode = cluster.prefills[0], cluster.decodes[0]
        (refusing,) = (each for each in (prefill, decode) if each.name == name)

        async def why_not() -> str:
            async with cluster.post(STREAM, "/debug/route") as response:
                candidates = (await response.json())["candidates"]
            return " ".join(each["why_not"] or "" for each in candidates)

        async def is_known() -> bool:
            return f"{name} refuses handoffs: replaced" in await why_not()

        async def is_over() -> bool:
            return "replaced" not in await why_not()

        refusing.why_no_handoffs = "replaced"
        await until_true(is_known)
        assert await ask(cluster, **{"x-request-id": "why"}) == 200
        assert not prefill.visits
        _, trace = await cluster.get_json("/debug/requests/why")
        assert trace["gateway"]["mode"] == "colocated"
        assert f"{name} refuses handoffs: replaced" in trace["placement"]
        refusing.why_no_handoffs, refusing.epoch = None, new_epoch()
        await until_true(is_over)
        if policy == "round_robin":
            assert await ask(cluster) == 200
            assert prefill.visits

    run(scenario, policy=policy, probe_interval_s=0.05)


def test_a_prefill_worker_that_fails_every_request_is_left_out():
    async def scenario(cluster: Cluster):
        cluster.prefills[0].script = fail

        async def ejected() -> bool:
            assert await ask(cluster) == 200
            await asyncio.sleep(0.06)
            return (await shown(cluster, "prefill-0"))["health"] == "ejected"

        await until_true(ejected)
        num_before = len(cluster.prefills[0].visits)
        assert await ask(cluster, **{"x-request-id": "why"}) == 200
        assert len(cluster.prefills[0].visits) == num_before
        _, trace = await cluster.get_json("/debug/requests/why")
        assert "prefill-0 is ejected" in trace["placement"]
        cluster.prefills[0].script = prefill_at_once
        await until_true(has_state(cluster, "prefill-0", "half_open"))
        assert await ask(cluster) == 200
        await until_true(has_state(cluster, "prefill-0", "recovering", "healthy"))

    run(scenario, mode="pull", ejection_s=0.5, slow_start_s=0.3, probe_interval_s=0.05)


# Waiting for a worker -----------------------------------------------------------------------------


def test_what_is_queued_waits_on_where_no_more_can_wait_for_a_worker(monkeypatch):
    monkeypatch.setattr("baton.gateway.waiting.MAX_WAITING", 2)
    may_answer = asyncio.Event()

    async def answer_later(visit: Visit) -> None:
        await may_answer.wait()
        await say_abc(visit)

    async def scenario(cluster: Cluster):
        asking = [asyncio.create_task(ask(cluster)) for _ in range(8)]

        async def are_queued() -> bool:
            return (await cluster.get_json("/debug/queue"))[1]["num_requests"] == 6

        async def are_waiting() -> bool:
            return await cluster.metric("baton_gateway_waiting_requests") == 2

        await until_true(are_queued)
        await drained(cluster)
        await until_true(are_waiting)
        await asyncio.sleep(0.3)  # the queue is looked at every 0.1 s
        assert not any(each.done() for each in asking)
        cluster.decodes[0].health_status = 200
        may_answer.set()
        assert await asyncio.gather(*asking) == [200] * 8

    worker = ScriptedWorker("worker-0", "both", answer_later)
    run(
        scenario, prefills=0, decodes=[worker], probe_interval_s=0.05, wait_for_worker_s=10,
        max_running_per_worker=1,
    )  # fmt: skip


async def drained(cluster: Cluster) -> None:
    async def none_up() -> bool:
        return await cluster.metric("baton_gateway_worker_up{") == 0

    for worker in cluster.decodes:
        worker.health_status = 500
    await until_true(none_up)


def test_while_all_restart_requests_wait():
    async def scenario(cluster: Cluster):
        await drained(cluster)
        asking = [asyncio.create_task(ask(cluster)) for _ in range(5)]

        async def all_wait() -> bool:
            return await cluster.metric("baton_gateway_waiting_requests") == 5

        await until_true(all_wait)
        cluster.decodes[1].epoch = new_epoch()
        cluster.decodes[1].health_status = 200
        assert await asyncio.gather(*asking) == [200] * 5
        assert await cluster.metric('baton_gateway_worker_waits_total{outcome="served"}') == 5
        assert await cluster.metric("baton_gateway_worker_wait_seconds_count") == 5
        assert await cluster.metric("baton_gateway_waiting_requests") == 0

    run(
        scenario, prefills=0, decodes=0, boths=2, wait_for_worker_s=10.0, probe_interval_s=0.05
    )  # fmt: skip


def test_where_none_comes_back_the_wait_ends():
    async def scenario(cluster: Cluster):
        await drained(cluster)
        began_at = time.monotonic()
        async with cluster.post(STREAM) as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
            error = (await response.json())["error"]
        assert time.monotonic() - began_at >= 0.3
        assert error["code"] == "no_worker"
        assert "none came within 0.3 s" in error["message"]
        assert await cluster.metric('baton_gateway_worker_waits_total{outcome="expired"}') == 1

    run(scenario, prefills=0, decodes=0, boths=2, probe_interval_s=0.05)


def test_too_many_do_not_wait(monkeypatch):
    monkeypatch.setattr("baton.gateway.waiting.MAX_WAITING", 2)

    async def scenario(cluster: Cluster):
        await drained(cluster)
        asking = [asyncio.create_task(ask(cluster)) for _ in range(2)]

        async def both_wait() -> bool:
            return await cluster.metric("baton_gateway_waiting_requests") == 2

        await until_true(both_wait)
        async with cluster.post(STREAM) as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
        cluster.decodes[0].health_status = 200
        assert await asyncio.gather(*asking) == [200] * 2

    run(
        scenario, prefills=0, decodes=0, boths=1, wait_for_worker_s=10.0, probe_interval_s=0.05
    )  # fmt: skip


def test_a_client_that_leaves_waits_no_more():
    async def scenario(cluster: Cluster):
        await drained(cluster)
        asking = asyncio.create_task(ask(cluster))

        async def waits() -> bool:
            return await cluster.metric("baton_gateway_waiting_requests") == 1

        async def left() -> bool:
            return await cluster.metric('baton_gateway_worker_waits_total{outcome="left"}') == 1

        await until_true(waits)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until_true(left)
        assert await cluster.metric("baton_gateway_waiting_requests") == 0
        assert await cluster.metric('baton_gateway_client_disconnects_total{phase="queued"}') == 1

    run(
        scenario, prefills=0, decodes=0, boths=1, wait_for_worker_s=10.0, probe_interval_s=0.05
    )  # fmt: skip


def test_a_deadline_ends_the_wait():
    async def scenario(cluster: Cluster):
        await drained(cluster)
        assert await ask(cluster) == 504

    run(
        scenario, prefills=0, decodes=0, boths=1, wait_for_worker_s=10.0, probe_interval_s=0.05,
        request_timeout_s=0.3,
    )  # fmt: skip


def test_a_request_whose_only_worker_restarts_is_served_by_the_next_life():
    async def scenario(cluster: Cluster):
        worker = cluster.decodes[0]

        async def fail_when_down(visit: Visit) -> None:
            worker.health_status = 500
            await until_true(is_shown(cluster, "worker-0", "down"))
            await visit.fail(500, "engine_failed")

        async def waits() -> bool:
            return await cluster.metric("baton_gateway_waiting_requests") == 1

        worker.script = fail_when_down
        asking = asyncio.create_task(ask(cluster))
        await until_true(waits)
        worker.epoch, worker.script = new_epoch(), say_abc
        worker.health_status = 200
        assert await asking == 200
        assert len(worker.visits) == 2

    run(
        scenario, prefills=0, decodes=0, boths=1, wait_for_worker_s=10.0, probe_interval_s=0.05
    )  # fmt: skip


def test_a_stream_that_has_waited_for_a_worker_waits_as_long_for_the_next_one(monkeypatch):
    untils, wait = [], WaitingRequests.wait

    async def note_wait(waiting, is_served, until):
        untils.append(until)
        return await wait(waiting, is_served, until)

    monkeypatch.setattr(WaitingRequests, "wait", note_wait)

    async def scenario(cluster: Cluster):
        worker = cluster.decodes[0]

        async def break_when_down(visit: Visit) -> None:
            headers = [(b"content-type", b"text/event-stream"), (b"x-baton-token-ids", b"1")]
            await visit.send({"type": "http.response.start", "status": 200, "headers": headers})
            await visit.write(b':5\ndata: {"choices": [{"index": 0, "text": "a"}]}\n\n')
            worker.health_status = 500
            await until_true(is_shown(cluster, "worker-0", "down"))

        def has_waited(num: int):
            async def condition() -> bool:
                return len(untils) == num

            return condition

        await drained(cluster)
        asking = asyncio.create_task(ask(cluster))
        for num, script in enumerate((break_when_down, say_abc), start=1):
            await until_true(has_waited(num))
            worker.epoch, worker.script = new_epoch(), script
            worker.health_status = 200
        assert await asking == 200
        first, second = untils
        assert second > first

    run(
        scenario, prefills=0, decodes=0, boths=1, wait_for_worker_s=10.0, probe_interval_s=0.05
    )  # fmt: skip


# Prefill workers that never came ------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["round_robin", "cost"])
def test_a_prefill_worker_that_has_not_come_up_is_named(policy):
    prefill = ScriptedWorker("prefill-0", "prefill", prefill_at_once)
    prefill.health_status = 500

    async def scenario(cluster: Cluster):
        async def decode_up() -> bool:
            return await cluster.metric("baton_gateway_worker_up{") == 1

        await until_true(decode_up)
        assert await ask(cluster, **{"x-request-id": "why"}) == 200
        _, trace = await cluster.get_json("/debug/requests/why")
        assert any(prefill.url in line and "has not come up" in line for line in trace["placement"])
        cause = 'baton_gateway_fallbacks_total{cause="prefill_unavailable"}'
        assert await cluster.metric(cause) == 1

    run(scenario, prefills=[prefill], wait=False, policy=policy)
