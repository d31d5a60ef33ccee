"""Prompts' beginnings in the store, between real engines: loaded, not computed; same tokens."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("transformers")

from baton.engines.interface import Colocated, PrefillRequest, SamplingParams
from baton.engines.lookup_cost import LookupCost
from baton.handoff.pool_mode import keep_pace
from baton.kv.prefix_names import PrefixNames
from baton.router.prefixes import ModelPrefixes
from baton.store.entry_format import HEADER_BYTES
from baton.store.folder.tier import FolderTier
from baton.telemetry.trace import Stamp
from tests.e2e.test_engine_handoff_agents import CLOCK, until
from tests.e2e.test_engine_pool import listening_pair, make_ticket, open_tiers, pooled
from tests.unit.engines.harness import make_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from baton.handoff.pool_mode.prefix_store import StoredPrefixes
    from baton.handoff.pool_mode.store_reader import ReadBatch
    from baton.store.interface import EntryName, NamedBody, TenantLabel
    from baton.store.tiered import TierRun
    from tests.e2e.test_engine_handoff_agents import Node

WAIT_S = 20.0
PROMPTS = {f"r{n}": make_prompt(150 + n, seed=n) for n in range(4)}
SAMPLING = {
    name: SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True) for name in PROMPTS
}


def store_of(node: Node) -> StoredPrefixes:
    return node.agent.prefixes


def wait_until_kept(node: Node) -> None:
    """All full blocks that the answers of `ask` left; the last token of each has no KV."""
    store, answered = store_of(node), SAMPLING["r0"].max_tokens - 1
    size = node.engine.info.layout.block_size
    expected = sum(
        (len(prompt) + answered) // size * size // store.block_size for prompt in PROMPTS.values()
    )
    until(lambda: store.counts.num_stored + store.counts.num_present == expected)


def count_withheld(node: Node) -> int:
    stats = node.engine.stats()
    return stats.num_quarantined_blocks + stats.num_reserved_blocks


def ask(node: Node, prompts: dict[str, np.ndarray] | None = None) -> dict[str, list[int]]:
    """The answers of this node to all prompts."""
    node.prompts, node.sampling = prompts or PROMPTS, SAMPLING
    for name in node.prompts:
        node.submit(name, Colocated())
    node.wait_for_ends()
    return node.answers()


@pytest.fixture(name="nodes")
def nodes_fixture() -> Iterator[ExitStack]:
    with ExitStack() as nodes:
        yield nodes


@pytest.mark.parametrize("block_sizes", [(16, 16, 16), (24, 16, 32), (16, 24, 10)])
def test_what_one_worker_computed_another_loads(
    block_sizes: tuple[int, int, int], nodes: ExitStack, tmp_path: Path
) -> None:
    first_size, second_size, in_store = block_sizes
    one, two = (
        nodes.enter_context(
            pooled(name, tmp_path, store_block_size=in_store, block_size=size, prefixes=True)
        )
        for name, size in (("one", first_size), ("two", second_size))
    )
    expected = ask(one)
    wait_until_kept(one)
    assert ask(two) == expected
    for name, trace in two.traces.items():
        assert trace.num_loaded_tokens >= len(PROMPTS[name]) - 2 * in_store - first_size
        assert trace.num_cached_tokens == trace.num_loaded_tokens
        assert trace.fallbacks == []
    counts = store_of(two).counts
    assert counts.num_whole == len(PROMPTS)
    num_loaded = sum(trace.num_loaded_tokens for trace in two.traces.values())
    # Of each prompt's last block a token is computed, and so is all of it.
    assert num_loaded <= counts.loaded_tokens <= num_loaded + second_size * len(PROMPTS)


def test_an_entry_whose_stated_length_is_damaged_is_kept_anew(
    nodes: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length is known before the tag is checked: another one than the name's is not read."""
    names: list[EntryName] = []
    put_many = FolderTier.put_many

    def record(tier: FolderTier, entries: Sequence[NamedBody], tenant: TenantLabel) -> object:
        names.extend(entry.name for entry in entries if len(entry.body) > 128)
        return put_many(tier, entries, tenant)

    monkeypatch.setattr(FolderTier, "put_many", record)
    tiers = {"file": {"directory": str(tmp_path / "files")}}
    one = nodes.enter_context(pooled("one", tmp_path, prefixes=True, tiers=tiers))
    expected = ask(one)
    wait_until_kept(one)
    path = tmp_path / "files" / names[0].hex()  # one prompt's first
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES - 16] ^= 128  # of the length before compression, 0 where there is none
    path.write_bytes(raw)
    two = nodes.enter_context(pooled("two", tmp_path, prefixes=True, tiers=tiers))
    assert ask(two) == expected
    assert sum(trace.num_loaded_tokens == 0 for trace in two.traces.values()) == 1
    wait_until_kept(two)
    three = nodes.enter_context(pooled("three", tmp_path, prefixes=True, tiers=tiers))
    assert ask(three) == expected
    assert all(trace.num_loaded_tokens > 100 for trace in three.traces.values())


def test_what_one_worker_computed_another_reads_from_its_memory(
    nodes: ExitStack, tmp_path: Path
) -> None:
    """Two hosts without anything between them: each one's `host` tier is the other's `peer`."""
    of_one, of_two = listening_pair()
    one = nodes.enter_context(pooled("one", tmp_path, prefixes=True, tiers=of_one))
    two = nodes.enter_context(pooled("two", tmp_path, prefixes=True, tiers=of_two))
    journal = store_of(one).access.journal
    until(lambda: len(journal.list_reported()[0].tiers) == 2)  # it began before its peer did
    expected = ask(one)
    wait_until_kept(one)
    size = store_of(one).block_size
    stored = {name: (len(ids) - 1) // size * size for name, ids in PROMPTS.items()}
    until(lambda: count_stored([one, two]) == {"one": stored, "two": stored})
    assert count_stored([two]) == {"two": dict.fromkeys(PROMPTS, 0)}, "it reports its own alone"
    assert ask(two) == expected
    assert all(trace.num_loaded_tokens > 100 for trace in two.traces.values())
    assert all(trace.fallbacks == [] for trace in two.traces.values())
    first, _ = store_of(one).access.store.reports()
    num_entries = sum(len(prompt) // store_of(one).block_size for prompt in PROMPTS.values())
    assert first.usage.peers.num_read >= num_entries - len(PROMPTS)


def count_stored(readers: Sequence[Node]) -> dict[str, dict[str, int]]:
    """By worker, how much of each prompt a gateway that follows these knows that it can load."""
    prefixes = ModelPrefixes(PrefixNames(bytes(16)))
    for node in readers:
        followed = prefixes.follow(node.ref.worker)
        for event in node.engine.journal.read(0).events:
            followed.apply(event)
    prefixes.check_invariants()
    found = {name: prefixes.find(ids, "", 0.0).stored for name, ids in PROMPTS.items()}
    return {
        node.ref.worker: {name: stored.get(node.ref.worker, 0) for name, stored in found.items()}
        for node in readers
    }


def test_what_is_in_the_store_is_found_by_way_of_the_workers_journals(
    nodes: ExitStack, tmp_path: Path
) -> None:
    one, two = (
        nodes.enter_context(pooled(name, tmp_path, prefixes=True)) for name in ("one", "two")
    )
    ask(one)
    wait_until_kept(one)

    def find(*readers: Node) -> dict[str, int]:
        """How much of each prompt a gateway would know that the last of them can load."""
        return count_stored(readers)[readers[-1].ref.worker]

    size = store_of(one).block_size
    expected = {name: (len(ids) - 1) // size * size for name, ids in PROMPTS.items()}
    until(lambda: find(one) == expected)  # the journal has it some time after the store
    assert find(two) == dict.fromkeys(PROMPTS, 0), "it has not met them"
    assert find(one, two) == expected, "both use one tier"
    ask(two)
    wait_until_kept(two)
    until(lambda: find(two) == expected)  # it found them
    loads = two.engine.stats().store_loads
    assert loads.num_loads == len(PROMPTS)
    assert loads.num_tokens == sum(trace.num_loaded_tokens for trace in two.traces.values())
    assert loads.seconds > 0
    with closing(open_tiers(tmp_path)) as other_user:
        for entry in other_user.entries():
            other_user.discard(entry.name)
        until(lambda: not any(find(one, two).values()))


def test_an_answer_is_kept_for_the_next_turn(
    nodes: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_at_once: list[int] = []
    put_many = FolderTier.put_many

    def record(tier: FolderTier, entries: Sequence[NamedBody], tenant: TenantLabel) -> object:
        num_at_once.append(len(entries))
        return put_many(tier, entries, tenant)

    monkeypatch.setattr(FolderTier, "put_many", record)
    for bound in ("BUSY_BATCH_S", "IDLE_BATCH_S"):  # else a slow machine puts one at a time
        monkeypatch.setattr(keep_pace, bound, 1.0)
    one, two, alone = (
        nodes.enter_context(pooled(name, tmp_path / place, prefixes=True))
        for name, place in (("one", "store"), ("two", "store"), ("alone", "another"))
    )
    answers = ask(one)
    wait_until_kept(one)
    assert max(num_at_once) > 1, "what a request leaves is put several entries at once"
    turns = {
        name: np.concatenate([PROMPTS[name], np.array(answers[name], np.int32), make_prompt(9, 99)])
        for name in PROMPTS
    }
    assert ask(two, turns) == ask(alone, turns)
    for name, trace in two.traces.items():
        assert trace.num_loaded_tokens > len(PROMPTS[name])  # more than the first turn's prompt


def test_what_is_not_kept_for_want_of_blocks_is_counted(nodes: ExitStack, tmp_path: Path) -> None:
    node = nodes.enter_context(pooled("one", tmp_path, prefixes=True, max_kept_share=0.0))
    ask(node)
    size = store_of(node).block_size
    num_answered = SAMPLING["r0"].max_tokens - 1
    unkept = sum((len(prompt) + num_answered) // size for prompt in PROMPTS.values())
    until(lambda: store_of(node).counts.num_dropped >= unkept)
    assert store_of(node).counts.num_dropped == unkept > 0
    assert store_of(node).counts.num_stored == 0


def test_loads_that_exhaust_the_blocks_wait_for_each_other(
    nodes: ExitStack, tmp_path: Path
) -> None:
    one = nodes.enter_context(pooled("one", tmp_path, prefixes=True))
    two = nodes.enter_context(pooled("two", tmp_path, prefixes=True, num_blocks=16))
    expected = ask(one)
    wait_until_kept(one)
    size = two.engine.info.layout.block_size
    demand = [(len(prompt) + SAMPLING["r0"].max_tokens) // size for prompt in PROMPTS.values()]
    assert max(demand) < two.engine.info.num_blocks < sum(sorted(demand)[:2])
    assert ask(two) == expected
    assert store_of(two).counts.loaded_tokens > 0
    until(lambda: not count_withheld(two))
    until(lambda: two.engine.stats().num_free_blocks == two.engine.info.num_blocks)


def test_a_prefill_worker_loads_and_hands_over(nodes: ExitStack, tmp_path: Path) -> None:
    """Mode pool: all of the prompt is in the store in any case, so prefill computes a token."""
    one, prefill = (
        nodes.enter_context(pooled(name, tmp_path, prefixes=True)) for name in ("one", "prefill")
    )
    expected = ask(one)
    wait_until_kept(one)
    prefill.prompts, prefill.sampling = PROMPTS, SAMPLING
    for name in PROMPTS:
        prefill.submit(name, PrefillRequest(make_ticket(prefill, one)))
    prefill.wait_for_ends()
    assert prefill.answers() == {name: tokens[:1] for name, tokens in expected.items()}
    assert all(trace.num_loaded_tokens > 100 for trace in prefill.traces.values())


def test_what_is_not_there_is_computed(nodes: ExitStack, tmp_path: Path) -> None:
    one = nodes.enter_context(pooled("one", tmp_path, prefixes=True))
    alone = nodes.enter_context(pooled("alone", tmp_path / "another"))
    assert ask(one) == ask(alone)
    assert store_of(one).counts.num_missing > 0
    assert store_of(one).counts.loaded_tokens == 0
    assert alone.agent.prefixes is None


@pytest.mark.parametrize("between", ["folders", "peers"])
def test_tenants_do_not_find_each_others_prompts(
    between: str, nodes: ExitStack, tmp_path: Path
) -> None:
    tiers = listening_pair() if between == "peers" else (None, None)
    one, two = (
        nodes.enter_context(pooled(name, tmp_path, prefixes=True, tiers=each))
        for name, each in zip(("one", "two"), tiers, strict=True)
    )
    expected = ask(one)
    wait_until_kept(one)
    two.tenant_salt = "another"
    assert ask(two) == expected
    assert store_of(two).counts.loaded_tokens == 0
    assert store_of(two).counts.num_missing > 0, "it looked"


def test_tenants_of_one_worker_do_not_find_each_others_prompts_in_its_memory(
    nodes: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engines.lookup_cost.HELD_SHARE", 1e6)  # it asks
    one = nodes.enter_context(pooled("one", tmp_path, prefixes=True, tiers={"host": {}}))
    counts = store_of(one).counts
    expected = ask(one)
    wait_until_kept(one)
    num_stored = counts.num_stored
    one.tenant_salt = "another"
    assert ask_again(one) == expected
    assert all(trace.num_cached_tokens == 0 for trace in one.traces.values())
    until(lambda: counts.num_stored == 2 * num_stored)
    assert counts.num_present == 0, "each tenant has entries of its own"
    for seed in (100, 200, 300):  # the engine's own cache is full of others
        ask_again(one, {name: make_prompt(400, seed=seed + n) for n, name in enumerate(PROMPTS)})
    one.tenant_salt = ""
    assert ask_again(one) == expected
    assert all(trace.num_loaded_tokens > 100 for trace in one.traces.values())


def ask_again(node: Node, prompts: dict[str, np.ndarray] | None = None) -> dict[str, list[int]]:
    node.traces.clear()
    node.updates.clear()
    return ask(node, prompts)


def test_damaged_entries_are_computed(nodes: ExitStack, tmp_path: Path) -> None:
    one, two = (
        nodes.enter_context(pooled(name, tmp_path, prefixes=True)) for name in ("one", "two")
    )
    expected = ask(one)
    wait_until_kept(one)
    entries = [path for path in tmp_path.rglob("*") if len(path.name) == 64 and path.is_file()]
    for path in entries:
        body = bytearray(path.read_bytes())
        body[-1] ^= 1
        path.write_bytes(body)
    assert entries
    assert ask(two) == expected
    assert store_of(two).counts.loaded_tokens == 0


@pytest.mark.parametrize("call", ["find_runs", "try_lease"])
def test_a_store_that_does_not_answer_is_not_waited_for(
    call: str, nodes: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (
        nodes.enter_context(pooled(name, tmp_path, prefixes=True)) for name in ("one", "two")
    )
    expected = ask(one)
    wait_until_kept(one)
    monkeypatch.setattr("baton.engines.transformers.prefixes.LOAD_TIMEOUT_S", 0.2)
    store, answers, asked = store_of(two).access.store, threading.Event(), threading.Event()
    answer = getattr(store, call)

    def hang(names: list[EntryName] | EntryName) -> object:
        asked.set()
        answers.wait(WAIT_S)
        return answer(names)

    monkeypatch.setattr(store, call, hang)
    assert ask(two) == expected
    assert asked.is_set()
    assert not answers.is_set()
    is_loading = call == "try_lease"
    assert (count_withheld(two) > 0) == is_loading, "the store may still write into blocks"
    answers.set()
    assert any("has not answered" in str(trace.fallbacks) for trace in two.traces.values())
    until(lambda: not count_withheld(two))


def test_a_load_that_takes_long_and_makes_progress_is_used(
    nodes: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (
        nodes.enter_context(pooled(name, tmp_path, prefixes=True)) for name in ("one", "two")
    )
    expected = ask(one)
    wait_until_kept(one)
    monkeypatch.setattr("baton.engines.transformers.prefixes.LOAD_TIMEOUT_S", 0.6)
    monkeypatch.setattr("baton.handoff.pool_mode.prefix_store.TURNS_S", WAIT_S)
    monkeypatch.setattr("baton.handoff.pool_mode.block_copier.BATCH_BYTES", 1)
    read, batches = two.agent.store._reader.read_segments, []

    def read_slowly(*arguments: object, **named: object) -> ReadBatch:
        time.sleep(0.15)
        batches.append(arguments)
        return read(*arguments, **named)

    monkeypatch.setattr(two.agent.store._reader, "read_segments", read_slowly)
    assert ask(two, {"r1": PROMPTS["r1"]}) == {"r1": expected["r1"]}
    assert 0.15 * len(batches) > 1.2, "twice the time after which a store that hangs is left alone"
    trace = two.traces["r1"]
    assert trace.num_loaded_tokens >= len(PROMPTS["r1"]) - 2 * store_of(two).block_size
    assert trace.fallbacks == []


def test_a_load_that_turns_out_slower_than_computing_ends_between_two_batches(
    nodes: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (
        nodes.enter_context(pooled(name, tmp_path, prefixes=True)) for name in ("one", "two")
    )
    expected = ask(one)
    wait_until_kept(one)
    ask(two, {"r0": make_prompt(180, seed=77)})  # it knows what tokens take
    two.traces.clear()
    two.updates.clear()
    monkeypatch.setattr("baton.engines.lookup_cost.HELD_SHARE", 1e6)  # it asks
    monkeypatch.setattr("baton.handoff.pool_mode.block_copier.BATCH_BYTES", 1)
    read = two.agent.store._reader.read_segments
    batches = []

    def read_slowly(*arguments: object, **named: object) -> ReadBatch:
        time.sleep(0.1)
        batches.append(arguments)
        return read(*arguments, **named)

    monkeypatch.setattr(two.agent.store._reader, "read_segments", read_slowly)
    assert ask(two, {"r1": PROMPTS["r1"]}) == {"r1": expected["r1"]}
    assert len(batches) == 1
    assert store_of(two).counts.num_given_up == 1
    assert two.traces["r1"].num_loaded_tokens == store_of(two).block_size


@pytest.mark.parametrize("kind", ["colocated", "prefill"])
def test_an_answer_that_comes_while_a_prompt_is_computed_is_used_for_the_rest(
    kind: str, nodes: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = nodes.enter_context(pooled("one", tmp_path, prefixes=True))
    two = nodes.enter_context(pooled("two", tmp_path, prefixes=True, max_batch_tokens=16))
    expected = ask(one)["r0"]
    wait_until_kept(one)
    monkeypatch.setattr(LookupCost, "count_answered_in_time", lambda *_: 1_000)  # not held
    find, compute = two.agent.store.access.store.find_runs, two.engine._model
    begun, computed = threading.Event(), threading.Event()
    forward = compute.run

    def compute_one_step(*arguments: object, **named: object) -> object:
        """The first step ends once the store was asked; the second begins once it has answered."""
        if not computed.is_set():
            assert begun.wait(WAIT_S)
            result = forward(*arguments, **named)
            computed.set()
            time.sleep(0.2)
            return result
        return forward(*arguments, **named)

    def find_late(names: list[EntryName]) -> list[TierRun]:
        begun.set()
        computed.wait(WAIT_S)
        return find(names)

    monkeypatch.setattr(compute, "run", compute_one_step)
    monkeypatch.setattr(two.agent.store.access.store, "find_runs", find_late)
    if kind == "colocated":
        assert ask(two, {"r0": PROMPTS["r0"]})["r0"] == expected
    else:
        two.prompts, two.sampling = PROMPTS, SAMPLING
        two.submit("r0", PrefillRequest(make_ticket(two, one)))
        two.wait_for_ends()
        assert two.answers() == {"r0": expected[:1]}
    assert computed.is_set()
    trace = two.traces["r0"]
    assert 64 <= trace.num_loaded_tokens <= len(PROMPTS["r0"]) - 16
    assert trace.num_cached_tokens == trace.num_loaded_tokens, "16 tokens were its own"


def test_a_prompt_behind_two_others_is_loaded_before_they_are_computed(
    nodes: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = nodes.enter_context(pooled("one", tmp_path, prefixes=True))
    two = nodes.enter_context(pooled("two", tmp_path, prefixes=True, max_num_seqs=1))
    expected = ask(one)["r0"]
    wait_until_kept(one)
    reader, landed_at = store_of(two)._reader, []
    read = reader.read_segments

    def read_and_note(*arguments: object, **named: object) -> ReadBatch:
        found = read(*arguments, **named)
        landed_at.append(CLOCK.now())
        return found

    monkeypatch.setattr(reader, "read_segments", read_and_note)
    new = {name: make_prompt(300, seed=seed) for seed, name in enumerate(("new", "newer"), 50)}
    two.prompts, two.sampling = (
        {**new, "r0": PROMPTS["r0"]},
        dict.fromkeys((*new, "r0"), SAMPLING["r0"]),
    )
    for name in two.prompts:
        two.submit(name, Colocated())
    two.wait_for_ends()
    assert two.answers()["r0"] == expected
    assert landed_at[-1] < two.traces["newer"].stamps[Stamp.ADMITTED], (
        "the second of them had not even begun"
    )
    firsts = [two.traces[name].stamps[Stamp.PREFILL_DONE] for name in two.prompts]
    assert firsts == sorted(firsts), "it overtook none"
    assert two.traces["r0"].num_loaded_tokens > 100
