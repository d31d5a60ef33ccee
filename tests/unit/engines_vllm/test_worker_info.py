"""What a server says of itself, put together from its ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engines.vllm.identity import (
    Identity,
    ModelFacts,
    RankFacts,
    describe_worker,
    read_model_facts,
)
from baton.engines.vllm.options import ConnectorOptions
from baton.ids import Epoch, WorkerId
from baton.kv.layout import KVLayout

IDENTITY = Identity(WorkerId("v0"), Epoch("0" * 32), "both", 2)
MODEL = ModelFacts("/models/m", "m", 4096, ("shared", "tcp"), None)
POOLED = RankFacts(
    "127.0.0.1:9",
    "http://127.0.0.1:10",
    "f" * 64,
    KVLayout.gqa(2, 4, 32, block_size=4, dtype="float32"),
    ("push", "pull", "pool"),
)
PLAIN = replace(POOLED, handoff_address="127.0.0.1:11", modes=("push", "pull"))


def test_a_server_takes_part_in_the_modes_that_all_its_ranks_know() -> None:
    assert describe_worker(IDENTITY, MODEL, {0: POOLED, 1: POOLED}).modes == POOLED.modes
    for ranks in ({0: POOLED, 1: PLAIN}, {0: PLAIN, 1: POOLED}):
        assert describe_worker(IDENTITY, MODEL, ranks).modes == ("push", "pull")
    nothing = replace(PLAIN, modes=())
    assert describe_worker(IDENTITY, MODEL, {0: POOLED, 1: nothing}).modes == ()


def test_a_server_reports_of_a_store_if_all_its_ranks_use_it() -> None:
    first = replace(POOLED, has_store_journal=True)  # the others do not report of it
    assert describe_worker(IDENTITY, MODEL, {0: first, 1: POOLED}).has_kv_journal
    for ranks in ({0: POOLED, 1: POOLED}, {0: first, 1: PLAIN}):
        assert not describe_worker(IDENTITY, MODEL, ranks).has_kv_journal


def test_a_server_whose_clients_are_gateways_takes_unsigned_tickets() -> None:
    for is_so in (False, True):
        model = replace(MODEL, takes_unsigned_tickets=is_so)
        assert describe_worker(IDENTITY, model, {0: PLAIN}).takes_unsigned_tickets is is_so


@pytest.mark.parametrize(
    ("rank", "configured", "announced"),
    [
        (0, ("tcp://*:5557", "tcp://*:5600"), ("tcp://*:5557", "tcp://*:5600")),
        (2, ("tcp://*:5557", "tcp://*:5600"), ("tcp://*:5559", "tcp://*:5602")),
        (2, ("tcp://[::]:5557", None), ("tcp://[::]:5559", None)),
        (0, ("ipc:///run/a:1", "ipc:///run/b"), ("ipc:///run/a:1", "ipc:///run/b")),
    ],
)
def test_each_data_parallel_rank_is_followed_where_it_publishes(
    rank: int, configured: tuple[str, str | None], announced: tuple[str, str | None]
) -> None:
    events = SimpleNamespace(
        enable_kv_cache_events=True, publisher="zmq", topic="kv",
        endpoint=configured[0], replay_endpoint=configured[1],
    )  # fmt: skip
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            model="/m", served_model_name="m", max_model_len=9, enable_sleep_mode=False
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=1, max_num_batched_tokens=1),
        parallel_config=SimpleNamespace(data_parallel_index=rank),
        kv_events_config=events,
        lora_config=None,
    )
    facts = read_model_facts(config, ConnectorOptions())
    source = facts.kv_events
    assert source is not None
    assert (source.endpoint, source.replay_endpoint) == announced
    assert not facts.relays_kv_events
    for relayed, is_so in ((announced[0], True), ("ipc:///run/other", False)):
        facts = read_model_facts(config, ConnectorOptions(relayed_kv_events=relayed))
        assert facts.relays_kv_events is is_so, "the user's own endpoint is not passed on"
        assert describe_worker(IDENTITY, facts, {0: PLAIN}).relays_kv_events is is_so
