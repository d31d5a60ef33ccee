"""An engine that says what a test tells it to, and a client that speaks ASGI to a worker.

No thread, no socket: the sink is called from the test's own loop, through the same engine_client.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.engines.first_tokens import FirstTokens
from baton.engines.interface import (
    EngineInfo,
    EngineStats,
    EngineUpdate,
    FinishReason,
    GenerationRequest,
    NewToken,
    RequestFailed,
    UpdateSink,
)
from baton.handoff.interface import HandoffPort, SampledToken
from baton.ids import Epoch, RequestId, TicketId, WorkerId
from baton.kv.layout import KVLayout
from baton.models import DEMO_MODEL_PATH
from baton.net.http_exchange import EXTENSION
from baton.testing.clocks import ManualClock
from baton.tokenizer.tokenizer import load_tokenizer
from baton.worker.options import WorkerOptions
from baton.worker.worker import Worker, build_worker

if TYPE_CHECKING:
    from baton.errors import BatonError

KEY = Credentials.of(ClusterKey(b"k" * 32))
EPOCH = Epoch("e" * 32)
TOKENIZER = load_tokenizer(DEMO_MODEL_PATH)
VOCAB_SIZE = 4096
LAYOUT = KVLayout.gqa(num_layers=2, num_kv_heads=2, head_dim=32, block_size=16, dtype="float32")
Script = Callable[["ScriptedEngine", GenerationRequest], None]


def token_ids(text: str) -> list[int]:
    return [int(token) for token in TOKENIZER.encode(text, add_special_tokens=False)]


def new_tokens(
    request: RequestId, tokens: Sequence[SampledToken], finish: FinishReason | None
) -> list[EngineUpdate]:
    last = len(tokens) - 1
    return [
        NewToken(request, token, 3, finish if index == last else None)
        for index, token in enumerate(tokens)
    ]


def silent(engine: ScriptedEngine, request: GenerationRequest) -> None:
    """The model thinks for ever."""


def saying(text: str, finish: FinishReason = FinishReason.LENGTH) -> Script:
    """Says a text token by token, a step each."""

    def script(engine: ScriptedEngine, request: GenerationRequest) -> None:
        tokens = [SampledToken(token, -0.5) for token in token_ids(text)]
        for update in new_tokens(request.id, tokens, finish):
            engine.sink([update])

    return script


def failing(error: BatonError, after: str = "") -> Script:
    """Says a text, then fails."""

    def script(engine: ScriptedEngine, request: GenerationRequest) -> None:
        tokens = [SampledToken(token) for token in token_ids(after)]
        engine.sink([*new_tokens(request.id, tokens, None), RequestFailed(request.id, error)])

    return script


class ScriptedEngine:
    """Implements `Engine`, and keeps what it was asked."""

    def __init__(self, script: Script, *, max_context_tokens: int = 1024) -> None:
        self.script = script
        self.info = EngineInfo(
            engine="scripted",
            model_path=str(DEMO_MODEL_PATH),
            fingerprint="f" * 64,
            layout=LAYOUT,
            num_blocks=64,
            max_context_tokens=max_context_tokens,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(1,),
        )
        self.first_tokens = FirstTokens()
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[RequestId] = []
        self.on_extend: Callable[[tuple[int, ...], bool], None] = lambda *_: None
        self.extended: list[tuple[RequestId, tuple[int, ...], bool]] = []
        self.refusal: BatonError | None = None
        self.alive = True
        self.num_sending = 0
        self.sink: UpdateSink = lambda updates: None

    @property
    def region(self) -> Any:
        raise NotImplementedError

    def start(self, sink: UpdateSink, handoff: HandoffPort) -> None:
        self.sink = sink

    def wake(self) -> None: ...

    def submit(self, request: GenerationRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.script(self, request)

    def extend(self, request: RequestId, token_ids: Sequence[int], *, generates: bool) -> None:
        self.extended.append((request, tuple(token_ids), generates))
        self.on_extend(tuple(token_ids), generates)

    def cancel(self, request: RequestId) -> None:
        self.cancelled.append(request)

    def commit_first_token(self, ticket: TicketId, token: SampledToken) -> SampledToken:
        return self.first_tokens.commit(ticket, token)

    def stats(self) -> EngineStats:
        return EngineStats(
            1, 2, 3, 64, 40, 10, 5, 9, 1, 50, 30, 20, 50, num_sending=self.num_sending
        )

    def is_alive(self) -> bool:
        return self.alive

    def stop(self, timeout_s: float) -> None: ...


class Client(asyncio.Event):
    """A client's connection, as the server shows it to the worker; it leaves when it is set."""

    on_disconnect: Callable[[], None] | None = None
    is_gateway = False

    @property
    def disconnected(self) -> bool:
        return self.is_set()

    def set(self) -> None:
        super().set()
        callback, self.on_disconnect = self.on_disconnect, None
        if callback is not None:
            callback()


@dataclass
class Reply:
    """What the worker sent. `gone` set: the client closes its connection."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    gone: Client = field(default_factory=Client)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The JSON of each event; `[DONE]` as a string."""
        texts = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]

    @property
    def error(self) -> Any:
        return self.json()["error"]


@asynccontextmanager
async def running(
    script: Script = silent, **options: Any
) -> AsyncGenerator[tuple[Worker, ScriptedEngine, ManualClock]]:
    """A started worker around a scripted engine."""
    engine, clock = ScriptedEngine(script), ManualClock()
    defaults = {
        "worker": WorkerId("w0"),
        "epoch": EPOCH,
        "served_model_name": "demo",
        "credentials": KEY,
        "transports": ("shared", "tcp"),
    }
    worker = build_worker(WorkerOptions(**defaults | options), engine, None, clock)
    await worker.start()
    yield worker, engine, clock
    await worker.stop(1.0)


async def call(
    worker: Worker,
    method: str,
    path: str,
    body: object = b"",
    *,
    headers: dict[str, str] | None = None,
    reply: Reply | None = None,
) -> Reply:
    """One request; `body` may be bytes or anything that JSON can say."""
    reply = reply or Reply()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    unread = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Any:
        if unread:
            return unread.pop()
        await reply.gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            reply.body += message["body"]

    scope = make_scope(method, path, reply.gone)
    scope["headers"] = [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()]
    await worker.app(scope, receive, send)
    return reply


def make_scope(method: str, path: str, client: Client) -> dict[str, Any]:
    """Of one request, as Baton's HTTP server makes it."""
    extensions = {EXTENSION: client}
    return {
        "type": "http", "method": method, "path": path, "headers": [], "extensions": extensions
    }  # fmt: skip


async def complete(worker: Worker, **fields: Any) -> Reply:
    """`POST /v1/completions` with defaults."""
    return await call(worker, "POST", "/v1/completions", {"model": "demo", "prompt": "a"} | fields)


async def chat(worker: Worker, **fields: Any) -> Reply:
    """`POST /v1/chat/completions` with defaults."""
    defaults = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
    return await call(worker, "POST", "/v1/chat/completions", defaults | fields)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until a condition holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)
