"""Workers come and go while a gateway runs: followed lists, and what becomes of streams."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from baton.clock import MachineClock
from baton.gateway.members import file as file_source
from baton.gateway.members import membership
from baton.gateway.workers import LEFT
from baton.net.http_limits import Connections, HttpLimits
from baton.net.http_server import bounded_protocol
from baton.net.tls import ClusterTls
from baton.protocol.members import Member, MembersFile, encode_members
from baton.protocol.worker_http import Role
from tests.integration.gateway_cluster import PROMPT, STREAM, Cluster, run, until_true
from tests.integration.scripted_worker import (
    KEY,
    ScriptedWorker,
    Visit,
    prefill_at_once,
    say_abc,
    serving,
    token,
)
from tests.integration.test_gateway_stream_moves import (
    NUM_TOKENS,
    WHOLE,
    begin,
    check_moved,
    counting,
    results,
    write_token,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.scripted_worker import Script


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_source, "POLL_S", 0.02)
    monkeypatch.setattr(membership, "LOOK_S", 0.02)


@pytest.fixture(name="path")
def members_path(tmp_path: Path) -> Path:
    return tmp_path / "members.json"


def write_members(path: Path, *members: Member) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(encode_members(MembersFile(version=1, workers=members)))
    draft.chmod(0o644)
    draft.replace(path)


def write(path: Path, *workers: ScriptedWorker, draining: tuple[ScriptedWorker, ...] = ()) -> None:
    listed = (*workers, *draining)
    write_members(path, *(Member(w.url, Role(w.listed_as), w in draining) for w in listed))


def follow(path: Path, scenario: Any, **options: Any) -> None:
    """Run a scenario against a gateway that has its workers from a file alone."""
    settings = {"policy": "round_robin", "members": (f"file:{path}",), **options}
    run(scenario, prefills=0, decodes=0, wait=False, **settings)


async def list_states(cluster: Cluster) -> dict[str, str]:
    """The states of all workers by their URLs."""
    _, shown = await cluster.get_json("/debug/workers")
    return {each["url"]: each["state"] for each in shown["workers"]}


async def until_states(cluster: Cluster, expected: dict[ScriptedWorker, str]) -> None:
    wanted = {worker.url: state for worker, state in expected.items()}

    async def is_so() -> bool:
        return await list_states(cluster) == wanted

    await until_true(is_so)


async def check_forgotten(cluster: Cluster, worker: ScriptedWorker) -> None:
    """No page and no metric names it, and it is not asked any more."""

    async def is_forgotten() -> bool:
        text = ""
        for page in ("/metrics", "/debug/workers", "/debug/links", "/debug/queue"):
            async with cluster.client.get(cluster.url + page) as response:
                text += await response.text()
        return worker.url not in text and f'"{worker.name}"' not in text

    await until_true(is_forgotten)
    num_reads = worker.num_health_reads
    await asyncio.sleep(0.25)  # two probes and a half
    assert worker.num_health_reads == num_reads


def held(released: asyncio.Event) -> Script:
    """A worker whose streams stop after some tokens, until the event is set."""

    async def script(visit: Visit) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"x-baton-token-ids", b"1")]
        await visit.send({"type": "http.response.start", "status": 200, "headers": headers})
        for index in range(NUM_TOKENS):
            if index == 20:
                await released.wait()
            await write_token(visit, index)
        await visit.done()

    return script


async def answer_of(cluster: Cluster) -> tuple[int, Any]:
    async with cluster.post(PROMPT) as response:
        return response.status, await response.json()


def test_a_stream_moves_from_a_worker_that_left_the_list(path: Path) -> None:
    """Its client notices nothing, and nothing is left of the worker."""
    first, second = (
        ScriptedWorker(f"d{i}", "decode", counting(step_s))
        for i, step_s in enumerate((0.02, 0.001))
    )

    async def scenario(cluster: Cluster) -> None:
        async with first.running(), second.running():
            write(path, first)
            await until_states(cluster, {first: "up"})
            asking, left = await begin(cluster, first)
            write(path, second)  # which the gateway has never seen
            answer = await asking
            assert (answer.text, answer.is_broken) == (WHOLE, False)
            assert await results(cluster) == {"drain moved": 1}
            check_moved(first, second, left)
            await check_forgotten(cluster, first)
            assert await list_states(cluster) == {second.url: "up"}

    follow(path, scenario)


def test_requests_that_cannot_move_end_where_they_are(path: Path) -> None:
    """An answer in one piece, and a prompt that is being computed."""
    released = asyncio.Event()

    async def prefill(visit: Visit) -> None:
        await released.wait()
        await prefill_at_once(visit)

    async def decode(visit: Visit) -> None:
        await released.wait()
        await say_abc(visit)

    prefills = [ScriptedWorker(f"p{i}", "prefill", prefill) for i in range(2)]
    decodes = [ScriptedWorker(f"d{i}", "decode", decode) for i in range(2)]

    async def scenario(cluster: Cluster) -> None:
        async with AsyncExitStack() as stack:
            for worker in (*prefills, *decodes):
                await stack.enter_async_context(worker.running())
            write(path, prefills[0], decodes[0])
            await until_states(cluster, {prefills[0]: "up", decodes[0]: "up"})
            asking = asyncio.create_task(answer_of(cluster))
            await until_true(lambda: visited(decodes[0], prefills[0]))
            write(path, prefills[1], decodes[1])
            await until_states(
                cluster,
                {prefills[0]: "draining", decodes[0]: "draining"}
                | {prefills[1]: "up", decodes[1]: "up"},
            )
            other = asyncio.create_task(answer_of(cluster))
            await until_true(lambda: visited(decodes[1], prefills[1]))
            assert len(decodes[0].visits) == len(prefills[0].visits) == 1, "nothing new"
            assert not asking.done()
            released.set()
            for status, body in await asyncio.gather(asking, other):
                assert (status, body["choices"][0]["text"]) == (200, "abc")
            for worker in (prefills[0], decodes[0]):
                await check_forgotten(cluster, worker)

    async def visited(*workers: ScriptedWorker) -> bool:
        return all(worker.visits for worker in workers)

    follow(path, scenario)


def test_a_request_that_takes_too_long_goes_on_elsewhere(path: Path) -> None:
    first = ScriptedWorker("d0", "decode", held(asyncio.Event()))
    second = ScriptedWorker("d1", "decode", counting(0))

    async def scenario(cluster: Cluster) -> None:
        async with first.running(), second.running():
            write(path, first)
            await until_states(cluster, {first: "up"})
            asking, left = await begin(cluster, first)
            write(path, second)
            answer = await asking
            assert (answer.text, answer.is_broken) == (WHOLE, False)
            assert left.left_at is not None
            resumed = await cluster.metric('baton_gateway_resumed_streams_total{result="resumed"}')
            assert (resumed, await results(cluster)) == (1, {})
            await check_forgotten(cluster, first)

    follow(path, scenario, move_streams="never", drain_timeout_s=0.3)


def test_a_worker_that_is_listed_again_is_used_again(path: Path) -> None:
    """Its streams were not touched meanwhile; so it is with one that the list drains."""
    released = asyncio.Event()
    first, second = (ScriptedWorker(f"d{i}", "decode", held(released)) for i in range(2))

    async def scenario(cluster: Cluster) -> None:
        async with first.running(), second.running():
            write(path, first)
            await until_states(cluster, {first: "up"})
            asking, left = await begin(cluster, first)
            write(path, second)
            await until_states(cluster, {first: "draining", second: "up"})
            assert await find_reason(cluster) == ([], LEFT)
            write(path, second, draining=(first,))

            async def is_drained() -> bool:
                source = f"file:{path}"
                return await find_reason(cluster) == ([source], f"drained by {source}")

            await until_true(is_drained)
            assert (await list_states(cluster))[first.url] == "draining"
            write(path, first, second)
            await until_states(cluster, {first: "up", second: "up"})
            released.set()
            answer = await asking
            assert (answer.text, left.left_at) == (WHOLE, None)
            for worker in (first, second):
                worker.script = say_abc
            for _ in range(2):
                assert (await answer_of(cluster))[0] == 200
            assert len(first.visits) == 2
            assert len(second.visits) == 1

    async def find_reason(cluster: Cluster) -> tuple[list[str], str | None]:
        _, shown = await cluster.get_json("/debug/workers")
        (found,) = (each for each in shown["workers"] if each["url"] == first.url)
        return found["sources"], found["why_withdrawn"]

    follow(path, scenario, move_streams="never")


def test_a_worker_may_be_started_again_elsewhere_under_its_name(path: Path) -> None:
    """As a pod with another address. The stream at the old one goes on."""
    released = asyncio.Event()
    first, second = (ScriptedWorker("d", "decode", held(released)) for _ in range(2))

    async def scenario(cluster: Cluster) -> None:
        async with first.running(), second.running():
            write(path, first)
            await until_states(cluster, {first: "up"})
            asking, left = await begin(cluster, first)
            write(path, second)
            await until_states(cluster, {second: "up"})
            second.script = say_abc
            assert (await answer_of(cluster))[0] == 200
            released.set()
            answer = await asking
            assert (answer.text, left.left_at) == (WHOLE, None)
            assert await list_states(cluster) == {second.url: "up"}
            num_reads = first.num_health_reads
            await asyncio.sleep(0.25)
            assert first.num_health_reads == num_reads

    follow(path, scenario, move_streams="never")


def test_a_request_waits_for_a_worker_that_a_source_may_list(path: Path) -> None:
    """All that decode have left; with fixed lists none would be expected back."""
    prefill = ScriptedWorker("p", "prefill", prefill_at_once)
    first, second = (ScriptedWorker(f"d{i}", "decode", say_abc) for i in range(2))

    async def scenario(cluster: Cluster) -> None:
        async with prefill.running(), first.running(), second.running():
            write(path, prefill, first)
            await until_states(cluster, {prefill: "up", first: "up"})
            write(path, prefill)
            await until_states(cluster, {prefill: "up"})
            asking = asyncio.create_task(answer_of(cluster))

            async def waits() -> bool:
                return await cluster.metric("baton_gateway_waiting_requests") == 1

            await until_true(waits)
            write(path, prefill, second)
            status, body = await asking
            assert (status, body["choices"][0]["text"]) == (200, "abc")
            assert not first.visits

    follow(path, scenario, wait_for_worker_s=5.0)


def test_errors_name_the_sources_that_fail_and_the_last_list_stays(path: Path) -> None:
    worker = ScriptedWorker("d", "decode", say_abc)

    async def scenario(cluster: Cluster) -> None:
        async def is_refused(why: str) -> bool:
            status, body = await answer_of(cluster)
            assert status == 503
            return f"file:{path}" in body["error"]["message"] and why in body["error"]["message"]

        async with worker.running():
            await until_true(lambda: is_refused("No such file or directory"))
            _, not_ready = await cluster.get_json("/ready")
            assert f"file:{path} (it cannot be read: No such file" in str(not_ready)
            write(path)
            await until_true(lambda: is_refused("it lists no worker"))
            write(path, worker)
            await until_states(cluster, {worker: "up"})
            series = f'{{source="file:{path}"}}'
            num_errors = await cluster.metric(f"baton_gateway_members_errors_total{series}")
            assert num_errors >= 1
            path.write_text("half a fi", encoding="utf-8")

            async def counts() -> bool:
                now = await cluster.metric(f"baton_gateway_members_errors_total{series}")
                return now > num_errors + 3

            await until_true(counts)
            _, shown = await cluster.get_json("/debug/workers")
            (problem,) = shown["source_problems"]
            assert "no members file" in problem
            assert await cluster.metric(f"baton_gateway_members{series}") == 1
            assert await cluster.metric(f"baton_gateway_members_age_seconds{series}") > 0.05
            assert (await answer_of(cluster))[0] == 200

    follow(path, scenario, wait_for_worker_s=0.05)


def test_the_configuration_decides_where_sources_disagree(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decode, other = (ScriptedWorker(name, "both", say_abc) for name in ("d", "other"))
    decode.listed_as = "decode"

    async def scenario(cluster: Cluster) -> None:
        async with other.running():
            write_members(path, *(Member(each.url, Role.BOTH) for each in (decode, other)))
            await until_states(cluster, {decode: "up", other: "up"})
            _, shown = await cluster.get_json("/debug/workers")
            first, second = shown["workers"]
            assert (first["role"], second["role"]) == ("decode", "both")
            assert first["sources"] == ["configuration", f"file:{path}"]
            assert second["sources"] == [f"file:{path}"]
            write(path)
            await until_states(cluster, {decode: "up"})

    with caplog.at_level(logging.WARNING, logger="baton.gateway.members"):
        settings = {"members": (f"file:{path}",), "policy": "round_robin"}
        run(scenario, prefills=0, decodes=[decode], **settings)
    logged = [record.getMessage() for record in caplog.records]
    (conflict,) = (text for text in logged if "list it with one role" in text)
    assert conflict.startswith(f"{decode.url} is a decode worker by configuration")


def test_who_is_no_worker_of_the_cluster_gets_no_bearer(path: Path) -> None:
    """A list may be wrong: an address has to prove that it is a worker, before anything is sent."""
    received: dict[str, bytes] = {"plain": b"", "tls": b""}

    async def take(name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received[name] += await reader.read(1 << 16) or b"closed"
        writer.close()

    async def scenario(cluster: Cluster) -> None:
        servers = {
            name: await asyncio.start_server(
                lambda reader, writer, name=name: take(name, reader, writer), "127.0.0.1", 0
            )
            for name in received
        }
        ports = {name: each.sockets[0].getsockname()[1] for name, each in servers.items()}
        urls = f"http://127.0.0.1:{ports['plain']}", f"https://127.0.0.1:{ports['tls']}"
        write_members(path, *(Member(url, Role.BOTH) for url in urls))

        async def was_asked() -> bool:
            return received["tls"] != b""

        await until_true(was_asked)
        await asyncio.sleep(0.3)
        assert received["tls"].startswith(b"\x16\x03"), "a TLS handshake"
        assert token().encode() not in received["tls"]
        assert received["plain"] == b"", "not even connected to"
        _, shown = await cluster.get_json("/debug/workers")
        assert [each["url"] for each in shown["workers"]] == [urls[1]]
        assert "does not prove who answers there" in shown["source_problems"][0]
        for server in servers.values():
            server.close()

    follow(path, scenario, tls="control")


def test_a_worker_is_found_by_dns() -> None:
    """By the machine's resolver, over TLS."""
    worker = ScriptedWorker("d", "decode", say_abc)

    async def scenario(cluster: Cluster) -> None:
        connections = Connections(HttpLimits(), MachineClock(), lambda _: None, ClusterTls(KEY))
        async with serving(worker, worker._sock, http=bounded_protocol(connections)):

            async def is_up() -> bool:
                return (await list_states(cluster)).get(f"https://127.0.0.1:{worker.port}") == "up"

            await until_true(is_up)
            async with cluster.post(STREAM) as response:
                assert (response.status, b"[DONE]" in await response.read()) == (200, True)

    settings = {"members": (f"dns:decode=localhost:{worker.port}",), "tls": "control"}
    run(scenario, prefills=0, decodes=0, wait=False, policy="round_robin", **settings)
