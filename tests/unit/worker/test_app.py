"""Routing, the bearer rule, errors and status pages, through the whole ASGI application."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import baton
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from tests.unit.worker.scripted_engine import (
    EPOCH,
    KEY,
    Client,
    Reply,
    call,
    complete,
    make_scope,
    running,
    saying,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine


def ask(method: str, path: str, body: object = b"", **options: Any) -> Reply:
    async def scenario() -> Reply:
        headers = options.pop("headers", None)
        async with running(saying("hello"), **options) as (worker, _, _):
            return await call(worker, method, path, body, headers=headers)

    return asyncio.run(scenario())


def bearer(key: Credentials) -> dict[str, str]:
    return {"Authorization": "Bearer " + key.key.sign("http", b"worker").hex()}


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/baton/v1/traces/", "/metrics/"])
def test_an_unknown_path_is_404_and_lists_what_there_is(path: str) -> None:
    reply = ask("GET", path)
    assert reply.status == 404
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.error["code"] == "unknown_path"
    assert "/v1/chat/completions" in reply.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("POST", "/metrics", "GET"),
        ("GET", f"/baton/v1/handoffs/{'0' * 32}/abort", "POST"),
    ],
)
def test_a_wrong_method_is_405(method: str, path: str, allowed: str) -> None:
    reply = ask(method, path)
    assert reply.status == 405
    assert reply.headers["allow"] == allowed
    assert reply.error["code"] == "method_not_allowed"


def test_a_body_over_the_limit_is_413() -> None:
    small = {"max_body_bytes": 100}
    announced = ask("POST", "/v1/completions", b"", headers={"content-length": "101"}, **small)
    sent = ask("POST", "/v1/completions", b"x" * 101, **small)
    for reply in (announced, sent):
        assert reply.status == 413
        assert reply.error["code"] == "body_too_large"
        assert "at most 100" in reply.error["message"]


def test_another_model_is_404() -> None:
    reply = ask("POST", "/v1/completions", {"model": "other", "prompt": "a"})
    assert reply.status == 404
    assert reply.error["code"] == "model_not_found"
    assert reply.error["param"] == "model"


def test_a_ticket_where_nothing_is_handed_over_is_403() -> None:
    params = {"kv_transfer_params": {"baton_ticket": "abc"}}
    reply = ask("POST", "/v1/completions", {"model": "demo", "prompt": "a"} | params)
    assert reply.status == 403
    assert reply.error["code"] == "invalid_ticket"


def test_beyond_loopback_only_health_needs_no_bearer() -> None:
    assert ask("GET", "/health", require_bearer=True).status == 200
    for path in ("/v1/models", "/metrics", "/nothing", "/baton/v1/info"):
        reply = ask("GET", path, require_bearer=True)
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == "Bearer"
    good, forged = bearer(KEY), bearer(Credentials.of(ClusterKey(b"x" * 32)))
    assert ask("GET", "/v1/models", require_bearer=True, headers=good).status == 200
    assert ask("GET", "/v1/models", require_bearer=True, headers=forged).status == 401


def test_a_request_id_is_kept_if_it_is_printable() -> None:
    assert ask("GET", "/health", headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"
    for strange in ("", "a b", "\x00", "é", "x" * 129):
        made = ask("GET", "/health", headers={"x-request-id": strange}).headers["x-request-id"]
        assert made.startswith("req-")


def test_an_unexpected_error_is_500_without_its_details(caplog: Any) -> None:
    async def scenario() -> Reply:
        async with running() as (worker, engine, _):
            engine.refusal = ZeroDivisionError("secret")  # type: ignore[assignment]
            return await complete(worker)

    reply = asyncio.run(scenario())
    assert reply.status == 500
    assert reply.error["code"] == "internal_error"
    assert b"secret" not in reply.body
    assert "secret" in caplog.text


def test_health_follows_the_engine() -> None:
    async def scenario() -> None:
        async with running() as (worker, engine, _):
            assert (await call(worker, "GET", "/health")).json()["status"] == "ok"
            engine.alive = False
            reply = await call(worker, "GET", "/health")
            assert (reply.status, reply.json()["status"]) == (503, "failed")
            assert "engine" in reply.json()["reason"]

    asyncio.run(scenario())


def test_models_version_and_info() -> None:
    (model,) = ask("GET", "/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("demo", "model", 1024)
    assert ask("GET", "/version").json() == {"version": baton.__version__}
    info = ask("GET", "/baton/v1/info", role="prefill").json()
    assert (info["worker"], info["epoch"], info["role"]) == ("w0", EPOCH, "prefill")
    assert info["transports"] == ["shared", "tcp"]
    assert info["layout"]["block_size"] == 16
    assert info["fingerprint"] == "f" * 64


def test_a_trace_is_found_until_the_ring_forgets_it() -> None:
    async def scenario() -> None:
        async with running(saying("hello"), num_traces=1) as (worker, _, _):
            first = (await complete(worker)).headers["x-request-id"]
            trace = (await call(worker, "GET", f"/baton/v1/traces/{first}")).json()
            assert (trace["request_id"], trace["outcome"]) == (first, "length")
            assert {"received", "first_token", "finished"} <= set(trace["stamps"])
            await complete(worker)
            assert (await call(worker, "GET", f"/baton/v1/traces/{first}")).status == 404

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (f"/baton/v1/handoffs/{'ab' * 16}/abort", {"reason": "gone"}, 204),
        (f"/baton/v1/handoffs/{'ab' * 15}/abort", {"reason": "gone"}, 404),
        ("/baton/v1/handoffs/xyz/abort", {"reason": "gone"}, 404),
        (f"/baton/v1/handoffs/{'ab' * 16}/abort", {}, 400),
        (f"/baton/v1/handoffs/{'ab' * 16}/abort", b"{", 400),
        (f"/baton/v1/handoffs/{'ab' * 16}/abort", b"x" * 5000, 413),
    ],
)
def test_aborts_are_checked(path: str, body: object, status: int) -> None:
    assert ask("POST", path, body).status == status


def samples(reply: Reply) -> dict[str, float]:
    lines = [line for line in reply.body.decode().splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_metrics_start_at_zero_and_count() -> None:
    async def scenario() -> tuple[dict[str, float], dict[str, float]]:
        async with running(saying("She smiled.")) as (worker, _engine, _):
            before = samples(await call(worker, "GET", "/metrics"))
            await complete(worker)
            await complete(worker, model="other")
            return before, samples(await call(worker, "GET", "/metrics"))

    before, after = asyncio.run(scenario())
    done = 'baton_worker_requests_total{outcome="length",role="colocated"}'
    refused = 'baton_worker_error_responses_total{status="404"}'
    first_token = 'baton_worker_time_to_first_token_seconds_count{role="colocated"}'
    for name in (done, refused, first_token):
        assert (before[name], after[name]) == (0, 1)
    assert after['baton_worker_inflight_requests{state="awaiting_kv"}'] == 3
    assert after['baton_worker_blocks{state="quarantined"}'] == 5
    assert after['baton_worker_prompt_tokens_total{source="computed"}'] == 50
    assert after['baton_worker_prompt_tokens_total{source="received"}'] == 20
    assert set(before) == set(after)
    assert len(after) < 2000


def test_a_stalled_reader_holds_its_request_only() -> None:
    async def scenario() -> None:
        async with running(saying("hello")) as (worker, _engine, _):
            stalled = asyncio.Event()
            gone = Client()
            body = b'{"model":"demo","prompt":"a","stream":true}'
            unread = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> Any:
                if unread:
                    return unread.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                stalled.set()
                await asyncio.Event().wait()

            scope = make_scope("POST", "/v1/completions", gone)
            task: asyncio.Task[None] = asyncio.create_task(_run(worker.app(scope, receive, send)))
            await until(stalled.is_set)
            assert (await complete(worker)).status == 200
            gone.set()
            await task
            assert worker.engine_client.num_open == 0

    asyncio.run(scenario())


async def _run(serving: Coroutine[Any, Any, None]) -> None:
    await serving
