"""How one handoff is carried out on the decode worker: settled once its peer is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.handoff.messages import GrantOp
    from baton.kv.copies import BlockTable


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Who moves the bytes (neither side, by reference), into which pages of this worker's KV view.

    `staged`: the pages are staging memory, so that only the engine accesses its own blocks.
    Else the pages are the engine's blocks. `undigested` are the transports over which no digests
    are wanted.
    """

    op: GrantOp
    pages: BlockTable
    staged: bool
    undigested: tuple[str, ...] = ()
