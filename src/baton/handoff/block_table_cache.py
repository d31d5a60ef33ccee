"""Pages that a peer names, layer by layer: as a rule the same ones each time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.handoff.messages import unpack_blocks
from baton.kv.copies import BlockTable

if TYPE_CHECKING:
    from baton.handoff.messages import Available


class BlockTableCache:
    """What one peer named last, so that equal names are one table: a plan for it serves again."""

    def __init__(self) -> None:
        self._packed = b""
        self._table: BlockTable | None = None

    def find(self, available: Available) -> BlockTable:
        """The peer's pages that hold what is available.

        Raises:
            ProtocolError: they are no list of pages.
        """
        table = self._table
        if (
            table is None
            or table.first != available.first_block
            or self._packed != available.blocks
        ):
            table = BlockTable(available.first_block, unpack_blocks(available.blocks))
            self._packed, self._table = available.blocks, table
        return table
