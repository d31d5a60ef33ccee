"""The least that an SSE event costs who sends it: a `send` for each stream, and no Python besides.

A process that answers each request with the same event in each of its steps. No upstream, no event
loop: what an event takes here is the kernel's part of it, the wake-up of its client included.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from typing import TYPE_CHECKING

from plain_proxy import serving_process

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _serve(event: bytes, rate_hz: float, port_out: Connection) -> None:
    """Body of the process."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port_out.send(listener.getsockname()[1])
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    part = b"%x\r\n%b\r\n" % (len(event), event)
    streams: dict[socket.socket, int] = {}  # how many events each has still to get
    next_step_s = time.monotonic()
    while True:
        for key, _ in selector.select(max(0.0, next_step_s - time.monotonic())):
            _read(key, listener, selector, streams)
        if time.monotonic() < next_step_s:
            continue
        next_step_s += 1 / rate_hz
        for client in list(streams):
            client.send(part)
            streams[client] -= 1
            if not streams[client]:
                del streams[client]
                client.send(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _read(
    key: selectors.SelectorKey,
    listener: socket.socket,
    selector: selectors.BaseSelector,
    streams: dict[socket.socket, int],
) -> None:
    """Take a connection, or a request: its head and its body arrive together."""
    client = key.fileobj
    assert isinstance(client, socket.socket)
    if client is listener:
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(accepted, selectors.EVENT_READ)
        return
    request = client.recv(1 << 16)
    if not request:
        selector.unregister(client)
        client.close()
        return
    client.send(HEAD)
    streams[client] = int(json.loads(request.partition(b"\r\n\r\n")[2])["max_tokens"])


def plain_sender(event: bytes, rate_hz: float) -> AbstractContextManager[tuple[str, int]]:
    """Such a process: its URL and process id."""
    return serving_process(_serve, event, rate_hz)
