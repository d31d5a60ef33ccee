"""A client that costs little: HTTP/1.1 over raw asyncio, each connection asks again once answered.

A request takes 10 to 20 us of this process, so that one core of it and of the upstream keeps a
gateway on the other core busy. Garbage collection is off during a load: its pauses would be
counted as those of the server.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable

PATH = "/v1/completions"
NUM_LAST_IDS = 32
HEAD_BYTES = 600
_ID = re.compile(rb"\r\nx-request-id: ([^\r]+)\r\n", re.IGNORECASE)
_END_OF_CHUNKS = b"0\r\n\r\n"


class LoadError(Exception):
    """A server closed a connection, or answered with another status than 200."""


@dataclass(frozen=True)
class Load:
    """What came of one load. Seconds; `latencies_s` in the order of the answers."""

    wall_s: float
    latencies_s: list[float]
    num_events: int
    """SSE events that arrived; 0 where answers were whole."""
    last_ids: list[str]
    """The server's ids of the last requests; empty where it gives none."""


@dataclass
class _Replies:
    """All that the connections of one load received."""

    latencies_s: list[float] = field(default_factory=list)
    num_events: int = 0
    last_heads: deque[bytes] = field(default_factory=lambda: deque(maxlen=NUM_LAST_IDS))


class _Connection(asyncio.Protocol):
    """Sends what `next_body` gives until it gives None. Then `ended` is done."""

    def __init__(self, host: str, next_body: Callable[[], bytes | None], replies: _Replies) -> None:
        self._head = (
            f"POST {PATH} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            "content-length: "
        ).encode()
        self._next_body, self._replies = next_body, replies
        self._received = bytearray()
        self._sent_s = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Send the first request."""
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        """Collect an answer; send the next request once it is whole."""
        self._received += data
        if not is_whole(self._received):
            return
        answer = self._received
        if not answer.startswith(b"HTTP/1.1 200"):
            self._fail(answer[:600].decode(errors="replace"))
            return
        self._replies.latencies_s.append(time.perf_counter() - self._sent_s)
        self._replies.num_events += answer.count(b"data: {")
        self._replies.last_heads.append(bytes(answer[:HEAD_BYTES]))
        self._received = bytearray()
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server must not close it."""
        self._fail(f"the server closed a connection: {exc}")

    def _ask(self) -> None:
        body = self._next_body()
        if body is None:
            if not self.ended.done():
                self.ended.set_result(None)
            self._transport.close()
            return
        self._sent_s = time.perf_counter()
        self._transport.write(b"%s%d\r\n\r\n%s" % (self._head, len(body), body))

    def _fail(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(LoadError(why))
            self._transport.close()


def is_whole(received: bytearray) -> bool:
    """Whether a head and the whole body that it announces are here."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = bytes(received[:end]).lower()
    at = head.find(b"content-length:")
    if at < 0:
        return received.endswith(_END_OF_CHUNKS)
    length = int(head[at + len(b"content-length:") :].split(b"\r\n", 1)[0])
    return len(received) >= end + 4 + length


def run_load(url: str, bodies: list[bytes], concurrency: int, duration_s: float) -> Load:
    """Closed loop over `concurrency` connections for `duration_s`; bodies repeat if they run out.

    Raises:
        LoadError: an answer was not a 200.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(url, bodies, concurrency, duration_s))


def run_streams(url: str, body: bytes, num_streams: int) -> Load:
    """One request on each of `num_streams` connections, all at once, until all have ended.

    Raises:
        LoadError: an answer was not a 200.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(url, [body], num_streams, 0.0))


async def _run(url: str, bodies: list[bytes], concurrency: int, duration_s: float) -> Load:
    parts = urlsplit(url)
    assert parts.hostname is not None
    replies, num_sent, ends_s = _Replies(), 0, time.perf_counter() + duration_s

    def next_body() -> bytes | None:
        nonlocal num_sent
        # Every connection asks once, however short the load is.
        if num_sent >= concurrency and time.perf_counter() >= ends_s:
            return None
        num_sent += 1
        return bodies[(num_sent - 1) % len(bodies)]

    gc.collect()
    gc.disable()
    began_s = time.perf_counter()
    loop, connections = asyncio.get_running_loop(), []
    try:
        for _ in range(concurrency):
            _, connection = await loop.create_connection(
                lambda: _Connection(parts.netloc, next_body, replies), parts.hostname, parts.port
            )
            connections.append(connection)
        await asyncio.gather(*(connection.ended for connection in connections))
    finally:
        gc.enable()
    wall_s = time.perf_counter() - began_s
    ids = [found[1].decode() for head in replies.last_heads if (found := _ID.search(head))]
    return Load(wall_s, replies.latencies_s, replies.num_events, ids)


def make_bodies(fields: dict[str, object], prompts: list[list[int]]) -> list[bytes]:
    """A request for each prompt."""
    return [json.dumps(fields | {"prompt": prompt}).encode() for prompt in prompts]
