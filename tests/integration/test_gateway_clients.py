"""API keys, tenants, quotas, the audit log, and who may ask for what."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from baton.clock import MachineClock
from baton.errors import ConfigError
from baton.gateway.app import ManagementApp
from baton.gateway.clients import RELOAD_INTERVAL_S, make_key, read_keys, write_keys
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.process import open_gateway
from baton.protocol.worker_http import Role
from tests.integration.gateway_cluster import PROMPT, STREAM, Cluster, run, until_true
from tests.integration.scripted_worker import KEY, one_token_and_wait

if TYPE_CHECKING:
    from pathlib import Path

    from baton.gateway.clients import ClientKey


@pytest.fixture(name="path")
def path_fixture(tmp_path: Path) -> Path:
    return tmp_path / "clients.json"


def add(path: Path, tenant: str = "acme", **limits: Any) -> tuple[str, ClientKey]:
    text, kept = make_key(tenant, **limits)
    write_keys(path, (*(read_keys(path) if path.exists() else ()), kept))
    return text, kept


async def ask(cluster: Cluster, key: str | None, body: object = PROMPT) -> tuple[int, Any]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with cluster.post(body, **headers) as response:
        return response.status, await response.json()


def test_only_who_has_a_key_is_served(path: Path) -> None:
    good, kept = add(path)
    expired, _ = add(path, expires_at=int(time.time()) - 1)
    key_id = kept.id

    async def scenario(cluster: Cluster) -> None:
        assert (await ask(cluster, good))[0] == 200
        for shown, code in (
            (None, "missing_api_key"),
            ("", "invalid_api_key"),
            ("sk-other", "invalid_api_key"),
            (good[:-1] + ("A" if good[-1] != "A" else "B"), "invalid_api_key"),
            (f"bk-{'0' * 12}-{good.rpartition('-')[2]:A>43}"[:60], "invalid_api_key"),
            (expired, "expired_api_key"),
        ):
            status, answer = await ask(cluster, shown)
            assert (status, answer["error"]["code"]) == (401, code), shown
            assert good not in str(answer)
        assert len(cluster.decodes[0].visits) == 1
        status, _ = await cluster.get_json("/v1/models")
        assert status == 401
        assert (await cluster.get_json("/health"))[0] == 200

    run(scenario, client_keys_file=path)
    assert key_id in path.read_text()
    assert good.split("-", 2)[2] not in path.read_text(), "secrets are not kept"
    assert path.stat().st_mode & 0o777 == 0o600


def test_keys_are_added_and_removed_while_it_serves(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = add(path)

    async def scenario(cluster: Cluster) -> None:
        assert (await ask(cluster, first))[0] == 200
        second, kept = add(path, "other")

        async def is_known(key: str) -> bool:
            return (await ask(cluster, key))[0] == 200

        await until_true(lambda: is_known(second), RELOAD_INTERVAL_S + 2)
        write_keys(path, (kept,))

        async def is_gone() -> bool:
            return not await is_known(first)

        await until_true(is_gone, RELOAD_INTERVAL_S + 2)
        path.write_text("{broken")

        async def is_said() -> bool:
            return await is_known(second) and "stay valid" in caplog.text

        await until_true(is_said, RELOAD_INTERVAL_S + 2)
        assert await is_known(second)

    run(scenario, client_keys_file=path)


def test_tenants_share_no_kv_whatever_salt_they_send(path: Path) -> None:
    keys = [add(path, "acme")[0], add(path, "acme")[0], add(path, "other")[0]]

    async def scenario(cluster: Cluster) -> None:
        for key in keys:
            for salt in (None, "mine"):
                body = PROMPT if salt is None else {**PROMPT, "cache_salt": salt}
                assert (await ask(cluster, key, body))[0] == 200
        visits = cluster.decodes[0].visits
        salts = [visit.body["cache_salt"] for visit in visits]
        assert salts[0:2] == salts[2:4], "one tenant, two keys"
        assert len(set(salts)) == 4
        assert all(visit.ticket is not None and visit.ticket.tenant_salt for visit in visits)
        status, answer = await ask(cluster, keys[0], {**PROMPT, "cache_salt": 3})
        assert (status, answer["error"]["param"]) == (400, "cache_salt")

    run(scenario, client_keys_file=path)


def test_quotas(path: Path) -> None:
    busy, _ = add(path, max_inflight=1)
    eager, _ = add(path, requests_per_minute=2)

    async def scenario(cluster: Cluster) -> None:
        assert [(await ask(cluster, eager))[0] for _ in range(3)] == [200, 200, 429]
        cluster.decodes[0].script = one_token_and_wait
        headers = {"authorization": f"Bearer {busy}"}
        async with cluster.post(STREAM, **headers) as first:
            assert first.status == 200
            async with cluster.post(STREAM, **headers) as second:
                assert second.status == 429
                assert int(second.headers["retry-after"]) >= 1
                assert (await second.json())["error"]["code"] == "rate_limit_exceeded"

    run(scenario, client_keys_file=path)


def test_low_priority_leaves_places_to_others(path: Path) -> None:
    low, _ = add(path, priority="low")
    high, _ = add(path, priority="high")

    async def scenario(cluster: Cluster) -> None:
        cluster.decodes[0].script = one_token_and_wait
        headers = {"authorization": f"Bearer {low}"}
        async with cluster.post(STREAM, **headers) as first:
            assert first.status == 200
            async with cluster.post(STREAM, **headers) as second:
                assert second.status == 503  # half of two places
            async with cluster.post(STREAM, authorization=f"Bearer {high}") as third:
                assert third.status == 200

    run(scenario, client_keys_file=path, max_inflight_requests=2)


def test_the_audit_log_has_who_asked_and_no_prompts(path: Path, tmp_path: Path) -> None:
    key, kept = add(path)
    log = tmp_path / "audit.jsonl"

    async def scenario(cluster: Cluster) -> None:
        await ask(cluster, key, {**PROMPT, "prompt": "a secret"})
        await ask(cluster, "wrong")

    run(scenario, client_keys_file=path, audit_log=log)
    served, refused = (json.loads(line) for line in log.read_text().splitlines())
    assert (served["client"], served["tenant"], served["status"]) == (kept.id, "acme", 200)
    assert (served["model"], served["address"]) == (PROMPT["model"], "127.0.0.1")
    assert (refused["client"], refused["status"]) == ("", 401)
    assert "secret" not in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "attacker.example"}, 403),
        ({"host": "attacker.example:8000"}, 403),
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "api.example"}, 200),
        ({"origin": "https://attacker.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://chat.example"}, 200),
    ],
)
def test_pages_of_other_sites_are_refused(headers: dict[str, str], status: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        for path in ("/v1/models", "/health", "/debug/requests"):
            async with cluster.client.get(cluster.url + path, headers=headers) as response:
                assert response.status == status
        async with cluster.post(PROMPT, **headers) as response:
            assert response.status == status
        assert len(cluster.decodes[0].visits) == (status == 200)

    run(scenario, allowed_hosts=("api.example",), allowed_origins=("https://chat.example",))


def test_pages_of_listed_origins_may_read_answers(path: Path) -> None:
    good, _ = add(path)
    page = {"origin": "https://chat.example"}
    key = {"authorization": f"Bearer {good}"}
    asks = {"access-control-request-headers": "authorization,content-type,x-stainless-os"}

    async def scenario(cluster: Cluster) -> None:
        async def shown(method: str, path: str, body: object, **headers: str) -> tuple[int, Any]:
            url = cluster.url + path
            async with cluster.client.request(method, url, json=body, headers=headers) as response:
                await response.read()
                return response.status, response.headers

        where = "/v1/completions"
        status, headers = await shown("OPTIONS", where, None, **page, **asks)
        assert status == 204
        assert headers["access-control-allow-methods"] == "GET, POST"
        assert headers["access-control-allow-headers"] == asks["access-control-request-headers"]
        for method, at, body, also, expected in (
            ("OPTIONS", where, None, {}, 204),
            ("GET", "/v1/models", None, key, 200),
            ("GET", "/v1/models", None, {}, 401),
            ("POST", where, PROMPT, key, 200),
            ("POST", where, STREAM, key, 200),
            ("POST", where, PROMPT, {}, 401),
            ("POST", where, {"model": 3}, key, 400),
        ):
            status, headers = await shown(method, at, body, **page, **also)
            assert (status, headers["access-control-allow-origin"]) == (expected, page["origin"])
            assert headers["access-control-expose-headers"] == "x-request-id, retry-after"
            assert headers["vary"] == "origin"
        for at, also, expected in (
            ("/v1/models", key, 200),
            ("/health", page, 200),  # what operators look at, and all else, is not for pages
            ("/v1/models", {"origin": "https://attacker.example", **key}, 403),
        ):
            status, headers = await shown("GET", at, None, **also)
            assert (status, headers.get("access-control-allow-origin")) == (expected, None)
        assert (await shown("OPTIONS", where, None, **key))[0] == 405

    run(scenario, client_keys_file=path, allowed_origins=(page["origin"],))


def test_a_gateway_that_is_managed_elsewhere_shows_nothing_to_clients() -> None:
    async def scenario(cluster: Cluster) -> None:
        for path in ("/metrics", "/debug/requests", "/debug/workers"):
            assert (await cluster.get_json(path))[0] == 404

    run(scenario, management_port=0, wait=False)


@pytest.mark.parametrize(
    ("address", "host", "status"),
    [
        ("127.0.0.1", b"attacker.example:9000", 403),
        ("127.0.0.1", b"localhost:9000", 200),
        ("0.0.0.0", b"gateway.example:9000", 200),
    ],
)
def test_the_management_listener_takes_the_hosts_of_its_own_address(
    address: str, host: bytes, status: int
) -> None:
    options = GatewayOptions(
        addresses=(WorkerAddress("https://127.0.0.1:1", Role.BOTH),),
        credentials=KEY,
        key_origin="configured",
        host="127.0.0.1" if address == "0.0.0.0" else "0.0.0.0",
        insecure=True,
        management_host=address,
        management_port=0,
    )
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        scope = {"type": "http", "method": "GET", "headers": [(b"host", host)]}
        async with open_gateway(options, MachineClock()) as app:
            await ManagementApp(app)({**scope, "path": "/debug/workers"}, None, send)

    asyncio.run(main())
    assert sent[0]["status"] == status


def test_beyond_loopback_keys_are_needed(path: Path) -> None:
    workers = (WorkerAddress("https://127.0.0.1:1", Role.BOTH),)
    settings = {"addresses": workers, "credentials": KEY, "key_origin": "configured"}
    with pytest.raises(ConfigError, match="--insecure"):
        GatewayOptions(**settings, host="0.0.0.0")
    GatewayOptions(**settings, host="0.0.0.0", insecure=True)
    GatewayOptions(**settings, host="0.0.0.0", client_keys_file=path)


@pytest.mark.parametrize("text", ["", "[]", '{"keys":[{"id":"x"}]}', '{"keys":[],"more":1}'])
def test_a_file_that_is_none_is_named(text: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        read_keys(path)
    _, kept = make_key("t")
    path.write_bytes(msgspec.json.encode({"keys": [kept, kept]}))
    with pytest.raises(ConfigError, match="same id"):
        read_keys(path)
