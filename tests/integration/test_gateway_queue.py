"""Requests wait in the gateway: who is first, who shares, who is refused early, who leaves."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from baton.gateway.clients import make_key, write_keys
from baton.models import DEMO_MODEL_PATH
from tests.integration.gateway_cluster import (
    PROMPT,
    STREAM,
    Cluster,
    run,
    until,
    until_true,
)
from tests.integration.scripted_worker import ScriptedWorker, Visit, say_abc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping
    from pathlib import Path

AT_ONCE = 2
"""What a worker gets with `max_running_per_worker=1`: it runs one, and has one at hand."""
ONE = {"max_running_per_worker": 1}


class Gate:
    """A worker's script that answers as many requests as it may, in their order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._may = asyncio.Semaphore(0)

    async def __call__(self, visit: Visit) -> None:
        self.names.append(visit.headers["x-request-id"])
        await self._may.acquire()
        await say_abc(visit)

    def open(self, num: int = 1_000) -> None:
        for _ in range(num):
            self._may.release()


def gated(num: int = 1, **info: object) -> tuple[Gate, list[ScriptedWorker]]:
    gate = Gate()
    return gate, [ScriptedWorker(f"worker-{n}", "both", gate, **info) for n in range(num)]


async def ask(
    cluster: Cluster, name: str, body: object = PROMPT, key: str | None = None, **headers: str
) -> tuple[int, Any, Mapping[str, str]]:
    own = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        own["authorization"] = f"Bearer {key}"
    async with cluster.post(body, **own, **{"x-request-id": name}) as response:
        text = await response.text()
        answer = await response.json() if response.content_type.endswith("json") else text
        return response.status, answer, response.headers


class Asked:
    """Requests under way, sent one after the other."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.tasks: dict[str, asyncio.Task[Any]] = {}

    def begin(self, name: str, *args: Any, **more: Any) -> None:
        self.tasks[name] = asyncio.create_task(ask(self._cluster, name, *args, **more))

    async def send(self, name: str, *args: Any, **more: Any) -> None:
        """Send one, and wait until the gateway has it."""
        self.begin(name, *args, **more)

        async def are_there() -> bool:
            num = await num_there(self._cluster)
            return num >= sum(not task.done() for task in self.tasks.values())

        await until_true(are_there)

    async def statuses(self) -> dict[str, int]:
        await asyncio.gather(*self.tasks.values())
        return {name: task.result()[0] for name, task in self.tasks.items()}


async def num_there(cluster: Cluster) -> int:
    return int(await cluster.metric("baton_gateway_inflight_requests"))


async def queue_page(cluster: Cluster) -> dict[str, Any]:
    status, page = await cluster.get_json("/debug/queue")
    assert status == 200
    return page


def is_queued(cluster: Cluster, num: int):
    async def asked() -> bool:
        return (await queue_page(cluster))["num_requests"] == num

    return asked


def keys(path: Path, **clients: dict[str, Any]) -> dict[str, str]:
    made = {tenant: make_key(tenant, **limits) for tenant, limits in clients.items()}
    write_keys(path, (kept for _, kept in made.values()))
    return {tenant: text for tenant, (text, _) in made.items()}


def test_what_waits_for_each_model_is_what_an_autoscaler_reads():
    gate = Gate()
    models = ("first", "second")
    workers = [
        ScriptedWorker(f"of-{model}", "both", gate, served_model_name=model) for model in models
    ]

    async def scenario(cluster: Cluster) -> None:
        asked = Asked(cluster)
        for model in models:
            for number in range(AT_ONCE + 3):
                await asked.send(f"{model}-{number}", {**PROMPT, "model": model})
        await until_true(is_queued(cluster, 6))
        _, demand = await cluster.get_json("/debug/demand")
        assert [each["num_waiting"] for each in demand["models"]] == [3, 3]
        gate.open()
        assert set((await asked.statuses()).values()) == {200}

    run(scenario, prefills=0, decodes=workers, **ONE)


def test_a_burst_waits_in_the_gateway_and_not_in_the_engine():
    gate, workers = gated()

    async def scenario(cluster: Cluster) -> None:
        asked = Asked(cluster)
        names = [f"r{n}" for n in range(AT_ONCE + 7)]
        for name in names:
            await asked.send(name)
        await until(lambda: len(gate.names) == AT_ONCE)
        await until_true(is_queued(cluster, 7))
        page = await queue_page(cluster)
        _, demand = await cluster.get_json("/debug/demand")
        (asked_for,) = demand["models"]
        assert (asked_for["num_begun"], asked_for["num_waiting"]) == (AT_ONCE, 7)
        assert asked_for["shape"] is None, "nothing has ended"
        (waiting,) = page["waiting"]
        assert (waiting["num_requests"], waiting["priority"], waiting["tenant"]) == (
            7,
            "normal",
            "",
        )
        (room,) = page["workers"]
        assert (room["num_given"], room["limit"]) == (AT_ONCE, AT_ONCE)
        assert await cluster.metric('baton_gateway_queued_requests{priority="normal"}') == 7
        assert await cluster.metric('baton_gateway_queued_tokens{priority="normal"}') >= 7
        gate.open(2)
        await until(lambda: len(gate.names) == AT_ONCE + 2)
        await until_true(is_queued(cluster, 5))
        gate.open()
        assert set((await asked.statuses()).values()) == {200}
        assert gate.names == names, "one class and one tenant: in their order, each once"
        assert await cluster.metric("baton_gateway_queue_wait_seconds_count{") == 7
        assert await cluster.metric("baton_gateway_queued_requests{") == 0
        _, last = await cluster.get_json(f"/debug/requests/{names[-1]}")
        _, first = await cluster.get_json("/debug/requests/r0")
        assert last["gateway"]["waited_s"] > 0 == first["gateway"]["waited_s"]

    run(scenario, prefills=0, decodes=workers, **ONE)


def test_what_is_cached_is_looked_for_again_after_the_wait():
    """Two prompts that are alike wait; the first one's KV is there when the second is placed."""
    gate, workers = gated(model=str(DEMO_MODEL_PATH))
    alike = PROMPT | {"prompt": [7] * 50}

    async def scenario(cluster: Cluster) -> None:
        asked = Asked(cluster)
        for n in range(AT_ONCE):
            await asked.send(f"busy{n}")
        await asked.send("first", alike)
        await asked.send("second", alike)
        await until_true(is_queued(cluster, 2))
        # What is expected of a worker counts from when it is followed, soon after it is up.
        num_reads = workers[0].num_health_reads
        await until(lambda: workers[0].num_health_reads > num_reads + 4)
        gate.open()
        assert set((await asked.statuses()).values()) == {200}
        found = []
        for name in ("first", "second"):
            _, trace = await cluster.get_json(f"/debug/requests/{name}")
            found += [line for line in trace["placement"] if line.startswith("worker-0 has")]
        assert found == [f"worker-0 has {num} of 50 tokens cached" for num in (0, 48)]

    run(scenario, prefills=0, decodes=workers, policy="prefix", **ONE)


@pytest.mark.parametrize("reported", [None, 1])
def test_limits_are_what_workers_report(reported):
    gate, workers = gated()
    workers[0].load = {"num_waiting": 0, "num_blocks": 9, "num_free_blocks": 9, "block_size": 16}
    if reported is not None:
        workers[0].load["max_running"] = reported

    async def scenario(cluster: Cluster) -> None:
        await until(lambda: workers[0].num_health_reads > 1)
        asked = Asked(cluster)
        for n in range(6):
            await asked.send(f"r{n}")
        at_once = 6 if reported is None else AT_ONCE
        await until(lambda: len(gate.names) == at_once)
        await until_true(is_queued(cluster, 6 - at_once))
        gate.open()
        assert set((await asked.statuses()).values()) == {200}

    run(scenario, prefills=0, decodes=workers)


def test_classes_are_served_in_their_order_and_a_client_that_lies_gets_its_tenants(tmp_path):
    path = tmp_path / "clients.json"
    known = keys(path, slow={"priority": "low"}, usual={}, urgent={"priority": "high"})
    gate, workers = gated()

    async def scenario(cluster: Cluster) -> None:
        asked = Asked(cluster)
        for n in range(AT_ONCE):
            await asked.send(f"busy{n}", key=known["urgent"])
        await until(lambda: len(gate.names) == AT_ONCE)
        await asked.send("lies", key=known["slow"], x_baton_priority="high")
        await asked.send("low", key=known["slow"])
        await asked.send("lowered", key=known["urgent"], x_baton_priority="low")
        await asked.send("normal", key=known["usual"], x_baton_priority="high")
        await asked.send("high", key=known["urgent"])
        await until_true(is_queued(cluster, 5))
        shown = {
            (w["priority"], w["tenant"]): w["num_requests"]
            for w in (await queue_page(cluster))["waiting"]
        }
        assert shown == {
            ("high", "urgent"): 1, ("normal", "usual"): 1, ("low", "slow"): 2, ("low", "urgent"): 1,
        }  # fmt: skip
        for _ in range(5):
            num = len(gate.names)
            gate.open(1)
            await until(lambda num=num: len(gate.names) > num)
        assert gate.names[AT_ONCE:] == ["high", "normal", "lies", "lowered", "low"]
        gate.open()
        assert set((await asked.statuses()).values()) == {200}

    run(scenario, prefills=0, decodes=workers, client_keys_file=path, **ONE)


def test_tenants_share_by_their_weights(tmp_path):
    path = tmp_path / "clients.json"
    known = keys(path, many={}, heavy={"weight": 3.0})
    gate, workers = gated()

    async def scenario(cluster: Cluster) -> None:
        asked = Asked(cluster)
        for n in range(AT_ONCE + 12):
            await asked.send(f"many{n}", key=known["many"])
        for n in range(9):
            await asked.send(f"heavy{n}", key=known["heavy"])
        await until_true(is_queued(cluster, 21))
        for _ in range(12):
            num = len(gate.names)
            gate.open(1)
            await until(lambda num=num: len(gate.names) > num)
        served = [name.rstrip("0123456789") for name in gate.names[AT_ONCE:]]
        assert served.count("heavy") in {8, 9}
        assert "many" in served[:5], "the one that came late does not go before all others"
        gate.open()
        assert set((await asked.statuses()).values()) == {200}

    run(scenario, prefills=0, decodes=workers, client_keys_file=path, **ONE)


def test_a_client_that_leaves_frees_its_place():
    gate, workers = gated()

    async def scenario(cluster: Cluster) -> None:
        asked = Asked(cluster)
        for n in range(AT_ONCE + 3):
            await asked.send(f"r{n}")
        await until_true(is_queued(cluster, 3))
        asked.tasks.pop("r3").cancel()
        await until_true(is_queued(cluster, 2))
        queued = 'baton_gateway_client_disconnects_total{phase="queued"}'

        async def is_counted() -> bool:
            return await cluster.metric(queued) == 1

        await until_true(is_counted)
        asked.tasks.pop("r0").cancel()  # its worker has it: another one may come
        await until_true(is_queued(cluster, 1))
        gate.open()
        assert set((await asked.statuses()).values()) == {200}
        assert gate.names == ["r0", "r1", "r2", "r4"]
        await until_true(is_queued(cluster, 0))
        page = await queue_page(cluster)
        assert page["models"][0]["num_running"] == page["workers"][0]["num_given"] == 0

    run(scenario, prefills=0, decodes=workers, **ONE)


def test_what_would_come_too_late_is_refused_early():
    """5 requests a second; 20 wait, so the next one would wait four seconds."""
    gate, workers = gated()

    async def scenario(cluster: Cluster) -> None:
        asked = Asked(cluster)
        for n in range(AT_ONCE + 26):
            await asked.send(f"r{n}")
        for _ in range(6):  # the first one shows nothing of the rate
            await asyncio.sleep(0.2)
            gate.open(1)
        status, answer, headers = await ask(cluster, "late", x_baton_ttft_ms="500")
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        assert "x-baton-ttft-ms" in answer["error"]["message"]
        assert 1 <= int(headers["retry-after"]) <= 60
        assert await cluster.metric('baton_gateway_queue_refused_total{cause="target"}') == 1
        await asked.send("patient", x_baton_ttft_ms="60000")
        await until_true(is_queued(cluster, 21))
        gate.open()
        assert set((await asked.statuses()).values()) == {200}

    run(scenario, prefills=0, decodes=workers, **ONE)


def test_targets_of_a_model_and_deadlines_end_a_wait():
    """Nothing drains, so that nothing can be predicted: each leaves when it is too late."""
    from baton.gateway.targets import Targets  # noqa: PLC0415

    gate, workers = gated()

    async def scenario(cluster: Cluster) -> None:
        asked = Asked(cluster)
        for n in range(AT_ONCE):
            await asked.send(f"r{n}", x_baton_ttft_ms="30000")
        await until(lambda: len(gate.names) == AT_ONCE)
        began = time.monotonic()
        status, answer, headers = await ask(cluster, "model's")
        assert time.monotonic() - began > 0.3
        assert (status, headers["retry-after"]) == (503, "2")
        assert "target" in answer["error"]["message"]
        status, answer, headers = await ask(cluster, "deadline", STREAM, x_baton_ttft_ms="30000")
        assert (status, headers["retry-after"]) == (503, "2")
        assert "deadline" in answer["error"]["message"]
        assert time.monotonic() - began > 0.9 * 2.0
        for cause in ("target", "deadline"):
            assert (
                await cluster.metric(f'baton_gateway_queue_expired_total{{cause="{cause}"}}') == 1
            )
        assert gate.names == ["r0", "r1"], "no worker was asked"
        gate.open()
        assert set((await asked.statuses()).values()) == {200}

    run(
        scenario,
        prefills=0,
        decodes=workers,
        targets={"*": Targets(ttft_s=0.4)},
        first_byte_timeout_s=2.0,
        **ONE,
    )


def test_a_full_queue_refuses_the_tenant_that_fills_it(tmp_path):
    path = tmp_path / "clients.json"
    known = keys(path, busy={}, quiet={}, urgent={"priority": "high"})
    gate, workers = gated()

    async def scenario(cluster: Cluster) -> None:
        asked = Asked(cluster)
        for n in range(AT_ONCE + 4):
            await asked.send(f"busy{n}", key=known["busy"])
        await until_true(is_queued(cluster, 4))
        status, answer, headers = await ask(cluster, "more", key=known["busy"])
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        assert int(headers["retry-after"]) >= 1
        asked.begin("quiet", key=known["quiet"])
        status, answer, headers = await asked.tasks.pop(f"busy{AT_ONCE + 3}")
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        status, answer, headers = await ask(cluster, "more", key=known["busy"])
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["retry-after"]) >= 1
        asked.begin("urgent", key=known["urgent"])
        assert (await asked.tasks.pop(f"busy{AT_ONCE + 2}"))[0] == 429
        assert await cluster.metric('baton_gateway_queue_refused_total{cause="queue_full"}') == 2
        assert await cluster.metric('baton_gateway_queue_expired_total{cause="displaced"}') == 2
        gate.open()
        assert set((await asked.statuses()).values()) == {200}
        assert gate.names[AT_ONCE] == "urgent"

    run(scenario, prefills=0, decodes=workers, client_keys_file=path, max_queued_requests=4, **ONE)


def test_a_tenant_has_a_bound_of_its_own(tmp_path):
    path = tmp_path / "clients.json"
    known = keys(path, busy={}, quiet={})
    gate, workers = gated()

    async def scenario(cluster: Cluster) -> None:
        asked = Asked(cluster)
        for n in range(AT_ONCE + 2):
            await asked.send(f"busy{n}", key=known["busy"])
        status, answer, _ = await ask(cluster, "more", key=known["busy"])
        assert status == 429
        assert "max_queued_per_tenant" in answer["error"]["message"]
        await asked.send("quiet", key=known["quiet"])
        gate.open()
        assert set((await asked.statuses()).values()) == {200}

    run(
        scenario, prefills=0, decodes=workers, client_keys_file=path, max_queued_per_tenant=2, **ONE
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-baton-ttft-ms", "0"),
        ("x-baton-ttft-ms", "-1"),
        ("x-baton-ttft-ms", "1e7"),
        ("x-baton-ttft-ms", "1e999"),
        ("x-baton-ttft-ms", "1_000"),
        ("x-baton-ttft-ms", "nan"),
        ("x-baton-ttft-ms", "3600001"),
        ("x-baton-ttft-ms", "9" * 400),
        ("x-baton-tpot-ms", "soon"),
        ("x-baton-tpot-ms", ""),
        ("x-baton-itl-ms", "60001"),
        ("x-baton-priority", "urgent"),
        ("x-baton-priority", "HIGH"),
    ],
)
def test_headers_that_make_no_sense_are_named(name, value):
    async def scenario(cluster: Cluster) -> None:
        async with cluster.post(PROMPT, **{name: value}) as response:
            answer = await response.json()
        assert response.status == 400
        assert (answer["error"]["param"], answer["error"]["code"]) == (name, "invalid_value")
        assert "leave it out" in answer["error"]["message"]
        assert not cluster.decodes[0].visits

    run(scenario)


def test_several_answers_wait_one_by_one_and_are_merged():
    gate, workers = gated()

    async def scenario(cluster: Cluster) -> None:
        body = {**PROMPT, "prompt": ["a", "b", "c", "d", "e"]}
        asked = asyncio.create_task(ask(cluster, "five", body))
        await until(lambda: len(gate.names) == AT_ONCE)
        await until_true(is_queued(cluster, 5 - AT_ONCE))
        gate.open()
        status, answer, _ = await asked
        assert (status, len(answer["choices"])) == (200, 5)
        asked = asyncio.create_task(ask(cluster, "n", {**STREAM, "n": 6}))
        status, answer, _ = await asked
        assert status == 200
        assert answer.rstrip().endswith("[DONE]")
        await until_true(is_queued(cluster, 0))
        page = await queue_page(cluster)
        assert page["models"][0]["num_running"] == page["workers"][0]["num_given"] == 0

    run(scenario, prefills=0, decodes=workers, **ONE)


def test_a_retry_does_not_wait_again():
    gate, (good,) = gated()

    async def fail(visit: Visit) -> None:
        gate.names.append("failed " + visit.headers["x-request-id"])
        await asyncio.sleep(0.3)
        await visit.fail(500, "broken")

    bad = ScriptedWorker("worker-bad", "both", fail)

    async def scenario(cluster: Cluster) -> None:
        asked = Asked(cluster)
        for n in range(2 * AT_ONCE + 2):
            await asked.send(f"r{n}")
        await until(lambda: sum(n.startswith("failed") for n in gate.names) >= AT_ONCE)
        failed = [n.removeprefix("failed ") for n in gate.names if n.startswith("failed")][:AT_ONCE]
        # The good worker is full, and others wait: those that failed go there all the same.
        await until(lambda: set(failed) <= set(gate.names))
        assert good.visits
        gate.open()
        assert set((await asked.statuses()).values()) == {200}

    run(scenario, prefills=0, decodes=[good, bad], **ONE)


def test_those_that_wait_get_an_answer_when_the_last_worker_is_gone():
    _, workers = gated()

    async def scenario(cluster: Cluster) -> None:
        asked = Asked(cluster)
        for n in range(AT_ONCE + 3):
            await asked.send(f"r{n}")
        await until_true(is_queued(cluster, 3))
        workers[0].kill()
        statuses = await asked.statuses()
        assert set(statuses.values()) <= {502, 503}
        assert await num_there(cluster) == 0
        assert (await queue_page(cluster))["models"][0]["num_running"] == 0

    run(scenario, prefills=0, decodes=workers, **ONE)


def test_a_full_worker_is_passed_over_whatever_the_policy():
    """In turns each would get half: one that is stuck gets no more than it may have."""
    gate, (stuck,) = gated()
    quick = ScriptedWorker("quick", "both", say_abc)

    async def scenario(cluster: Cluster) -> None:
        asked: list[Awaitable[Any]] = [
            asyncio.create_task(ask(cluster, f"r{n}")) for n in range(30)
        ]
        await until(lambda: len(quick.visits) == 30 - AT_ONCE)
        assert len(stuck.visits) == AT_ONCE
        gate.open()
        assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}

    run(scenario, prefills=0, decodes=[stuck, quick], policy="round_robin", **ONE)
