"""A proxy that copies bytes and nothing else: uvicorn, raw ASGI, aiohttp's client."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import aiohttp
import uvicorn
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection

    from starlette.types import Receive, Scope, Send


class PlainProxy:
    """Posts each request's body to `url`, copies the answer, stops where its client has left."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                read_bufsize=1 << 20,
            )
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {"content-type": "application/json"}
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(_cancel_when_left(receive, task))
        url = self._url + scope["path"]
        try:
            async with self._session.post(url, data=body, headers=headers) as upstream:
                content_type = upstream.headers["content-type"].encode()
                await send({
                    "type": "http.response.start",
                    "status": upstream.status,
                    "headers": [(b"content-type", content_type)],
                })
                async for chunk in upstream.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        finally:
            watcher.cancel()


async def _cancel_when_left(receive: Receive, task: asyncio.Task[object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


def _serve(url: str, port_out: Connection) -> None:
    """Body of the proxy's process."""
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn.Server(
        uvicorn.Config(
            PlainProxy(url), http="httptools", ws="none", lifespan="off", log_config=None,
            access_log=False, server_header=False, timeout_keep_alive=75,
        )
    )  # fmt: skip
    port_out.send(sock.getsockname()[1])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[sock]))


@contextmanager
def serving_process(serve: Callable[..., None], *args: object) -> Iterator[tuple[str, int]]:
    """`serve(*args, port_out)` in a process of its own: its URL and process id."""
    reading, writing = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(*args, writing), daemon=True
    )
    process.start()
    writing.close()  # a process that ends before it is ready is not waited for
    assert process.pid is not None
    try:
        yield f"http://127.0.0.1:{reading.recv()}", process.pid
    finally:
        process.terminate()
        process.join(5)


def plain_proxy(url: str) -> AbstractContextManager[tuple[str, int]]:
    """A proxy before `url`: its own URL and process id."""
    return serving_process(_serve, url)
