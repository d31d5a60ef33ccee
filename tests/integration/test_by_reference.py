"""Two processes, one attends over the other's memory; and one of them is hurt meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.test_worker_legs import asking, read_metrics, read_trace
from tests.integration.worker_process import ENGINE_OPTIONS, WorkerProcess, make_ticket, starting

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from tests.integration.test_worker_legs import Answer

pytest.importorskip("torch")

PATIENCE_S = 30.0
RECLAIM_S = 10.0
"""On a busy machine; an idle one takes a tenth of a second."""
STOPS_WITHIN_S = 20.0
LIVENESS_TIMEOUT_S = 1.0
NUM_BLOCKS = 64
NUM_TOKENS = 200
"""Of an answer that is long enough for a fault to find it half-way."""
LENT, BORROWED, FREE = (
    f'baton_worker_blocks{{state="{s}"}}' for s in ("exported", "imported", "free")
)


@contextmanager
def worker(name: str, role: str) -> Generator[WorkerProcess]:
    with starting(
        name,
        role=role,
        transfer={"transports": ["shared"]},
        handoff={"liveness_timeout_s": LIVENESS_TIMEOUT_S},
        engine_options=ENGINE_OPTIONS | {"num_blocks": NUM_BLOCKS},
    ) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def prefill() -> Generator[WorkerProcess]:
    with worker("p0", "prefill") as running:
        yield running
        assert running.end() == 0


@pytest.fixture(scope="module")
def decode() -> Generator[WorkerProcess]:
    """Killed by the last test of this file."""
    with worker("d0", "decode") as running:
        yield running


def prompt() -> str:
    """Nothing of it is cached; some ten blocks."""
    return f"Letter {uuid.uuid4().hex}. " + "She smiled, and said nothing of it. " * 12


BODY: dict[str, Any] = {"prompt": prompt(), "max_tokens": NUM_TOKENS, "ignore_eos": True}
"""Of each handoff, which is another tenant's: nothing of the prompt is cached for it."""


@pytest.fixture(scope="module")
def choices(prefill: WorkerProcess) -> Any:
    """What one worker alone answers."""

    async def ask_alone() -> Any:
        async with asking() as ask:
            return (await ask(prefill, BODY)).json()["choices"]

    return asyncio.run(ask_alone())


async def until(
    what: str, holds: Callable[[], Awaitable[bool]], patience_s: float = PATIENCE_S
) -> None:
    deadline = asyncio.get_running_loop().time() + patience_s
    while not await holds():
        assert asyncio.get_running_loop().time() < deadline, f"it did not come to this: {what}"
        await asyncio.sleep(0.02)


async def count(running: WorkerProcess, name: str) -> float:
    return (await read_metrics(running))[name]


def to_come_back(running: WorkerProcess) -> Callable[[], Awaitable[bool]]:
    async def all_free() -> bool:
        metrics = await read_metrics(running)
        return metrics[LENT] == 0 and metrics[FREE] == NUM_BLOCKS

    return all_free


async def hand_over(
    ask: Any, sender: WorkerProcess, receiver: WorkerProcess, body: dict[str, Any]
) -> tuple[asyncio.Task[Answer], asyncio.Task[Answer]]:
    """Both legs of one request; the decode leg's has begun to read borrowed blocks."""
    tenant = uuid.uuid4().hex
    _, text = make_ticket(sender.ref, receiver.ref, tenant, mode="reference")
    legs = (
        asyncio.create_task(ask(sender, body, text)),
        asyncio.create_task(ask(receiver, body, text)),
    )

    async def is_borrowed() -> bool:
        return await count(receiver, BORROWED) > 0

    await until("borrowed", is_borrowed)
    assert await count(sender, LENT) > 0
    assert not legs[1].done(), "the answer was over before anything happened to it"
    return legs


def test_nothing_is_moved_and_all_comes_back(
    prefill: WorkerProcess, decode: WorkerProcess, choices: Any
) -> None:
    async def scenario() -> None:
        async with asking() as ask:
            first, second = await hand_over(ask, prefill, decode, BODY | {"id": "whole"})
            assert (await first).status == 200
            answer = await second
        assert answer.json()["choices"] == choices
        trace = await read_trace(decode, "whole")
        assert (trace.mode, trace.transport, trace.num_bytes) == ("reference", "reference", 0)
        assert trace.num_received_tokens == trace.num_prompt_tokens
        assert not trace.fallbacks + trace.reroutes
        await until("all blocks are free", to_come_back(prefill))

    asyncio.run(scenario())


def test_a_lender_that_is_killed_leaves_a_right_answer(decode: WorkerProcess, choices: Any) -> None:
    async def scenario() -> None:
        async with asking() as ask:
            with worker("p1", "prefill") as victim:
                first, second = await hand_over(ask, victim, decode, BODY | {"id": "orphan"})
                victim.popen.send_signal(signal.SIGKILL)
                victim.popen.wait(30)
                assert not second.done(), "it was over before the lender died"
                answer = await second
                await asyncio.gather(first, return_exceptions=True)
        assert answer.json()["choices"] == choices
        assert (await read_trace(decode, "orphan")).fallbacks == []
        await until("all blocks are free", to_come_back(decode))

    asyncio.run(scenario())


@contextmanager
def stopped(running: WorkerProcess) -> Generator[None]:
    os.kill(running.popen.pid, signal.SIGSTOP)
    status = Path(f"/proc/{running.popen.pid}/stat")
    deadline = time.monotonic() + STOPS_WITHIN_S
    while status.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
    try:
        yield
    finally:
        os.kill(running.popen.pid, signal.SIGCONT)


def test_nothing_is_reused_under_a_borrower_that_was_stopped(
    prefill: WorkerProcess, decode: WorkerProcess, choices: Any
) -> None:
    """The link ends, and the lender's pool is filled several times over; then it goes on."""

    async def scenario() -> None:
        async with asking() as ask:
            first, second = await hand_over(ask, prefill, decode, BODY)
            assert (await first).status == 200
            lent = await count(prefill, LENT)
            with stopped(decode):
                await asyncio.sleep(2 * LIVENESS_TIMEOUT_S)  # the lender gives the link up
                for _ in range(NUM_BLOCKS // 8):
                    other = await ask(prefill, {"prompt": prompt(), "max_tokens": 1})
                    assert other.status == 200
                assert await count(prefill, LENT) == lent
                assert not second.done()
            answer = await second
        assert answer.json()["choices"] == choices
        await until("it is told over another link", to_come_back(prefill))

    asyncio.run(scenario())


def test_what_a_killed_borrower_held_comes_back(
    prefill: WorkerProcess, decode: WorkerProcess
) -> None:
    async def scenario() -> None:
        async with asking() as ask:
            legs = await hand_over(ask, prefill, decode, BODY)
            decode.popen.send_signal(signal.SIGKILL)
            await until("all blocks are free", to_come_back(prefill), RECLAIM_S)
            await asyncio.gather(*legs, return_exceptions=True)
            assert (await ask(prefill, BODY | {"max_tokens": 8})).status == 200

    asyncio.run(scenario())
