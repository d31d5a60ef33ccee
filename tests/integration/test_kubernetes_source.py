"""A gateway's source of workers follows a Service's EndpointSlices, through faults of the API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from baton.clock import MachineClock
from baton.gateway.members import kubernetes_api
from baton.gateway.members.interface import SourceStatus
from baton.gateway.members.kubernetes import KubernetesSource, Pauses, ServiceTarget
from baton.gateway.options import WorkerAddress
from baton.net.kubernetes import access, connection
from baton.net.kubernetes.connection import PAGE_ITEMS
from baton.protocol.worker_http import Role
from tests.integration.gateway_cluster import PROMPT, Cluster, cluster, until_true
from tests.integration.kubernetes_api import KubernetesApi, endpoint, refuse, write_event
from tests.integration.scripted_worker import ScriptedWorker, say_abc
from tests.integration.test_gateway_tls import certificate_files

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from baton.net.kubernetes.access import ServiceAccount

QUICK = Pauses(first_s=0.01, max_s=0.05, watch_again_s=0.01)
LOGGER = "baton.gateway.members.interface"


def worker(address: str, *, draining: bool = False) -> WorkerAddress:
    return WorkerAddress(
        f"https://{address}:8101", Role.DECODE, draining=draining, topology="//node-1"
    )


class Seen:
    """What a source has yielded."""

    def __init__(self) -> None:
        self.sets: list[frozenset[WorkerAddress]] = []
        self.status = SourceStatus("kubernetes:decode=workers", MachineClock())

    @property
    def latest(self) -> frozenset[WorkerAddress] | None:
        return self.sets[-1] if self.sets else None

    async def follow(self, server: ServiceAccount) -> None:
        target = ServiceTarget.parse("decode=workers")
        source = KubernetesSource(target, server, self.status, QUICK)
        async with contextlib.aclosing(source.watch()) as sets:
            async for found in sets:
                self.sets.append(found)

    async def until(self, *workers: WorkerAddress) -> None:
        async def is_seen() -> bool:
            return self.latest == frozenset(workers)

        await until_true(is_seen, why=lambda: f"{self.latest}, not {workers}")


@contextlib.asynccontextmanager
async def following(server: ServiceAccount) -> AsyncGenerator[Seen]:
    seen = Seen()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(seen.follow(server))
        yield seen
        task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return condition()

    await until_true(holds)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_pods_are_listed_as_they_load_drain_and_go(tmp_path: Path) -> None:
    async def main() -> None:
        api = KubernetesApi(tmp_path)
        api.put("a", endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False))
        async with api.running(), following(api.api) as seen:
            await seen.until(worker("10.0.0.1"))
            api.put("a", endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=True))
            await seen.until(worker("10.0.0.1"), worker("10.0.0.2"))
            ending = endpoint("10.0.0.1", ready=False, serving=True, terminating=True)
            api.put("a", ending, endpoint("10.0.0.2"))
            await seen.until(worker("10.0.0.1", draining=True), worker("10.0.0.2"))
            api.put("a", endpoint("10.0.0.2"))
            api.put("b", endpoint("10.0.0.3"))
            await seen.until(worker("10.0.0.2"), worker("10.0.0.3"))
            api.remove("a")
            await seen.until(worker("10.0.0.3"))
            assert api.num_asked == {"list": 1, "watch": 1}

    asyncio.run(main())


def test_a_service_without_pods_is_an_empty_set(tmp_path: Path) -> None:
    async def main() -> None:
        api = KubernetesApi(tmp_path)
        async with api.running(), following(api.api) as seen:
            await seen.until()
            assert (seen.status.problem, seen.status.age_s is None) == (None, False)
            api.put("a", endpoint("10.0.0.1"))
            await seen.until(worker("10.0.0.1"))

    asyncio.run(main())


def test_long_lists_come_in_pages(tmp_path: Path) -> None:
    async def main() -> None:
        api = KubernetesApi(tmp_path)
        addresses = [f"10.0.{number // 250}.{number % 250}" for number in range(2 * PAGE_ITEMS + 1)]
        for address in addresses:
            api.put(f"slice-{address}", endpoint(address))
        async with api.running(), following(api.api) as seen:
            await seen.until(*map(worker, addresses))
            assert api.num_asked["list"] == 3

    asyncio.run(main())


async def expired_in_the_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await write_event(response, "ERROR", {"kind": "Status", "code": 410, "message": "too old"})
    return response


def test_a_version_that_has_expired_is_listed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        api = KubernetesApi(tmp_path)
        api.put("a", endpoint("10.0.0.1"))
        async with api.running(), following(api.api) as seen:
            await seen.until(worker("10.0.0.1"))
            await until(lambda: api.num_asked["watch"] == 1)
            # While no watch runs, a slice goes, and the server forgets that.
            api.fault, api.faulty_verb = expired_in_the_stream, "watch"
            assert api.cut_watches() == 1
            await until(lambda: api.num_faults > 2)
            api.remove("a")
            api.put("b", endpoint("10.0.0.2"))
            api.forget_changes()
            api.fault = None
            await seen.until(worker("10.0.0.2"))
        assert not any("(410)" in line for line in warnings(caplog))  # this happens every day

    asyncio.run(main())


async def garbage(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b'{"type": "ADDED", "object": {"metadata": 7}}\n\x00\xff\n')


async def unknown_event(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b'{"type": "SURPRISE", "object": {}}\n')


async def a_long_event(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        for _ in range(2 * connection.MAX_LINE_BYTES // 65_536):
            await response.write(b"x" * 65_536)
    return response


async def broken_off(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def internal_error(request: web.Request) -> web.StreamResponse:
    return refuse(500, "etcdserver: request timed out")


async def an_address_that_is_none(request: web.Request) -> web.StreamResponse:
    found = {
        "metadata": {"name": "x", "resourceVersion": "9"},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["metadata.internal"]}],
        "ports": [{"name": "http", "port": 8101}],
    }
    if "watch" not in request.query:
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": [found]})
    response = web.StreamResponse()
    await response.prepare(request)
    await write_event(response, "ADDED", found)
    return response


@pytest.mark.parametrize("verb", ["list", "watch"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (garbage, "is no "),
        (unknown_event, "SURPRISE|is no "),
        (a_long_event, "more than|is no "),
        (broken_off, "127.0.0.1"),
        (internal_error, "etcdserver"),
        (an_address_that_is_none, "metadata.internal"),
    ],
)
def test_faults_keep_the_last_list_and_are_logged_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[web.Request], object],
    said: str,
    verb: str,
) -> None:
    async def main() -> None:
        api = KubernetesApi(tmp_path)
        api.put("a", endpoint("10.0.0.1"))
        async with api.running(), following(api.api) as seen:
            await seen.until(worker("10.0.0.1"))
            await until(lambda: api.num_asked["watch"] == 1)
            api.fault, api.faulty_verb = fault, verb
            assert api.cut_watches() == 1
            api.put("a", endpoint("10.0.0.2"))
            await until(lambda: api.num_faults >= 3)
            if verb == "list":
                assert seen.sets == [{worker("10.0.0.1")}]
            else:  # the lists between the watches are good
                assert {worker("10.0.0.2")} == seen.latest
            api.fault = None
            api.put("a", endpoint("10.0.0.3"))
            await seen.until(worker("10.0.0.3"))

    asyncio.run(main())
    lines = warnings(caplog)
    assert any(
        word in line for word in said.split("|") for line in lines if "listed before stay" in line
    ), lines
    assert len(lines) <= 2, lines  # the cut, and the fault


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_refusal_names_the_role_that_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    answer = f'User "system:serviceaccount:default:baton" cannot {verb} resource "endpointslices"'

    async def forbidden(request: web.Request) -> web.StreamResponse:
        return refuse(403, answer)

    async def main() -> None:
        api = KubernetesApi(tmp_path)
        api.put("a", endpoint("10.0.0.1"))
        api.fault, api.faulty_verb = forbidden, verb
        async with api.running(), following(api.api) as seen:
            await until(lambda: api.num_faults >= 5)
            assert seen.sets == ([] if verb == "list" else [{worker("10.0.0.1")}])
            api.fault = None
            await seen.until(worker("10.0.0.1"))

    asyncio.run(main())
    (line,) = warnings(caplog)
    for part in (f"may not {verb} endpointslices", "get, list and watch", "RoleBinding", answer):
        assert part in line


def test_a_replaced_token_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        api = KubernetesApi(tmp_path)
        api.put("a", endpoint("10.0.0.1"))
        async with api.running(), following(api.api) as seen:
            await seen.until(worker("10.0.0.1"))
            await until(lambda: api.num_asked["watch"] == 1)
            api.set_token("second")
            api.cut_watches()
            await until(lambda: api.num_asked["list"] >= 4)
            api.put("a", endpoint("10.0.0.2"))
            assert seen.latest == {worker("10.0.0.1")}
            api.write_token("second")
            await seen.until(worker("10.0.0.2"))
        assert any("the token in" in line and "refused" in line for line in warnings(caplog))

    asyncio.run(main())


def test_while_the_api_server_is_away_the_list_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)

    async def main() -> None:
        api = KubernetesApi(tmp_path)
        api.put("a", endpoint("10.0.0.1"))
        async with contextlib.AsyncExitStack() as stack:
            async with api.running():
                seen = await stack.enter_async_context(following(api.api))
                await seen.until(worker("10.0.0.1"))
                await until(lambda: api.num_asked["watch"] == 1)
            api.put("a", endpoint("10.0.0.2"))
            await until(lambda: "Connect call failed" in caplog.text)
            await asyncio.sleep(0.3)  # several tries
            assert seen.sets == [{worker("10.0.0.1")}]
            assert len(warnings(caplog)) == 2  # the cut, and that nobody listens
            async with api.running():
                await seen.until(worker("10.0.0.2"))
                api.put("a", endpoint("10.0.0.3"))
                await seen.until(worker("10.0.0.3"))
                await until(lambda: "can be read again" in caplog.text)

    asyncio.run(main())


@pytest.mark.parametrize("authority", ["another", "none"])
def test_a_server_that_cannot_be_trusted_is_shown_no_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, authority: str
) -> None:
    async def main() -> None:
        api = KubernetesApi(tmp_path)
        other = tmp_path / "other"
        other.mkdir()
        content = certificate_files(other, 2)[0].read_bytes() if authority == "another" else b""
        (api.account / "ca.crt").write_bytes(content)
        async with api.running(), following(api.api) as seen:
            await until(lambda: bool(warnings(caplog)))
            assert seen.sets == []
            assert not api.num_asked
        (line,) = warnings(caplog)
        assert ("TLS with" in line) if authority == "another" else ("is empty" in line)

    asyncio.run(main())


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_server_that_does_not_answer_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(connection, "ANSWER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(kubernetes_api, "WATCH_S", (0, 0))
    monkeypatch.setattr(kubernetes_api, "WATCH_GRACE_S", 0.1)

    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    async def main() -> None:
        api = KubernetesApi(tmp_path)
        api.put("a", endpoint("10.0.0.1"))
        api.fault, api.faulty_verb = hang, verb
        async with api.running(), following(api.api) as seen:
            await until(lambda: api.num_faults >= 3)
            api.fault = None
            monkeypatch.undo()
            await seen.until(worker("10.0.0.1"))

    asyncio.run(main())
    (line,) = warnings(caplog)
    assert f"has not answered {verb} endpointslices in time" in line


def test_the_token_follows_no_redirect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        api = KubernetesApi(tmp_path)

        async def elsewhere(request: web.Request) -> web.StreamResponse:
            raise web.HTTPFound(f"https://127.0.0.1:{api.port}{request.path}?limit=100")

        api.fault, api.faulty_verb = elsewhere, "list"
        async with api.running(), following(api.api) as seen:
            await until(lambda: any("302" in line for line in warnings(caplog)))
            assert seen.sets == []
            assert api.num_asked["list"] == api.num_faults

    asyncio.run(main())


def test_a_watch_that_ends_goes_on_where_it_was(tmp_path: Path) -> None:
    async def ended(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        bookmark = {"kind": "EndpointSlice", "metadata": {"resourceVersion": "2"}}
        await write_event(response, "BOOKMARK", bookmark)
        return response

    async def main() -> None:
        api = KubernetesApi(tmp_path)
        api.put("a", endpoint("10.0.0.1"))
        api.fault = ended
        async with api.running(), following(api.api) as seen:
            await seen.until(worker("10.0.0.1"))
            await until(lambda: api.num_faults >= 3)
            api.fault = None
            api.put("a", endpoint("10.0.0.2"))
            await seen.until(worker("10.0.0.2"))
            assert api.num_asked["list"] == 1

    asyncio.run(main())


def test_a_gateway_serves_with_the_pods_of_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = KubernetesApi(tmp_path)
    monkeypatch.setattr(access, "ACCOUNT", api.account)
    workers = [ScriptedWorker(f"pod-{number}", "both", say_abc) for number in range(2)]

    def put(number: int, **conditions: bool) -> None:
        pod = endpoint("127.0.0.1", **conditions)
        api.put(f"slice-{number}", pod, port=workers[number].port, scheme="http")

    async def served_by(running: Cluster) -> set[str]:
        before = [len(worker.visits) for worker in workers]
        for _ in range(4):
            async with running.post(PROMPT) as response:
                assert response.status == 200, await response.text()
        return {
            worker.name
            for worker, num in zip(workers, before, strict=True)
            if len(worker.visits) > num
        }

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(asyncio.timeout(60))
            await stack.enter_async_context(api.running())
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT_HTTPS", str(api.port))
            for worker in workers:
                await stack.enter_async_context(worker.running())
            running = await stack.enter_async_context(
                cluster(
                    prefills=0,
                    decodes=0,
                    members=("kubernetes:both=workers:http",),
                    policy="round_robin",
                    wait=False,
                )
            )

            async def is_served_by(*names: str) -> bool:
                return await served_by(running) == set(names)

            status, answer = await running.get_json("/ready")
            assert status == 503
            assert "kubernetes:both=workers:http" in answer["error"]["message"]
            put(0)
            await until_true(lambda: is_ready(running))
            assert await served_by(running) == {"pod-0"}
            put(1)
            await until_true(lambda: is_served_by("pod-0", "pod-1"))
            put(0, ready=False, serving=True, terminating=True)
            await until_true(lambda: is_served_by("pod-1"))
            api.remove("slice-0")
            put(1)
            assert await served_by(running) == {"pod-1"}

    async def is_ready(running: Cluster) -> bool:
        return (await running.get_json("/ready"))[0] == 200

    asyncio.run(main())
