"""Prompts' beginnings that are read before blocks are reserved: real files, pages and threads."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from baton.handoff.interface import KeepOrder, KVSent, LoadOrder, PrefixFound
from baton.handoff.kv_views import KVView
from baton.handoff.pool_mode.block_copier import BlockCopier, hash_segments
from baton.handoff.read_prefixes import ReadOrder
from baton.ids import TicketId
from baton.kv.copies import BlockTable
from baton.kv.identity import HashDomain
from baton.kv.layout import KVLayout
from baton.store.entry_format import EntryFormat
from baton.transfer.region import allocate_host_region
from tests.integration.test_handoff_pool import (
    IN_STORE,
    NUM_TOKENS,
    PATIENCE_S,
    entries,
    make_prompt,
    make_ticket,
    node,
    pair_fixture,
    prefill_all,
    section,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from baton.handoff.pool_mode.prefix_store import StoredPrefixes
    from baton.store.interface import EntryName
    from tests.integration.test_handoff_pool import Node

__all__ = ["pair_fixture"]

ID = TicketId(b"r" * 16)
NUM_FULL = NUM_TOKENS // IN_STORE * IN_STORE


def prefixes_of(node: Node) -> StoredPrefixes:
    assert node.handoffs.store is not None
    return node.handoffs.store.prefixes


def read(node: Node, prompt: NDArray[np.int32], start: int, token_s: float = 0.0) -> PrefixFound:
    prefixes_of(node).start_lookup(ReadOrder(ID, "", prompt, start, token_s))
    (found,) = node.hear(PrefixFound)
    assert isinstance(found, PrefixFound)
    return found


def put_in_blocks(node: Node, prompt: NDArray[np.int32], start: int) -> int:
    return prefixes_of(node).put_in_blocks(LoadOrder(ID, "", prompt, start, 0.0, node.table))


@pytest.mark.parametrize("start", [0, 7, IN_STORE])
def test_what_was_read_is_in_the_blocks_at_once(pair: tuple[Node, Node], start: int) -> None:
    prefill, decode = pair
    prompt = make_prompt()
    prefill_all(prefill, make_ticket(), prompt)
    before = decode.read(0, start), decode.read(NUM_FULL, NUM_TOKENS)
    found = read(decode, prompt, start)
    assert (found.num_tokens, found.is_read) == (NUM_FULL, True)
    assert put_in_blocks(decode, prompt[:NUM_FULL], start) == NUM_FULL
    assert decode.read(start, NUM_FULL) == prefill.read(start, NUM_FULL)
    assert (decode.read(0, start), decode.read(NUM_FULL, NUM_TOKENS)) == before


def test_what_goes_after_it_was_read_is_used_all_the_same(
    pair: tuple[Node, Node], tmp_path: Path
) -> None:
    prefill, decode = pair
    prompt = make_prompt()
    prefill_all(prefill, make_ticket(), prompt)
    assert read(decode, prompt, 0).is_read
    for path in entries(tmp_path):
        path.unlink()
    assert put_in_blocks(decode, prompt[:NUM_FULL], 0) == NUM_FULL
    assert decode.read(0, NUM_FULL) == prefill.read(0, NUM_FULL)


def test_a_damaged_entry_ends_what_is_found(pair: tuple[Node, Node], tmp_path: Path) -> None:
    prefill, decode = pair
    prompt = make_prompt()
    prefill_all(prefill, make_ticket(), prompt)
    hashes = [each.block_hash for each in hash_segments(HashDomain("model", "", IN_STORE), prompt)]
    second = prefixes_of(decode).access.entry_format.name(hashes[1], 0)
    (path,) = [path for path in entries(tmp_path) if path.name == second.hex()]
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    found = read(decode, prompt, 0)
    assert (found.num_tokens, found.is_read) == (IN_STORE, True)
    assert put_in_blocks(decode, prompt[:IN_STORE], 0) == IN_STORE
    assert decode.read(0, IN_STORE) == prefill.read(0, IN_STORE)


def test_an_engine_that_computes_can_wait_for_what_it_has_ordered_to_be_kept(
    tmp_path: Path,
) -> None:
    """With so small a share of the time, a second batch would be copied in minutes."""
    with node(section(tmp_path, keep_share=1e-6), 4, 1) as worker:
        prefixes, prompt = prefixes_of(worker), make_prompt()
        prefixes.steps.num_begun += 1
        prefixes.start_keep(KeepOrder(ID, "", prompt[:NUM_FULL], worker.table))
        time.sleep(0.5)
        assert not worker.handoffs.poll()
        prefixes.hurry(is_hurried=True)
        worker.hear(KVSent)
        assert read(worker, prompt, 0).num_tokens == NUM_FULL
        prefixes.hurry(is_hurried=False)
        prefixes.start_keep(KeepOrder(ID, "", make_prompt(1)[:NUM_FULL], worker.table))
        time.sleep(0.5)
        assert not worker.handoffs.poll()


@pytest.mark.parametrize(("late_s", "num_tries"), [(0.05, 1), (0.0, 4)])
def test_a_tier_whose_reads_fail_late_is_left_alone(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, late_s: float, num_tries: int
) -> None:
    """As one on a server that answers lookups, and is too slow for entries."""
    prefill, decode = pair
    prompt = make_prompt()
    prefill_all(prefill, make_ticket(), prompt)
    tried = []

    def fail(name: EntryName) -> None:
        tried.append(name)
        time.sleep(late_s)

    monkeypatch.setattr(prefixes_of(decode).access.store, "try_lease", fail)
    token_s = 0.01 / IN_STORE
    for _ in range(4):
        assert read(decode, prompt, 0, token_s).num_tokens == 0
    assert len(tried) == num_tries


class HeldStaging:
    """Staging in which `gather` waits in the middle."""

    def __init__(self) -> None:
        self.is_gathering, self.go_on, self.calls = threading.Event(), threading.Event(), []

    def gather(self, *_: Any) -> None:
        self.is_gathering.set()
        assert self.go_on.wait(PATIENCE_S)
        self.calls.append("gather")

    def scatter(self, *_: Any) -> None:
        self.calls.append("scatter")


def test_staging_pages_belong_to_one_copy_at_a_time() -> None:
    """One thread gathers what is to be kept, while another puts what was read into blocks."""
    layout = KVLayout.gqa(1, 2, 8, block_size=4, dtype="float32")
    region = allocate_host_region([(8, layout.page_bytes(0))])
    staging: Any = HeldStaging()
    entry_format = EntryFormat.of(layout, block_size=8, num_parts=1)
    copier = BlockCopier(KVView(layout, region, staging), entry_format)
    segments = hash_segments(HashDomain("model", "", 8), make_prompt(num_tokens=16))
    table = BlockTable(0, np.arange(4, dtype=np.int64))
    bodies = copier.allocate_bodies(segments)
    keeping = threading.Thread(target=copier.gather, args=(segments, table))
    placing = threading.Thread(
        target=copier.scatter, args=(bodies, segments), kwargs={"start": 0, "table": table}
    )
    keeping.start()
    assert staging.is_gathering.wait(PATIENCE_S)
    placing.start()
    placing.join(0.05)
    assert staging.calls == []
    staging.go_on.set()
    for thread in (keeping, placing):
        thread.join(PATIENCE_S)
    assert staging.calls == ["gather", "scatter"]
