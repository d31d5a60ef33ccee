"""A proxy for vLLM servers with a KV connector: prefill first, then decode.

    client ─► prefill: max_tokens 1, do_remote_decode ─► its kv_transfer_params ─► decode ─► client

As simple as vLLM's own examples: round robin, no queue, no retry. It runs on uvloop and aiohttp, as
Baton's gateway does.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from baton.errors import UNDECODABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OK: Final = 200
BAD_GATEWAY: Final = 502
MAX_BODY_BYTES: Final = 256 << 20
CHUNK_BYTES: Final = 1 << 20
KEEP_IDLE_S: Final = 2.0
"""Shorter than vLLM's own timeout (5 s): it closes no connection that is in use."""
PREFILL_PARAMS: Final[dict[str, object]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_decode: Final = msgspec.json.Decoder(dict[str, object]).decode


class PrefillAnswer(msgspec.Struct, frozen=True):
    """Prefill's answer, for decode."""

    kv_transfer_params: dict[str, object]


def prefill_body(body: dict[str, object]) -> dict[str, object]:
    """The request for prefill: one token, no stream; its KV stays for decode."""
    kept = {name: value for name, value in body.items() if name != "stream_options"}
    lengths: dict[str, object] = {"max_tokens": 1}
    if "max_completion_tokens" in body:
        lengths = {"max_completion_tokens": 1}
    return {**kept, **lengths, "stream": False, "kv_transfer_params": PREFILL_PARAMS}


@dataclass(frozen=True, slots=True)
class Proxy:
    """Servers, round robin. Owned by one event loop."""

    session: aiohttp.ClientSession
    prefills: Iterator[str]
    decodes: Iterator[str]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A completion or a chat."""
        path, headers = request.path, _named(request)
        try:
            body = _decode(await request.read())
        except UNDECODABLE as exc:
            return _refuse(400, str(exc))
        try:
            async with self.session.post(
                next(self.prefills) + path, json=prefill_body(body), headers=headers
            ) as answer:
                raw = await answer.read()
                if answer.status != OK:
                    return web.Response(
                        status=answer.status, body=raw, content_type="application/json"
                    )
            params = msgspec.json.decode(raw, type=PrefillAnswer).kv_transfer_params
        except (aiohttp.ClientError, OSError, *UNDECODABLE) as exc:
            return _refuse(BAD_GATEWAY, f"prefill: {exc}")
        return await self._decode(request, {**body, "kv_transfer_params": params})

    async def _decode(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        try:
            async with self.session.post(
                next(self.decodes) + request.path, json=body, headers=_named(request)
            ) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
        except (aiohttp.ClientError, OSError) as exc:
            if response is None:
                return _refuse(BAD_GATEWAY, f"decode: {exc}")
            raise  # the client receives a cut stream
        return response

    async def pass_on(self, request: web.Request) -> web.Response:
        """Requests that any decode server can answer: models, version, health."""
        try:
            async with self.session.get(next(self.decodes) + request.path) as answer:
                return web.Response(
                    status=answer.status,
                    body=await answer.read(),
                    content_type=answer.content_type,
                )
        except (aiohttp.ClientError, OSError) as exc:
            return _refuse(BAD_GATEWAY, str(exc))


def _named(request: web.Request) -> dict[str, str]:
    name = request.headers.get("X-Request-Id")
    return {} if name is None else {"X-Request-Id": name}


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


async def _serve(port: int, prefills: Sequence[str], decodes: Sequence[str]) -> None:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_IDLE_S)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        read_bufsize=CHUNK_BYTES,
        json_serialize=lambda body: msgspec.json.encode(body).decode(),
    ) as session:
        proxy = Proxy(session, cycle(prefills), cycle(decodes))
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", proxy.generate)
        app.router.add_post("/v1/chat/completions", proxy.generate)
        for path in ("/v1/models", "/version", "/health"):
            app.router.add_get(path, proxy.pass_on)
        # A client that disconnects ends its request on the servers too.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", action="append", required=True)
    parser.add_argument("--decode", action="append", required=True)
    flags = parser.parse_args()
    uvloop.run(_serve(flags.port, flags.prefill, flags.decode))


if __name__ == "__main__":
    main()
