"""What a server says of itself, put together from its ranks."""

from __future__ import annotations

from dataclasses import replace

from baton.engines.vllm.identity import Identity, ModelFacts, RankFacts, describe_worker
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
