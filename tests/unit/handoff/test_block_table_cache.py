"""Pages that a peer names again are the same table; others are not."""

import msgspec
import numpy as np
import pytest

from baton.errors import ProtocolError
from baton.handoff.incoming import BlockTableCache
from baton.handoff.messages import Available, pack_blocks
from baton.ids import new_ticket_id


def available(first, blocks, layer=0):
    return Available(
        ticket=new_ticket_id(),
        layer=layer,
        start=0,
        stop=1,
        first_block=first,
        blocks=pack_blocks(np.array(blocks)),
        digests=b"",
    )


def test_the_same_pages_of_another_layer_are_the_same_table():
    block_tables = BlockTableCache()
    table = block_tables.find(available(2, [5, 3]))
    assert (table.first, table.blocks.tolist()) == (2, [5, 3])
    assert block_tables.find(available(2, [5, 3], layer=1)) is table
    assert block_tables.find(available(1, [5, 3])).first == 1
    assert block_tables.find(available(1, [5, 4])).blocks.tolist() == [5, 4]
    assert block_tables.find(available(2, [5, 3])).blocks.tolist() == [5, 3]


def test_no_pages_are_a_table_too_and_nonsense_is_none():
    block_tables = BlockTableCache()
    assert block_tables.find(available(0, [])).blocks.tolist() == []
    bad = msgspec.structs.replace(available(0, []), blocks=b"123")
    for _ in range(2):
        with pytest.raises(ProtocolError):
            block_tables.find(bad)
