"""Which blocks one worker holds now, as far as its events tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from baton.events.blocks import (
    DEFAULT_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Lost,
    Restarted,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.events.blocks import EventDomain, ExternalHash, FeedEvent


class WorkerBlockIndex:
    """Sets of hashes, one for each medium and group. One owner thread.

    A set, not a count of copies: vLLM tells of each copy of a block, and on request of blocks that
    it merely used again, so that counts would not return to zero. When one of two copies goes,
    the block counts as gone: a hit may be missed, none is made up.
    """

    def __init__(self, domain: EventDomain) -> None:
        self._domain = domain
        self._held: dict[tuple[str, int], set[ExternalHash]] = {}

    @property
    def domain(self) -> EventDomain:
        """What the hashes mean."""
        return self._domain

    @property
    def num_blocks(self) -> dict[tuple[str, int], int]:
        """Blocks held by (medium, group), of all that were ever heard of. Any thread may ask."""
        return {key: len(held) for key, held in list(self._held.items())}

    def apply(self, event: FeedEvent) -> None:
        """Take up one event of the worker's feed. Those of another domain are ignored."""
        match event:
            case BlockStored():
                if event.domain == self._domain:
                    self._of(event.medium, event.group).update(event.hashes)
            case BlockRemoved():
                if event.domain == self._domain:
                    self._of(event.medium, event.group).difference_update(event.hashes)
            case AllBlocksCleared() | Restarted() | Lost():
                self.clear()
            case _ as never:
                assert_never(never)

    def clear(self) -> None:
        """Forget every block."""
        for held in self._held.values():
            held.clear()

    def find_matches(
        self, hashes: Sequence[ExternalHash], *, medium: str = DEFAULT_MEDIUM, group: int = 0
    ) -> int:
        """How many of these are held, from the first on; stops at the first miss."""
        held = self._held.get((medium, group))
        if not held:
            return 0
        for num_matches, block in enumerate(hashes):
            if block not in held:
                return num_matches
        return len(hashes)

    def check_invariants(self) -> None:
        """Raise AssertionError if the sets cannot be.

        Raises:
            AssertionError: a key or a hash is of no kind that an event can carry.
        """
        for (medium, group), held in self._held.items():
            if not medium or group < 0:
                raise AssertionError(f"blocks in medium {medium!r}, group {group}")
            if not all(isinstance(block, int | bytes) for block in held):
                raise AssertionError(f"medium {medium!r}, group {group} holds what is no hash")

    def _of(self, medium: str, group: int) -> set[ExternalHash]:
        return self._held.setdefault((medium, group), set())
