"""Holdings against a plain set of (medium, group, hash)."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from baton.events.blocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventDomain,
    Lost,
    Restarted,
    WorkerBlockIndex,
)

DOMAIN = EventDomain("test")
MEDIA, GROUPS, HASHES = ["GPU", "CPU"], [0, 1], [0, 1, 2, b"a", b"b"]
hashes = st.lists(st.sampled_from(HASHES), max_size=4).map(tuple)
media, groups = st.sampled_from(MEDIA), st.sampled_from(GROUPS)
events = st.one_of(
    st.builds(lambda h, m, g: BlockStored(DOMAIN, h, None, b"", 0, m, g), hashes, media, groups),
    st.builds(lambda h, m, g: BlockRemoved(DOMAIN, h, m, g), hashes, media, groups),
    st.sampled_from([AllBlocksCleared(), Restarted(), Lost(0)]),
)


@given(st.lists(events, max_size=30))
def test_holdings_are_what_the_events_say(history):
    block_index, model = WorkerBlockIndex(DOMAIN), set()
    for event in history:
        block_index.apply(event)
        block_index.check_invariants()
        match event:
            case BlockStored():
                model |= {(event.medium, event.group, each) for each in event.hashes}
            case BlockRemoved():
                model -= {(event.medium, event.group, each) for each in event.hashes}
            case _:
                model.clear()
        held = Counter((medium, group) for medium, group, _ in model)
        assert Counter(block_index.num_blocks) == held  # equal where one has a zero for nothing
