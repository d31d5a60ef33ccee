"""A server that speaks OpenAI's API and answers by a script: an ASGI application on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.integration.scripted_worker import close_at_once, read_body, serving

MODEL = "scripted"


@dataclass
class Ask:
    """One completion request, and how to answer it."""

    number: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    send: Callable[[dict[str, Any]], Awaitable[None]]

    @property
    def num_prompt_tokens(self) -> int:
        prompt = self.body.get("prompt")
        if prompt is None:
            prompt = self.body["messages"][0]["content"]
        return len(prompt.split()) if isinstance(prompt, str) else len(prompt)

    async def start(self) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def event(self, body: object) -> None:
        await self.write(b"data: " + json.dumps(body).encode() + b"\n\n")

    async def token(self, finish: str | None = None) -> None:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": "x"}} if "messages" in self.body else {"text": "x"}
        await self.event({"choices": [choice]})

    async def tokens(self, num: int, delay_s: float = 0.0) -> None:
        for _ in range(num):
            await self.token()
            await asyncio.sleep(delay_s)

    async def finish(self, num_tokens: int) -> None:
        usage = {"prompt_tokens": self.num_prompt_tokens, "completion_tokens": num_tokens}
        await self.event({"choices": [], "usage": usage})
        await self.write(b"data: [DONE]\n\n")
        await self.end()

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": b""})

    async def refuse(self, status: int, message: str) -> None:
        await answer_json(self.send, {"error": {"message": message, "code": "x"}}, status)


Script = Callable[[Ask], Awaitable[None]]


def answering(delay_s: float = 0.0, first_s: float = 0.0) -> Script:
    """As many tokens as were asked for, one after the other, the first one after `first_s`."""

    async def script(ask: Ask) -> None:
        num = ask.body.get("max_tokens", 4)
        await ask.start()
        await asyncio.sleep(first_s)
        await ask.tokens(num - 1, delay_s)
        await ask.token("length")
        await ask.finish(num)

    return script


@dataclass
class ScriptedServer:
    """Change `script` at any time; `asks` are the requests so far, the survey's too."""

    script: Script = field(default_factory=answering)
    context: int | None = 4096
    lists_models: bool = True
    asks: list[Ask] = field(default_factory=list)
    now: int = 0
    most_at_once: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, body = scope["path"], await read_body(receive)
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        ask = Ask(len(self.asks), path, headers, json.loads(body or b"{}"), send)
        if path == "/v1/models" and self.lists_models:
            model = {"id": MODEL} | ({"max_model_len": self.context} if self.context else {})
            await answer_json(send, {"data": [model]})
        elif path.startswith("/v1/") and "completions" in path:
            self.asks.append(ask)
            self.now += 1
            self.most_at_once = max(self.most_at_once, self.now)
            try:
                await self.script(ask)
            finally:
                self.now -= 1
        else:
            await ask.refuse(404, "no such path")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[RunningServer]:
        sock = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with serving(self, sock) as server:
            yield RunningServer(url, lambda: close_at_once(server))


@dataclass
class RunningServer:
    """Where it is, and how it dies: every socket is gone at once."""

    url: str
    kill: Callable[[], None]


async def answer_json(send: Any, body: object, status: int = 200) -> None:
    """In two parts, as what is large comes."""
    headers, data = [(b"content-type", b"application/json")], json.dumps(body).encode()
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data[:10], "more_body": True})
    await asyncio.sleep(0.01)
    await send({"type": "http.response.body", "body": data[10:]})


async def main() -> None:
    """A server in a process of its own: prints its address; delays of tokens, and of the first."""
    async with ScriptedServer(answering(*map(float, sys.argv[1:]))).running() as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
