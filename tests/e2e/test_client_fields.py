"""What gateways send workers, sent by clients: workers follow it, gateways do not pass it on."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from baton.auth.credentials import Credentials
from baton.auth.ticket import Ticket, WorkerRef, bind_salt, seal
from baton.gateway.clients import make_key, write_keys
from baton.ids import WorkerId, new_epoch, new_ticket_id
from baton.testing.fleet import Fleet
from tests.e2e.client import KEY, make_prompts, read_trace
from tests.preloaded import start_preloaded
from tests.tickets import issue

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import WorkerCluster

TRANSPORTS = ["shared", "tcp"]


def ask(url: str, prompt: list[int], headers: dict[str, str], **fields: object) -> tuple[int, str]:
    """Status and text of an answer."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0} | fields
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"content-type": "application/json"} | headers,
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def read(url: str, prompt: list[int], headers: dict[str, str], **fields: object) -> dict[str, Any]:
    status, text = ask(url, prompt, headers, **fields)
    assert status == 200, text
    return json.loads(text)


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


@pytest.fixture(scope="module", name="prompt")
def prompt_fixture() -> list[int]:
    return make_prompts(3, seed=70, longest=600)[2]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_headers(cluster: WorkerCluster, prompt: list[int], transport: str) -> None:
    worker, gateway = cluster.colocated.url, cluster.gateway(transport).url

    created = {"x-baton-created": "1"}
    assert read(worker, prompt, created)["created"] == 1
    assert read(gateway, prompt, created)["created"] > 1

    seed: dict[str, Any] = {"headers": {"x-baton-seed": "7"}, "temperature": 1.0, "max_tokens": 16}
    assert len({text_of(read(worker, prompt, **seed)) for _ in range(2)}) == 1
    assert len({text_of(read(gateway, prompt, **seed)) for _ in range(2)}) == 2

    ids: dict[str, Any] = {"headers": {"x-baton-token-ids": "1"}, "stream": True}
    assert "\n:" in ask(worker, prompt, **ids)[1]
    status, events = ask(gateway, prompt, **ids)
    assert status == 200
    assert "\n:" not in events

    timeout = {"x-baton-timeout-s": "0.000001"}
    assert ask(worker, prompt, timeout)[0] == 504
    assert ask(gateway, prompt, timeout)[0] == 200


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_fields(cluster: WorkerCluster, prompt: list[int], transport: str) -> None:
    worker, gateway = cluster.colocated.url, cluster.gateway(transport).url
    right = text_of(read(worker, prompt, {}))

    swapped = {"kv_transfer_params": {"baton_prompt": prompt[:40]}}
    assert read(worker, prompt, {}, **swapped)["usage"]["prompt_tokens"] == 40
    answer = read(gateway, prompt, {}, **swapped)
    assert (answer["usage"]["prompt_tokens"], text_of(answer)) == (len(prompt), right)

    resumed: dict[str, Any] = {
        "kv_transfer_params": {"baton_resume": {"token_ids": [400, 401, 402], "is_complete": True}},
        "stream": True,
    }
    assert ask(worker, prompt, {}, **resumed) == (200, "data: [DONE]\n\n")
    assert ask(gateway, prompt, {}, **resumed)[1].count("data: {") > 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forged_tickets(cluster: WorkerCluster, transport: str) -> None:
    worker, gateway = cluster.colocated.url, cluster.gateway(transport).url
    prompt = make_prompts(3, seed=71, longest=600)[2]
    ref = WorkerRef(WorkerId("prefill"), new_epoch(), "127.0.0.1:9")
    ticket = Ticket(new_ticket_id(), "forged", ref, ref, "push", issue(60), "another tenant's")
    forged = {"kv_transfer_params": {"baton_ticket": seal(ticket, Credentials.generate())}}
    assert ask(worker, prompt, {}, **forged)[0] == 403
    answer = read(gateway, prompt, {"x-request-id": f"forged-{transport}"}, **forged)
    assert text_of(answer) == text_of(read(worker, prompt, {}))
    trace = read_trace(gateway, f"forged-{transport}")
    assert (trace["num_received_tokens"], trace["fallbacks"]) == (len(prompt), [])


def test_salts_of_other_tenants(cluster: WorkerCluster, tmp_path: Path) -> None:
    """Who knows how the gateway binds a tenant's salt, and sends that, has a salt of its own."""
    prompt = make_prompts(3, seed=72, longest=600)[2]
    bound = {"cache_salt": bind_salt("acme", "")}
    keys = {tenant: make_key(tenant) for tenant in ("acme", "other")}
    path = tmp_path / "clients.json"
    write_keys(path, [kept for _, kept in keys.values()])
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY.key.secret.hex())
    with Fleet(tmp_path, environment, start=start_preloaded) as fleet:
        gateway = fleet.start_gateway(
            [], [], both=[cluster.colocated], settings={"gateway.client_keys_file": str(path)}
        ).url

        def count_cached(url: str, tenant: str = "", **fields: object) -> int:
            headers = {"authorization": f"Bearer {keys[tenant][0]}"} if tenant else {}
            answer = read(url, prompt, headers, **fields)
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert count_cached(gateway, "acme") == 0
        assert count_cached(cluster.colocated.url, **bound) > 0
        assert count_cached(gateway, "other", **bound) == 0
        assert count_cached(gateway, "acme") > 0
