"""vLLM servers without an engine, for tests of the gateway: vLLM 0.32's HTTP, scripted.

A `ScriptedVllm` is a `ScriptedWorker` whose address speaks vLLM's protocol, and each of whose ranks
has a control server at a port of its own. What it refuses, vLLM refuses too.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

from baton.events.journal import CacheJournal
from baton.events.journal_page import make_page
from baton.protocol.worker_http import KV_EVENTS_PREFIX
from tests.integration.scripted_worker import (
    MODEL,
    Script,
    ScriptedWorker,
    Visit,
    close_at_once,
    read_body,
    serving,
    token,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


def completion(text: str = "a", params: object = None) -> dict[str, Any]:
    """An answer in one piece: vLLM's always has `kv_transfer_params`, null without a connector."""
    return {
        "id": "cmpl-x",
        "object": "text_completion",
        "choices": [{"index": 0, "text": text, "finish_reason": "length"}],
        "kv_transfer_params": params,
        "ec_transfer_params": None,
    }


async def offer(visit: Visit) -> None:
    """The prefill leg, well."""
    await visit.answer(200, completion(params={"baton": {"status": "offered"}}))


def refuse(code: str) -> Script:
    async def refused(visit: Visit) -> None:
        verdict = {"status": "refused", "code": code, "reason": f"scripted {code}"}
        await visit.answer(200, completion(params={"baton": verdict}))

    return refused


async def say_abc_as_vllm(visit: Visit) -> None:
    if visit.body.get("stream"):
        await visit.start_stream()
        for text in "abc":
            await visit.token(text)
        await visit.done()
    else:
        await visit.answer(200, completion("abc", {"baton": {"ticket": "not the client's"}}))


async def fail_as_vllm(visit: Visit, status: int, message: str = "scripted") -> None:
    error = {"message": message, "type": "Error", "param": None, "code": status}
    await visit.answer(status, {"error": error})


async def send_page(journal: CacheJournal, path: str, send: Any) -> None:
    page = await make_page(journal, int(path.removeprefix(KV_EVENTS_PREFIX)))
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body", "body": page})


class ScriptedVllm(ScriptedWorker):
    """One server. `has_connector`, `api_key`, `is_draining` and `adapters` may change any time."""

    def __init__(
        self, name: str, role: str, script: Script, *, num_ranks: int = 1, **info: object
    ) -> None:
        super().__init__(name, role, script, **info)
        self.has_connector, self.is_draining = True, False
        self.api_key: str | None = None
        self.adapters: tuple[str, ...] = ()
        self.num_discoveries = 0
        self.journal = CacheJournal()
        self.relayed: CacheJournal | None = None
        self.controls = [Control(self) for _ in range(num_ranks)]

    def info(self) -> dict[str, Any]:
        ranks = [f"127.0.0.1:{self.port + 1 + i}" for i in range(len(self.controls))]
        return {
            **super().info(),
            "protocol": "vllm",
            "engine": "vllm 0.32.0",
            "handoff_address": ranks[0],
            "rank_addresses": ranks if len(ranks) > 1 else [],
            "control_urls": [control.url for control in self.controls],
            "kv_events": None,
            **self.extra_info,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        visit = Visit(self, path, headers, {}, None, send)
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if self.api_key not in {None, given} and path.startswith("/v1"):
            await visit.answer(401, {"error": "Unauthorized"})
        elif path.startswith(KV_EVENTS_PREFIX) and self.relayed is not None:
            await send_page(self.relayed, path, send)
        elif path == "/health":
            await self._tell_health(visit)
        elif path == "/v1/models":
            models = [{"id": MODEL, "root": "/m", "parent": None}]
            models += [{"id": name, "root": "/a", "parent": MODEL} for name in self.adapters]
            await visit.answer(200, {"object": "list", "data": models})
        elif path in {"/v1/completions", "/v1/chat/completions"}:
            await self._answer(visit, await read_body(receive), receive)
        else:
            await visit.answer(404, {"detail": "Not Found"})

    async def _answer(self, visit: Visit, body: bytes, receive: Any) -> None:
        fields = json.loads(body)
        params = fields.get("kv_transfer_params") or {}
        if params.get("baton_info"):
            assert fields["model"] == MODEL
            assert fields["max_tokens"] == 1
            self.num_discoveries += 1
            told = {"baton_info": self.info()} if self.has_connector else None
            await visit.answer(200, completion(params=told))
        elif problem := problem_of(fields):
            await fail_as_vllm(visit, 400, problem)
        else:
            await self._complete(visit.path, visit.headers, body, receive, visit.send)

    async def _tell_health(self, visit: Visit) -> None:
        if self.is_draining:  # what `engines/vllm/access_middleware.py` answers
            await visit.answer(503, {"status": "draining"})
            return
        await visit.send({"type": "http.response.start", "status": self.health_status})
        await visit.send({"type": "http.response.body", "body": b""})

    def refuses(self, ticket: Any) -> bool:
        """Never: it computes without the ticket's KV."""
        return False

    def begin_another_life(self) -> None:
        """As a restart at the same address does: another epoch, other control ports."""
        self.epoch = "9" * 32
        self.name = f"vllm-{self.epoch[:8]}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[ScriptedVllm]:
        async with contextlib.AsyncExitStack() as stack:
            for control in self.controls:
                await stack.enter_async_context(control.running())
            await stack.enter_async_context(super().running())
            yield self


class Control:
    """One rank's control server."""

    def __init__(self, owner: ScriptedVllm) -> None:
        self.owner = owner
        self.key_is_right = True
        self.num_requests = self.num_info_reads = 0
        self.aborts: list[tuple[str, str]] = []
        self.transfers: bytes | None = None
        self.trace: dict[str, Any] | None = None
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_requests += 1
        body = await read_body(receive)
        path = scope["path"]
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        visit = Visit(self.owner, path, headers, {}, None, send)
        if not self.key_is_right or headers.get("authorization") != "Bearer " + token():
            await visit.fail(401, "unauthorized")
        elif path == "/health" and self.owner.load is not None:
            await visit.answer(200, {"status": "ok", "load": self.owner.load})
        elif path == "/baton/v1/info":
            self.num_info_reads += 1
            await visit.answer(200, self.owner.info())
        elif path.startswith("/baton/v1/traces/") and (trace := self.trace or self.owner.trace):
            await visit.answer(200, trace)
        elif path == "/baton/v1/transfers" and self.transfers is not None:
            await visit.answer(200, json.loads(self.transfers))
        elif path.startswith(KV_EVENTS_PREFIX) and self is self.owner.controls[0]:
            await send_page(self.owner.journal, path, send)
        elif path.endswith("/abort"):
            ticket = path.split("/")[-2]
            self.aborts.append((ticket, json.loads(body)["reason"]))
            self.owner.wake(ticket)
            await visit.answer(204, {})
        else:
            await visit.fail(404, "not_found")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        async with serving(self, self._sock) as self._server:
            yield

    def kill(self) -> None:
        close_at_once(self._server)


def problem_of(fields: dict[str, Any]) -> str | None:
    """Why vLLM 0.32 refuses a body (its protocol.py), as far as the gateway's legs could err."""
    limit = fields.get("max_completion_tokens", fields.get("max_tokens", 16))
    checks = {
        "stream_options without stream": fields.get("stream_options") and not fields.get("stream"),
        "min_tokens above max_tokens": fields.get("min_tokens", 0) > limit,
        "top_logprobs without logprobs": fields.get("top_logprobs") and not fields.get("logprobs"),
        "logprob_token_ids without logprobs": fields.get("logprob_token_ids")
        and not fields.get("logprobs"),
        "stream with prompt_logprobs": fields.get("stream") and fields.get("prompt_logprobs"),
    }
    return next((problem for problem, is_there in checks.items() if is_there), None)
