"""Answers of workers, cut into parts anywhere: what is read does not depend on where."""

from __future__ import annotations

import asyncio
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.errors import WorkerLostError
from baton.gateway.http_client import Answer, Connection, TlsConnection

LOOP = asyncio.new_event_loop()
TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
HEADERS = st.dictionaries(
    st.sampled_from([b"Content-Type", b"retry-after", b"X-Other"]),
    st.sampled_from([b"text/event-stream; charset=utf-8", b"7", b"a b"]),
)


class Transport(asyncio.Transport):
    """Of a connection whose other side is the test: it notes what is done to it."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self.is_paused = self.is_aborted = False

    def write(self, data) -> None:
        assert data == REQUEST

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False


class Link:
    """A connection and what became of it. One over TLS gets what was decrypted in a buffer."""

    def __init__(self, *, is_tls: bool = False) -> None:
        self.is_tls = is_tls
        self.idle: list[Connection] = []
        self.connection = LOOP.run_until_complete(self.connect())
        self.transport = Transport(self.connection)
        self.connection.connection_made(self.transport)

    async def connect(self) -> Connection:
        if not self.is_tls:
            return Connection("http://w", None, self.idle.append, lambda _: None)
        buffer = memoryview(bytearray(16))
        return TlsConnection("https://w", TLS, self.idle.append, lambda _: None, buffer=buffer)

    def ask(self) -> Answer:
        return self.connection.send(REQUEST)

    def receive(self, data: bytes) -> None:
        if isinstance(self.connection, TlsConnection):
            while data and not self.transport.is_aborted:
                buffer = self.connection.get_buffer(-1)
                part, data = data[: len(buffer)], data[len(buffer) :]
                buffer[: len(part)] = part
                self.connection.buffer_updated(len(part))
                buffer[:] = bytes(len(buffer))  # another connection's
        elif not self.transport.is_aborted:
            self.connection.data_received(data)


def write_head(status: int, headers: dict[bytes, bytes], *more: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d OK" % status, *(b"%b: %b" % each for each in headers.items()), *more]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def write_chunks(parts: list[bytes]) -> bytes:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part)
    return chunks + b"0\r\n\r\n"


@st.composite
def answers(draw) -> tuple[bytes, int, dict[bytes, bytes], bytes]:
    """The bytes of an answer; its status, headers and body."""
    status, headers = draw(st.sampled_from([200, 404, 503])), draw(HEADERS)
    parts = draw(st.lists(st.binary(max_size=40), max_size=5))
    body = b"".join(parts)
    before = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" if draw(st.booleans()) else b""
    if draw(st.booleans()):
        text = write_head(status, headers, b"transfer-encoding: chunked") + write_chunks(parts)
    else:
        text = write_head(status, headers, b"content-length: %d" % len(body)) + body
    return before + text, status, headers, body


def cut(draw, text: bytes) -> list[bytes]:
    places = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@given(st.data(), st.lists(answers(), min_size=1, max_size=3), st.booleans())
def test_answers_are_read_whole_wherever_they_are_cut(data, several, is_tls):
    """One after the other on one connection."""
    link = Link(is_tls=is_tls)
    for text, status, headers, body in several:
        answer = link.ask()
        for part in cut(data.draw, text):
            assert not link.idle or part == b""
            link.receive(part)
        assert link.idle == [link.connection]
        link.idle.clear()
        assert answer.status == status
        lower = {name.lower(): value for name, value in headers.items()}
        assert lower.items() <= answer.headers.items()
        assert LOOP.run_until_complete(answer.read_whole(1 << 20)) == body


@given(st.data(), answers())
def test_pushed_data_are_the_same_and_in_order(data, made):
    text, _, _, body = made
    pushed: list[bytes] = []

    link = Link()

    async def main() -> None:
        answer = link.ask()

        def sink(part: bytes) -> bool:
            pushed.append(part)
            return data.draw(st.booleans())

        async def push() -> None:
            while await answer.push_to(sink):
                pass

        pushing = LOOP.create_task(push())
        for part in cut(data.draw, text):
            link.receive(part)
            if data.draw(st.booleans()):
                await asyncio.sleep(0)
        await pushing

    LOOP.run_until_complete(main())
    assert b"".join(pushed) == body
    assert all(pushed), "nothing is pushed where nothing arrived"


@given(st.data(), answers())
def test_an_answer_that_is_cut_short_is_lost_after_what_arrived(data, made):
    text, _, _, body = made
    num_bytes = data.draw(st.integers(0, len(text) - 1))
    link = Link()
    answer = link.ask()
    link.receive(text[:num_bytes])
    link.connection.connection_lost(None)

    got: list[bytes] = []

    async def read() -> None:
        while part := await answer.read():
            got.append(part)

    with pytest.raises(WorkerLostError):
        LOOP.run_until_complete(read())
    assert body.startswith(b"".join(got))
    assert not link.idle


@given(st.data(), st.binary(min_size=1, max_size=300))
def test_garbage_never_raises_and_never_counts_as_an_answer(data, garbage):
    link = Link()
    answer = link.ask()
    for part in cut(data.draw, garbage):
        link.receive(part)
    link.connection.connection_lost(None)
    assert not link.idle
    if not garbage.startswith(b"HTTP/"):
        with pytest.raises(WorkerLostError):
            LOOP.run_until_complete(answer.read_whole(1 << 20))


# Empty lines before a head are allowed to be there.
@given(answers(), st.binary(max_size=20).filter(lambda rest: rest.strip(b"\r\n")))
def test_what_follows_an_answer_closes_its_connection(made, rest):
    text, _, _, body = made
    link = Link()
    answer = link.ask()
    link.receive(text + rest)
    assert LOOP.run_until_complete(answer.read_whole(1 << 20)) == body
    assert link.transport.is_aborted
