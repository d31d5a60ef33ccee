"""Entries that upper tiers demote or write through, on their way to the server.

The caller does not wait: an upper tier demotes many entries to make room for one, and a load waits
behind that. Bounded in bytes, or one larger value; what is beyond, or fails, is not kept.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from baton.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from baton.store.interface import EntryName


class WriteBehind:
    """Values in the order in which they came, written by `num_writers` at once. Thread-safe.

    With one writer they also appear in that order. `write` raises StoreError where it fails: then
    all that waits is dropped, since the server is down or full.
    """

    def __init__(
        self,
        write: Callable[[EntryName, bytes], object],
        submit: Callable[[Callable[[], None]], Future[None]],
        *,
        max_bytes: int,
        num_writers: int,
    ) -> None:
        self._write, self._submit = write, submit
        self._max_bytes, self._num_writers = max_bytes, num_writers
        self._changed = threading.Condition()
        self._waiting: dict[EntryName, bytes] = {}
        self._writing: dict[EntryName, bytes] = {}
        self._num_active = self._num_bytes = 0
        self._failure: StoreError | None = None
        self._has_written = False
        self.num_dropped = 0

    def try_add(self, name: EntryName, value: bytes) -> bool:
        """Take a value; False if there is no room for it now."""
        with self._changed:
            if name in self._waiting or name in self._writing:
                return True
            if self._num_bytes and self._num_bytes + len(value) > self._max_bytes:
                return False
            self._waiting[name] = value
            self._num_bytes += len(value)
            begins = self._num_active < self._num_writers
            self._num_active += begins
        if begins:
            self._submit(self._drain)
        return True

    def get(self, name: EntryName) -> bytes | None:
        """A value that is not on the server yet."""
        with self._changed:
            return self._waiting.get(name) or self._writing.get(name)

    def names(self) -> frozenset[EntryName]:
        """Of all values that are not on the server yet."""
        with self._changed:
            return frozenset((*self._waiting, *self._writing))

    def discard(self, name: EntryName) -> None:
        """Do not write it, unless that has begun."""
        with self._changed:
            self._num_bytes -= len(self._waiting.pop(name, b""))

    def take_failure(self) -> StoreError | None:
        """Why a write failed since the last call."""
        with self._changed:
            failure, self._failure = self._failure, None
            return failure

    def take_success(self) -> bool:
        """Whether a value was written since the last call, and no write has failed since."""
        with self._changed:
            has_written, self._has_written = self._has_written, False
            return has_written

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until all is written or dropped; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_active, timeout_s)

    def _drain(self) -> None:
        while (name := self._begin_next()) is not None:
            failure: StoreError | None = None
            try:
                self._write(name, self._writing[name])
            except Exception as exc:  # noqa: BLE001 - the next writer is to start all the same
                failure = exc if isinstance(exc, StoreError) else StoreError(repr(exc))
            self._end(name, failure)

    def _begin_next(self) -> EntryName | None:
        with self._changed:
            if not self._waiting:
                self._num_active -= 1
                self._changed.notify_all()
                return None
            name = next(iter(self._waiting))
            self._writing[name] = self._waiting.pop(name)
            return name

    def _end(self, name: EntryName, failure: StoreError | None) -> None:
        with self._changed:
            self._num_bytes -= len(self._writing.pop(name))
            self._has_written = failure is None
            if failure is not None:
                self._failure = failure
                self.num_dropped += 1 + len(self._waiting)
                self._waiting.clear()
                self._num_bytes = sum(map(len, self._writing.values()))
