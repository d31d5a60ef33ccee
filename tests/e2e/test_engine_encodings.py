"""The store with each encoding, between real engines: what comes, who finds it, what is noted."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("transformers")

from baton.encodings.interface import ENCODINGS
from baton.engines.interface import DecodeRequest, PrefillRequest
from baton.handoff.pool_mode.block_copier import hash_segments
from baton.kv.identity import HashDomain
from tests.e2e.test_engine_pool import PROMPTS, expected_fixture, make_ticket, pooled
from tests.e2e.test_engine_stored_prefixes import PROMPTS as BEGINNINGS
from tests.e2e.test_engine_stored_prefixes import ask, store_of, wait_until_kept

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.test_engine_handoff_agents import Node

__all__ = ["expected_fixture"]
EVERY = pytest.mark.every
KINDS = [kind for kind in ENCODINGS.kinds() if kind != "raw"]
LARGEST_SHARE = {"int8": 0.32, "fp8": 0.32, "int4": 0.35, "int4_token": 0.26, "zstd": 0.9}
"""Of float32's bytes, with heads of 8 numbers to each scale."""


@pytest.fixture(name="nodes")
def nodes_fixture() -> Iterator[ExitStack]:
    with ExitStack() as nodes:
        yield nodes


def name_of(kind: str) -> str:
    return f"store={ENCODINGS.build(kind, {}).name}"


SAME, DIFFERENT = (16, 16, 16), (24, 16, 64)
"""Block sizes of prefill, decode and the store."""


@pytest.mark.parametrize(
    ("kind", "block_sizes"),
    [(kind, DIFFERENT) for kind in KINDS]
    + [pytest.param(kind, SAME, marks=() if kind == "zstd" else EVERY) for kind in KINDS],
)
def test_requests_go_through_a_store_that_encodes(
    kind: str,
    block_sizes: tuple[int, int, int],
    expected: dict[str, list[int]],
    nodes: ExitStack,
    tmp_path: Path,
) -> None:
    on_prefill, on_decode, in_store = block_sizes
    prefill, decode = (
        nodes.enter_context(
            pooled(name, tmp_path, store_block_size=in_store, encoding=kind, block_size=size)
        )
        for name, size in (("p", on_prefill), ("d", on_decode))
    )
    for name in PROMPTS:
        ticket = make_ticket(prefill, decode)
        decode.submit(name, DecodeRequest(ticket))
        prefill.submit(name, PrefillRequest(ticket))
    decode.wait_for_ends()
    prefill.wait_for_ends()
    answers = decode.answers()
    assert [trace.fallbacks for trace in decode.traces.values()] == [[]] * len(PROMPTS)
    if ENCODINGS.build(kind, {}).is_exact:
        assert answers == expected
    assert {n: len(each) for n, each in answers.items()} == {
        n: len(each) for n, each in expected.items()
    }
    for node in (prefill, decode):
        received = [t for t in node.traces.values() if t.num_bytes]
        assert received
        assert all(trace.encodings == [name_of(kind)] for trace in received)
    for access, counts in (
        (prefill.agent.store.access, prefill.agent.store.access.encoded),
        (decode.agent.store.access, decode.agent.store.access.decoded),
    ):
        assert access.encoding.name == ENCODINGS.build(kind, {}).name
        assert 0 < counts.encoded_bytes < LARGEST_SHARE[kind] * counts.raw_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_worker_computed_another_loads_and_decodes(
    kind: str, nodes: ExitStack, tmp_path: Path
) -> None:
    one, two = (
        nodes.enter_context(pooled(name, tmp_path, prefixes=True, encoding=kind))
        for name in ("one", "two")
    )
    expected = ask(one)
    wait_until_kept(one)
    answers = ask(two)
    if ENCODINGS.build(kind, {}).is_exact:
        assert answers == expected
    for name, trace in two.traces.items():
        assert trace.num_loaded_tokens >= len(BEGINNINGS[name]) - 48
        assert trace.encodings == [name_of(kind)]
        assert trace.fallbacks == []


@pytest.mark.parametrize(
    ("kept", "wanted"),
    [("int8", "raw"), ("raw", "int8"), pytest.param("int8", "zstd", marks=EVERY)],
)
def test_kv_is_found_only_by_workers_of_the_same_encoding(
    kept: str, wanted: str, nodes: ExitStack, tmp_path: Path
) -> None:
    writer, reader, control = (
        nodes.enter_context(pooled(name, tmp_path, prefixes=True, encoding=kind))
        for name, kind in (("writer", kept), ("reader", wanted), ("control", kept))
    )
    expected = ask(writer)
    wait_until_kept(writer)
    if wanted != "int8":
        assert ask(reader) == expected  # computed: exact, whatever the writer left
    else:
        ask(reader)
    assert store_of(reader).counts.loaded_tokens == 0
    assert all(trace.num_loaded_tokens == 0 for trace in reader.traces.values())
    assert all(trace.encodings == [] for trace in reader.traces.values())
    ask(control)
    assert store_of(control).counts.loaded_tokens > 0  # it was there


def test_an_entry_that_holds_something_else_costs_time_only(
    expected: dict[str, list[int]], nodes: ExitStack, tmp_path: Path
) -> None:
    """Its name and its tag are right, so no tier rejects it; its body is no Zstandard frame."""
    prefill, decode = (
        nodes.enter_context(pooled(name, tmp_path, encoding="zstd")) for name in ("p", "d")
    )
    name = max(PROMPTS, key=lambda each: len(PROMPTS[each]))
    put_noise(decode, name)
    ticket = make_ticket(prefill, decode)
    decode.submit(name, DecodeRequest(ticket))
    prefill.submit(name, PrefillRequest(ticket))
    decode.wait_for_ends()
    assert decode.answers()[name] == expected[name]
    assert "Zstandard" in decode.traces[name].fallbacks[0]


def put_noise(node: Node, name: str) -> None:
    """Under the name of a prompt's first entry, before anything else is put there."""
    access, fingerprint = node.agent.store.access, node.engine.info.fingerprint
    domain = HashDomain(fingerprint, "", access.entry_format.block_size)
    first = hash_segments(domain, PROMPTS[name])[0]
    num_bytes = access.entry_format.part_layout(0).block_bytes
    access.store.put(access.entry_format.name(first.block_hash, 0), memoryview(bytes(num_bytes)))
