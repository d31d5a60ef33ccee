"""`host`: this process's own memory, above a tier that other workers share.

Nothing but this process can change what is in it, so it is not checked when it is read, as an
engine's own pages are not. What is put here is put into the tier below at once, since no other
worker finds it here: eviction drops a copy.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Self

import msgspec

from baton.errors import StoreError, StoreFullError
from baton.registry import Plugin
from baton.store.capacity import StoredEntry
from baton.store.interface import PutResult, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.clock import UnixTime
    from baton.store.interface import Body, EntryName, TierContext, TierFactory

logger = logging.getLogger(__name__)


class HostTierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`capacity_bytes` is for each worker (each rank of it) by itself."""

    capacity_bytes: Annotated[int, msgspec.Meta(ge=1)] = 1 << 30


@dataclass(slots=True)
class _Entry:
    body: bytes
    used_at: UnixTime


class HostLease:
    """See `EntryLease`: a reference to bytes that never change."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    @property
    def num_bytes(self) -> int:
        return len(self._body)

    def try_read(self, into: memoryview) -> bool:
        into[:] = self._body
        return True

    def release(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class HostTier:
    """See `Tier`. The memory of an entry that made room is free once its leases are released."""

    def __init__(self, options: HostTierOptions, context: TierContext) -> None:
        self._capacity_bytes = options.capacity_bytes
        self._clock, self._below = context.clock, context.below
        self._entries: OrderedDict[EntryName, _Entry] = OrderedDict()
        self._used_bytes = self._num_dropped = 0

    def find(self, names: Sequence[EntryName]) -> int:
        return next((at for at, name in enumerate(names) if name not in self._entries), len(names))

    def put(self, name: EntryName, body: Body) -> PutResult:
        if name in self._entries:
            self._touch(name)
            return PutResult.EXISTS
        if len(body) > self._capacity_bytes:
            raise StoreFullError(f"an entry of {len(body)} bytes where {self._capacity_bytes} fit")
        while self._used_bytes + len(body) > self._capacity_bytes:
            self.discard(next(iter(self._entries)))
            self._num_dropped += 1
        self._entries[name] = _Entry(bytes(body), self._clock.unix_now())
        self._used_bytes += len(body)
        self._write_through(name, body)
        return PutResult.STORED

    def try_lease(self, name: EntryName) -> HostLease | None:
        if name not in self._entries:
            return None
        self._touch(name)
        return HostLease(self._entries[name].body)

    def discard(self, name: EntryName) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._used_bytes -= len(entry.body)

    def entries(self) -> list[StoredEntry]:
        return [
            StoredEntry(name, len(entry.body), entry.used_at)
            for name, entry in self._entries.items()
        ]

    def is_whole(self, name: EntryName) -> bool:
        return name in self._entries

    def usage(self) -> Usage:
        return Usage(self._used_bytes, self._capacity_bytes, 0, self._num_dropped, 0)

    def close(self) -> None:
        """See `Tier`: the memory goes, as the process's own does."""
        self._entries.clear()
        self._used_bytes = 0

    def _touch(self, name: EntryName) -> None:
        self._entries.move_to_end(name)
        self._entries[name].used_at = self._clock.unix_now()

    def _write_through(self, name: EntryName, body: Body) -> None:
        if self._below is None:
            return
        try:
            self._below.put(name, body)
        except StoreError as exc:  # counted where it failed
            logger.debug("store: an entry is in this process's memory alone: %s", exc)


def _build(options: HostTierOptions) -> TierFactory:
    return partial(HostTier, options)


PLUGIN = Plugin(HostTierOptions, _build)
