from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from baton.errors import BatonError
from baton.gateway.asgi import BodyBudget, BodyLimit
from baton.gateway.errors import BodyTooLargeError
from baton.gateway.picker.processing import Processing

MAX_BYTES = 1000


class Placed:
    """A request that goes to one worker."""

    def close(self) -> None: ...

    async def place(self, data: bytes, subset: frozenset[str] | None) -> tuple[str, bytes]:
        del subset
        return "10.0.0.1:1", data


class Part(bytes):
    num_measured = 0

    def __len__(self) -> int:
        Part.num_measured += 1
        return super().__len__()


def test_each_part_of_a_body_costs_the_same_however_many_came_before() -> None:
    services, limit = SimpleNamespace(), BodyLimit(MAX_BYTES, lambda: MAX_BYTES)
    processing = Processing(services, BodyBudget(1 << 20), limit)

    async def take_parts() -> None:
        for _ in range(MAX_BYTES):
            assert (
                await processing._take(SimpleNamespace(body=Part(b"x"), end_of_stream=False)) == ()
            )
        with pytest.raises(BodyTooLargeError):
            await processing._take(ext_proc.HttpBody(body=b"x"))

    asyncio.run(take_parts())
    assert Part.num_measured <= 2 * MAX_BYTES


def test_a_body_is_not_counted_any_more_once_envoy_has_it_back() -> None:
    bodies, limit = BodyBudget(MAX_BYTES), BodyLimit(MAX_BYTES, lambda: MAX_BYTES)
    running = [Processing(SimpleNamespace(), bodies, limit) for _ in range(3)]

    async def place_all() -> None:
        for processing in running:
            processing._request = Placed()
            processing._removed = []
            await processing._take(ext_proc.HttpBody(body=b"x" * 600))
            assert bodies.num_bytes == 600
            await processing._take(ext_proc.HttpBody(body=b"x", end_of_stream=True))
            with pytest.raises(BatonError, match="after its end"):
                await processing._take(ext_proc.HttpBody(body=b"x"))

    asyncio.run(place_all())
    assert bodies.num_bytes == 0
    for processing in running:
        processing.close()
    assert bodies.num_bytes == 0
