"""Fetches the entries that are asked for next, while the last one is used.

Whoever reads a prompt's beginning looks for its entries in one call, then reads them in order.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from baton.store.interface import Body, EntryName


class ReadAhead:
    """Of the names found last, at most `max_entries` and about `max_bytes` beyond the last one.

    One owner thread. `fetch` starts a request for a value.
    """

    def __init__(
        self,
        fetch: Callable[[EntryName], Future[Body | None]],
        *,
        max_entries: int,
        max_bytes: int,
    ) -> None:
        self._fetch, self._max_entries, self._max_bytes = fetch, max_entries, max_bytes
        self._next: dict[EntryName, EntryName] = {}
        self._started: dict[EntryName, Future[Body | None]] = {}
        self._value_bytes = max_bytes
        """Of the last value: until one is known, only one is fetched ahead."""

    def expect(self, names: Sequence[EntryName]) -> None:
        """These will be taken in this order; what was fetched for others is dropped."""
        self._next = dict(pairwise(names))
        for name in self._started.keys() - set(names):
            self.forget(name)

    def take(self, name: EntryName) -> Future[Body | None]:
        """The request for a value; starts those for the values after it."""
        future = self._started.pop(name, None) or self._fetch(name)
        num_ahead = min(self._max_entries, self._max_bytes // max(1, self._value_bytes))
        following: EntryName | None = name
        for _ in range(num_ahead):
            following = None if following is None else self._next.get(following)
            if following is None:
                break
            if following not in self._started:
                self._started[following] = self._fetch(following)
        return future

    def observe(self, num_bytes: int) -> None:
        """A value was so large: the next ones are as large, most likely."""
        self._value_bytes = num_bytes

    def forget(self, name: EntryName) -> None:
        """What was fetched of it is not to be used."""
        future = self._started.pop(name, None)
        if future is not None:
            future.cancel()

    def clear(self) -> None:
        """Forget all."""
        self.expect(())
