"""Prompts' beginnings that are read while they are looked for, and put into blocks without a wait.

An engine that plans a step, and cannot wait in it, orders this in place of a lookup: what is found
is in memory before the engine reserves blocks for it. The copy into the blocks cannot fail, and no
other thread takes part in it.

    start_lookup(ReadOrder) ──► PrefixFound, is_read ──► put_in_blocks, or release
                            └─► PrefixFound            as of a lookup: `start_load` loads it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.handoff.interface import LoadOrder, LookupOrder, PrefixStore

if TYPE_CHECKING:
    from baton.ids import TicketId


@dataclass(frozen=True, slots=True)
class ReadOrder(LookupOrder):
    """Find a prompt's beginning, and read it into memory of the store's, where that is little."""


class ReadsPrefixes(PrefixStore, Protocol):
    """A `PrefixStore` that carries out `ReadOrder`s. Thread-safe."""

    def put_in_blocks(self, order: LoadOrder) -> int:
        """Put what the `ReadOrder` of the same id has read into the order's blocks; once.

        Copies in memory, on the caller's thread: it takes milliseconds. The order's prompt ends
        where what was found ends, or before. `guard` is not used.

        Returns:
            Tokens before which all are in place; `order.start` where nothing was read under the id.

        Raises:
            ProtocolError: the blocks do not cover the order's tokens.
        """
        ...

    def hurry(self, *, is_hurried: bool) -> None:
        """From now on the engine waits for what it has ordered to be kept; False: not any more."""
        ...

    def release(self, order: TicketId) -> None:
        """What this `ReadOrder` has read is not needed. Ignored where nothing was."""
        ...
