"""What of a vLLM server's KV events is passed on to gateways."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engines.vllm.event_relay import record_event
from baton.events.blocks import (
    DEFAULT_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventDomain,
    Lost,
    Restarted,
)
from baton.events.journal import CacheJournal

DOMAIN = EventDomain("vllm/sha256")
BLOCK_SIZE = 2


def stored(*hashes: int, **fields: Any) -> BlockStored:
    values: dict[str, Any] = {
        "parent": None,
        "packed_ids": bytes(4 * BLOCK_SIZE * len(hashes)),
        "block_size": BLOCK_SIZE,
        "medium": DEFAULT_MEDIUM,
        "group": 0,
    }
    return BlockStored(DOMAIN, hashes, **(values | fields))


def removed(*hashes: int, medium: str = DEFAULT_MEDIUM, group: int = 0) -> BlockRemoved:
    return BlockRemoved(DOMAIN, hashes, medium, group)


def hashes_held(journal: CacheJournal) -> set[Any]:
    page = journal.read(1 << 30)
    assert page.is_whole
    return {each for event in page.events for each in getattr(event, "hashes", ())}


@pytest.mark.parametrize(
    ("event", "held"),
    [
        (stored(1, 2), {1, 2, 9}),
        (stored(1, 2, num_plain=1), {1, 9}),
        (stored(1, 2, num_plain=0), {9}),
        (stored(1, medium="CPU"), {9}),
        (stored(1, group=1), {9}),
        (stored(1, 2, packed_ids=bytes(8)), {9}),
        (stored(1, packed_ids=b"", block_size=0), {9}),
        (removed(9), set()),
        (removed(9, 1), set()),
        (removed(9, medium="CPU"), {9}),
        (removed(9, group=1), {9}),
        (AllBlocksCleared(), set()),
        (Restarted(), set()),
        (Lost(3), set()),
    ],
)
def test_what_routers_can_use_is_recorded(event: Any, held: set[int]) -> None:
    journal = CacheJournal()
    record_event(journal, stored(9))
    record_event(journal, event)
    assert hashes_held(journal) == held


def test_readers_learn_of_a_loss_until_all_is_known_again() -> None:
    journal = CacheJournal()
    record_event(journal, stored(1))
    last = journal.last
    record_event(journal, Lost(7))
    record_event(journal, stored(2))
    page = journal.read(last)
    assert (page.is_whole, page.is_incomplete) == (True, True)
    assert not journal.read(page.last).is_incomplete, "who has read it knows"
    record_event(journal, AllBlocksCleared())
    assert not journal.read(page.last).is_incomplete
    assert journal.read(page.last).is_whole
