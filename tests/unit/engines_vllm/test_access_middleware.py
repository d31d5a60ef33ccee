"""Who may ask a vLLM server, and until when."""

import asyncio
import json

import pytest

from baton.engines.vllm.access_middleware import AccessMiddleware, DrainState
from baton.events.blocks import DEFAULT_MEDIUM, BlockStored
from baton.events.journal import BATON_HASHES, CacheJournal
from baton.events.wire import decode_page


class Server:
    """An ASGI app behind a gate, whose answers wait for `may_answer`."""

    def __init__(self, **drain_state):
        self.drain_state = DrainState(**drain_state)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.middleware = AccessMiddleware(self.answer, self.drain_state)

    async def answer(self, scope, receive, send):
        await self.may_answer.wait()
        if scope["path"] == "/broken":
            raise RuntimeError("broken")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(self, method, path, authorization=None, *more_headers):
        """Status and contents of an answer."""
        status, body = await self.fetch(method, path, authorization, *more_headers)
        return status, json.loads(body)

    async def fetch(self, method, path, authorization=None, *more_headers):
        """Status and body of an answer."""
        sent = []

        async def send(message):
            sent.append(message)

        headers = [] if authorization is None else [(b"authorization", authorization)]
        headers += more_headers
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        await self.middleware(scope, None, send)
        return sent[0]["status"], sent[1]["body"]


def test_an_open_door_lets_everybody_in():
    async def scenario():
        server = Server()
        for method, path in (("POST", "/v1/completions"), ("GET", "/health"), ("GET", "/metrics")):
            assert (await server.ask(method, path))[0] == 200
        assert server.drain_state.num_open == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("authorization", "status"),
    [(None, 401), (b"Bearer no", 401), (b"Bearer yes", 200), (b"yes", 401)],
)
def test_strangers_are_refused_everywhere_but_at_health(authorization, status):
    async def scenario():
        server = Server(bearer=b"yes")
        assert (await server.ask("POST", "/v1/completions", authorization))[0] == status
        assert (await server.ask("GET", "/metrics", authorization))[0] == status
        assert (await server.ask("POST", "/tokenize", authorization))[0] == status
        assert (await server.ask("GET", "/health", authorization))[0] == 200

    asyncio.run(scenario())


def test_gateways_read_kv_events_where_they_are_passed_on():
    event = BlockStored(BATON_HASHES, (7,), None, bytes(8), 2, DEFAULT_MEDIUM, 0)
    path = "/baton/v1/kv_events/0"

    async def scenario():
        assert (await Server().ask("GET", path))[1] == {}, "vLLM's answer"
        journal = CacheJournal()
        journal.add_reported(event, 1)
        server = Server(bearer=b"yes", journal=journal)
        assert (await server.ask("GET", path))[0] == 401
        status, body = await server.fetch("GET", path, b"Bearer yes")
        assert (status, decode_page(body, BATON_HASHES).events) == (200, (event,))
        for other in ("/baton/v1/kv_events/x", "/metrics", "/7"):
            assert (await server.ask("GET", other, b"Bearer yes"))[1] == {}
        server.drain_state.start_drain()
        async with asyncio.timeout(0.5):  # an answer that waits for events ends at once
            _, body = await server.fetch("GET", "/baton/v1/kv_events/1", b"Bearer yes")
        assert decode_page(body, BATON_HASHES).events == ()

    asyncio.run(scenario())


def test_draining_refuses_what_is_new_and_ends_with_what_is_old():
    async def scenario():
        server = Server()
        server.may_answer.clear()
        old = asyncio.create_task(server.ask("POST", "/v1/completions"))
        await asyncio.sleep(0)
        server.drain_state.start_drain()
        empty = asyncio.create_task(server.drain_state.wait_drained())
        status, body = await server.ask("POST", "/v1/completions")
        assert (status, body["error"]["code"]) == (503, "draining")
        status, body = await server.ask("GET", "/health")
        assert (status, body["status"], body["reason"]) == (503, "draining", None)
        assert not empty.done()
        server.may_answer.set()
        assert (await server.ask("GET", "/metrics"))[0] == 200
        assert (await old)[0] == 200
        await empty

    asyncio.run(scenario())


def test_while_draining_streams_move_away_until_none_is_left():
    moves = (b"x-baton-moves-stream", b"1")

    async def scenario():
        server = Server(bearer=b"yes")
        server.may_answer.clear()
        old = asyncio.create_task(server.ask("POST", "/v1/completions", b"Bearer yes"))
        await asyncio.sleep(0)
        server.drain_state.start_drain()
        assert (await server.ask("POST", "/v1/completions", None, moves))[0] == 401
        moving = asyncio.create_task(server.ask("POST", "/v1/completions", b"Bearer yes", moves))
        await asyncio.sleep(0)
        assert server.drain_state.num_open == 2
        server.may_answer.set()
        assert (await moving)[0] == (await old)[0] == 200
        await server.drain_state.wait_drained()
        assert (await server.ask("POST", "/v1/completions", b"Bearer yes", moves))[0] == 503

    asyncio.run(scenario())


def test_a_door_that_nobody_is_behind_is_empty_when_it_closes():
    async def scenario():
        server = Server()
        with pytest.raises(RuntimeError):
            await server.ask("POST", "/broken")
        server.drain_state.start_drain()
        await server.drain_state.wait_drained()

    asyncio.run(scenario())


def test_a_websocket_is_refused_bearer_or_not():
    """vLLM serves `/v1/realtime` to websockets, which its HTTP gate does not see."""

    async def scenario():
        sent = []

        async def app(scope, receive, send):
            raise AssertionError("it got in")

        async def send(message):
            sent.append(message)

        for bearer in (None, b"yes"):
            middleware = AccessMiddleware(app, DrainState(bearer=bearer))
            scope = {"type": "websocket", "path": "/v1/realtime"}
            await middleware(scope | {"headers": [(b"authorization", b"Bearer yes")]}, None, send)
        assert sent == [{"type": "websocket.close", "code": 1008}] * 2

    asyncio.run(scenario())


def test_the_lifespan_passes():
    async def scenario():
        seen = []

        async def app(scope, receive, send):
            seen.append(scope["type"])

        drain_state = DrainState(bearer=b"yes")
        drain_state.start_drain()
        await AccessMiddleware(app, drain_state)({"type": "lifespan"}, None, None)
        assert seen == ["lifespan"]

    asyncio.run(scenario())


@pytest.mark.parametrize("has_started", [True, False])
def test_a_fenced_worker_serves_nothing_and_ends_what_it_serves(has_started):
    async def scenario():
        reasons = [None]
        drain_state = DrainState(why_fenced=lambda: reasons[0])
        sent, was_cancelled = [], []

        async def stream(scope, receive, send):
            try:
                if has_started:
                    await send({"type": "http.response.start", "status": 200, "headers": []})
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                was_cancelled.append(True)
                raise

        async def send(message):
            sent.append(message)

        middleware = AccessMiddleware(stream, drain_state)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        serving = asyncio.create_task(middleware(scope, None, send))
        await asyncio.sleep(0)
        reasons[0] = "no gateway"
        drain_state.end_requests()
        drain_state.end_requests()
        await serving
        assert was_cancelled == [True]
        assert drain_state.num_open == 0
        assert sent[0]["status"] == (200 if has_started else 503)
        assert b'"code":"fenced"' in sent[1]["body"]
        assert not sent[-1].get("more_body", False)
        server = Server(why_fenced=lambda: reasons[0])
        assert (await server.ask("POST", "/v1/completions"))[1]["error"]["code"] == "fenced"
        assert (await server.ask("GET", "/health"))[1] == {
            "status": "fenced",
            "reason": "no gateway",
        }
        reasons[0] = None
        assert (await server.ask("POST", "/v1/completions"))[0] == 200

    asyncio.run(scenario())


def test_a_request_that_its_client_has_cancelled_is_not_one_that_the_fence_has_ended():
    async def scenario():
        server = Server(why_fenced=lambda: None)
        server.may_answer.clear()
        asking = asyncio.create_task(server.ask("POST", "/v1/completions"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert server.drain_state.num_open == 0

    asyncio.run(scenario())
