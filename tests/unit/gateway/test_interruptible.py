from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from baton.gateway.errors import ClientLeftError, DeadlineError
from baton.gateway.interruptible import Interruptible


def test_the_cause_surfaces_where_the_block_ends():
    async def main():
        with Interruptible() as block:
            asyncio.get_running_loop().call_soon(block.interrupt, ClientLeftError())
            await asyncio.Event().wait()

    with pytest.raises(ClientLeftError):
        asyncio.run(main())


def test_the_task_goes_on_after_an_interrupted_block():
    async def main():
        try:
            with Interruptible() as block:
                block.interrupt(ClientLeftError())
                await asyncio.Event().wait()
        except ClientLeftError:
            await asyncio.sleep(0)
        return asyncio.current_task().cancelling()

    assert asyncio.run(main()) == 0


def test_the_first_cause_wins():
    async def main():
        with Interruptible() as block:
            block.interrupt(DeadlineError())
            block.interrupt(ClientLeftError())
            await asyncio.Event().wait()

    with pytest.raises(DeadlineError):
        asyncio.run(main())


def test_after_its_end_nothing_is_interrupted():
    async def main():
        with Interruptible() as block:
            pass
        block.interrupt(ClientLeftError())
        await asyncio.sleep(0)
        return "went on"

    assert asyncio.run(main()) == "went on"


def test_the_outer_cause_passes_through_an_inner_block():
    async def main():
        with Interruptible() as outer, Interruptible():
            outer.interrupt(ClientLeftError())
            await asyncio.Event().wait()

    with pytest.raises(ClientLeftError):
        asyncio.run(main())


def test_of_two_nested_causes_the_outer_one_surfaces():
    async def main():
        with Interruptible() as outer, Interruptible() as inner:
            inner.interrupt(DeadlineError())
            outer.interrupt(ClientLeftError())
            await asyncio.Event().wait()

    with pytest.raises(ClientLeftError):
        asyncio.run(main())


def test_a_cancellation_from_elsewhere_stays_one():
    async def main():
        async def served():
            with Interruptible():
                await asyncio.Event().wait()

        task = asyncio.create_task(served())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_cancelled_and_interrupted_at_once_it_is_cancelled():
    async def main():
        blocks = []

        async def served():
            with Interruptible() as block:
                blocks.append(block)
                await asyncio.Event().wait()

        task = asyncio.create_task(served())
        await asyncio.sleep(0)
        task.cancel()
        blocks[0].interrupt(ClientLeftError())
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_what_an_interrupted_block_held_is_free_at_once():
    """Not when the garbage collector comes by: it counts objects, and these are megabytes."""

    class Body:
        pass

    async def hold(bodies: list[weakref.ref[Body]]):
        body = Body()
        bodies.append(weakref.ref(body))
        with Interruptible() as block:
            asyncio.get_running_loop().call_soon(block.interrupt, ClientLeftError())
            await asyncio.Event().wait()

    async def main() -> bool:
        bodies: list[weakref.ref[Body]] = []
        with pytest.raises(ClientLeftError):
            await hold(bodies)
        await asyncio.sleep(0)
        return bodies[0]() is None

    gc.disable()
    try:
        assert asyncio.run(main())
    finally:
        gc.enable()
