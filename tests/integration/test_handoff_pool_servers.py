"""Mode pool through tiers on servers: what it does through folders, and a server that hangs."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from baton.config.sections import StoreSection
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, KVSent, SendFailed
from tests.integration.test_handoff_pool import (
    FIRST,
    IN_STORE,
    NUM_TOKENS,
    Node,
    make_prompt,
    make_ticket,
    node,
    prefill_all,
    test_another_tenant_or_prompt_finds_nothing,
    test_decode_that_comes_first_waits_block_by_block,
    test_decode_that_comes_later_finds_all_and_the_first_token,
    wait_until,
)
from tests.store_servers import S3_CREDENTIALS, RedisServer, S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [  # run here, too, with this module's `pair`
    "test_another_tenant_or_prompt_finds_nothing",
    "test_decode_that_comes_first_waits_block_by_block",
    "test_decode_that_comes_later_finds_all_and_the_first_token",
]

TIMEOUT_S = 0.5
PATIENT_S = 10.0


def open_pair(
    stack: ExitStack, tiers: tuple[str, ...], options: dict[str, object]
) -> tuple[Node, Node]:
    section = StoreSection(tiers=tiers, block_size=IN_STORE, options={tiers[-1]: options})
    prefill = stack.enter_context(node(section, 4, 1))
    return prefill, stack.enter_context(node(section, 6, 2))


@pytest.fixture(name="pair", params=["redis", "host,redis", "object"])
def pair_fixture(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Node, Node]]:
    for name, value in S3_CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    tiers = tuple(request.param.split(","))
    server = S3Server() if tiers == ("object",) else RedisServer(tmp_path)
    options = server.options if isinstance(server, S3Server) else {"url": server.url}
    with ExitStack() as stack:
        stack.callback(server.close)
        yield open_pair(stack, tiers, options | {"timeout_s": PATIENT_S})


def test_a_server_that_hangs_costs_its_time_limit(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    with ExitStack() as stack:
        stack.callback(server.close)
        options: dict[str, object] = {"url": server.url, "timeout_s": TIMEOUT_S}
        prefill, decode = open_pair(stack, ("redis",), options)
        before = make_ticket()
        prefill_all(prefill, before, make_prompt())
        with server.stopped():
            began = time.monotonic()
            ticket, prompt = make_ticket(), make_prompt(1)
            prefill.start_send(ticket, prompt)
            prefill.compute(ticket, NUM_TOKENS)
            prefill.handoffs.prefill_done(ticket.id, FIRST)
            (failed,) = prefill.hear(SendFailed)
            assert "redis" in str(failed.error)
            decode.start_receive(before, make_prompt(), patience_s=2 * TIMEOUT_S)
            decode.hear(KVFailed, BlocksQuiescent)
            assert time.monotonic() - began < 40 * TIMEOUT_S
        for number in range(2, 100):  # both use it again by themselves
            ticket, prompt = make_ticket(), make_prompt(number)
            prefill.start_send(ticket, prompt)
            prefill.compute(ticket, NUM_TOKENS)
            prefill.handoffs.prefill_done(ticket.id, FIRST)
            wait_until(lambda: bool(poll(prefill)), PATIENT_S)
            (event,), prefill.events = prefill.events, []
            if isinstance(event, KVSent):
                break
            time.sleep(0.1)
        decode.start_receive(ticket, prompt)
        decode.hear(KVLanded)


def poll(worker: Node) -> list[object]:
    """What has happened to a worker's handoffs."""
    worker.events += worker.handoffs.poll()
    return worker.events
