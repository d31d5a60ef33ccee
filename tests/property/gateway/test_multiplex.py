"""Streams by a multiplex: each arrives whole and in order, however its two ways are cut and mixed.

Worker's exchange and multiplex, gateway's connection, answer and multiplex are the real ones; what
lies between them are bytes, which a schedule delivers.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl

from baton.gateway.errors import WorkerLostError
from baton.gateway.http_client import MOST_LATE_BYTES, Answer, Connection
from baton.gateway.multiplexed_streams import MultiplexReader
from baton.net.http_exchange import HttpExchange, ResponsePath
from baton.net.multiplex import FRAME, MAX_FRAME_BYTES, Multiplex, Multiplexes
from baton.net.turn_writes import TurnWrites

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from starlette.types import Message

NUM_STREAMS = 3
SIZES = st.sampled_from((1, 7, 200, MAX_FRAME_BYTES + 1))
STREAM = st.integers(0, NUM_STREAMS - 1)
STEP = st.one_of(
    st.tuples(st.just("send"), STREAM, SIZES),
    st.tuples(st.just("end"), STREAM, st.just(0)),
    st.tuples(st.just("leave"), STREAM, st.just(0)),
    st.tuples(st.just("turn"), STREAM, st.just(0)),
    st.tuples(st.just("own"), STREAM, st.integers(1, 90)),
    st.tuples(st.just("shared"), STREAM, st.integers(1, 300)),
)


class Pipe:
    """A transport of one side, and what it has sent."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def take(self, num_bytes: int) -> bytes:
        taken = bytes(self.sent[:num_bytes])
        del self.sent[:num_bytes]
        return taken

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_closed = True

    close = abort

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Turns:
    """A loop's `call_soon`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        self.calls.append((call, args))

    def run(self) -> None:
        calls, self.calls = self.calls, []
        for call, args in calls:
            call(*args)


class Stream:
    """One stream, from the worker's exchange to what the gateway passes on."""

    def __init__(self, number: int, turns: Turns, *, asks: bool) -> None:
        self.number, self._asks = number, asks
        self.turns = turns
        self.way, self.idle = Pipe(), list[Connection]()
        flow = FlowControl(self.way)  # type: ignore[arg-type]
        path = ResponsePath(
            turns, self.way, flow, [], lambda: None, 1, 1.0, Multiplexes(), TurnWrites()
        )  # type: ignore[arg-type]
        self.exchange = HttpExchange(path, is_head=False, keep_alive=True, expects_continue=False)
        self.sent, self.got = bytearray(), bytearray()
        self.has_begun = self.has_ended = self.is_over = False
        self.connection = Connection("worker", None, self.idle.append, lambda _: None)
        self.request_way = Pipe()
        self.connection.connection_made(self.request_way)  # type: ignore[arg-type]

    def ask(self, worker: Multiplex, gateway: MultiplexReader) -> Answer:
        self.answer = self.connection.send(b"POST / HTTP/1.1\r\n\r\n")
        place = gateway.new_stream()
        if self._asks:
            self.answer.expect_multiplexed(place)
            self.exchange.wanted_multiplex = (worker, place.number)
        self.place = place.number
        return self.answer

    async def read(self, *, pushes: bool) -> None:
        await self.answer.wait_for_head()
        if pushes:
            while await self.answer.push_to(self._take):
                await asyncio.sleep(0)
        else:
            while data := await self.answer.read():
                self.got += data
        self.is_over = True
        self.answer.release()

    def _take(self, data: bytes) -> bool:
        self.got += data
        return len(self.got) % 3 != 0  # now and then it has no room

    def send(self, num_bytes: int) -> None:
        if self.has_ended:
            return
        if not self.has_begun:
            self.has_begun = True
            kind = [(b"content-type", b"text/event-stream")]
            now(self.exchange.send({"type": "http.response.start", "status": 200, "headers": kind}))
        part = bytes((self.number * 80 + len(self.sent) + i) % 251 for i in range(num_bytes))
        self.sent += part
        now(self.exchange.send(body(part, is_part=True)))

    def end(self) -> None:
        if self.has_begun and not self.has_ended:
            self.has_ended = True
            self.sent += b"."
            now(self.exchange.send(body(b".", is_part=False)))

    def deliver(self, num_bytes: int) -> None:
        if data := self.way.take(num_bytes):
            self.connection.data_received(data)


def body(data: bytes, *, is_part: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": is_part}


def now(coroutine: Coroutine[object, object, object]) -> None:
    """Run what does not wait."""
    with suppress(StopIteration):
        coroutine.send(None)
        raise AssertionError("it waits")


class World:
    def __init__(self, asks: tuple[bool, ...]) -> None:
        self.turns, self.shared = Turns(), Pipe()
        self.worker = Multiplex(self.turns, self.write, self.drain, self.shared.close)  # type: ignore[arg-type]
        self.gateway = MultiplexReader(self.worker.id, None, lambda _: None, lambda _: None)  # type: ignore[arg-type]
        self.streams = [Stream(n, self.turns, asks=asks[n]) for n in range(NUM_STREAMS)]
        for stream in self.streams:
            stream.ask(self.worker, self.gateway)

    def write(self, data: bytes) -> bool:
        self.shared.write(data)
        return True

    async def drain(self) -> None: ...

    async def run(self, steps: list[tuple[str, int, int]]) -> None:
        for what, number, size in steps:
            stream = self.streams[number]
            match what:
                case "send":
                    stream.send(size)
                case "end":
                    stream.end()
                case "leave":
                    self.worker.leave(stream.place)
                case "turn":
                    self.turns.run()
                case "own":
                    stream.deliver(size)
                case _:
                    assert self.gateway.receive(self.shared.take(size))
            await asyncio.sleep(0)


SCHEDULE = st.lists(STEP, max_size=60)
ASKS = st.tuples(*(st.booleans() for _ in range(NUM_STREAMS)))


@given(SCHEDULE, ASKS, st.booleans())
def test_each_stream_arrives_whole_and_in_order(steps, asks, pushes):
    async def main() -> None:
        world = World(asks)
        async with asyncio.TaskGroup() as readers, asyncio.timeout(10):
            for stream in world.streams:
                readers.create_task(stream.read(pushes=pushes))
            await world.run(steps)
            for stream in world.streams:
                stream.send(1)
                stream.end()
            world.turns.run()
            for stream in world.streams:
                stream.deliver(1 << 20)
            assert world.gateway.receive(world.shared.take(1 << 30))
        for stream in world.streams:
            assert stream.is_over
            assert stream.got == stream.sent
            assert stream.idle == [stream.connection], "its connection serves the next request"
            assert not stream.request_way.is_closed
        assert not world.gateway.answers

    asyncio.run(main())


@given(SCHEDULE, st.booleans(), st.booleans())
def test_a_stream_whose_multiplex_is_lost_is_lost_behind_a_beginning(steps, pushes, at_worker):
    """What arrived is a prefix; both sides see the loss on the stream's own connection."""

    async def main() -> None:
        world = World((True,) * NUM_STREAMS)
        async with asyncio.timeout(10):
            readers = [asyncio.create_task(stream.read(pushes=pushes)) for stream in world.streams]
            await world.run(steps)
            for stream in world.streams:
                stream.send(0)
            world.turns.run()
            if at_worker:
                world.worker.lose()
                for stream in world.streams:
                    if stream.way.is_closed:
                        stream.connection.connection_lost(None)
            world.gateway.lose("gone")
            await asyncio.sleep(0)
            for stream, reader in zip(world.streams, readers, strict=True):
                if not reader.done():  # it goes on by its own connection, or has not begun
                    stream.send(1)
                    stream.end()
                    world.turns.run()
                    stream.deliver(1 << 20)
            results = await asyncio.gather(*readers, return_exceptions=True)
        for stream, result in zip(world.streams, results, strict=True):
            assert result is None or isinstance(result, WorkerLostError)
            assert stream.sent.startswith(stream.got)
            if result is None:
                assert stream.got == stream.sent
        assert not world.gateway.answers

    asyncio.run(main())


def test_a_stream_that_does_not_leave_when_it_is_asked_to_is_lost() -> None:
    async def main() -> None:
        asked = list[bytes]()
        gateway = MultiplexReader(b"0" * 32, None, lambda _: None, asked.append)  # type: ignore[arg-type]
        stream = Stream(0, Turns(), asks=True)
        answer = stream.ask(None, gateway)  # type: ignore[arg-type]
        part = FRAME.pack(stream.place, MAX_FRAME_BYTES) + bytes(MAX_FRAME_BYTES)
        for _ in range(MOST_LATE_BYTES // MAX_FRAME_BYTES - 1):
            assert gateway.receive(part)
        assert len(asked) == 1
        assert gateway.answers
        assert gateway.receive(part)
        assert not gateway.answers
        assert stream.request_way.is_closed
        assert len(await answer.read()) == MOST_LATE_BYTES
        with pytest.raises(WorkerLostError, match="goes on to send"):
            await answer.read()

    asyncio.run(main())


@given(st.binary(max_size=400), st.lists(st.integers(1, 60), max_size=20))
def test_bytes_that_are_no_frames_are_refused_or_belong_to_nobody(data, cuts):
    gateway = MultiplexReader(b"0" * 32, None, lambda _: None, lambda _: None)  # type: ignore[arg-type]
    at = 0
    for cut in [*cuts, len(data)]:
        if not gateway.receive(data[at : at + cut]):
            break
        at += cut
    assert len(gateway._rest) <= FRAME.size + MAX_FRAME_BYTES + len(data)
