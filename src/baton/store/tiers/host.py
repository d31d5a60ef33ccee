"""`host`: this process's own memory, above a tier that other workers share.

Nothing but this process can change what is in it, so it is not checked when it is read, as an
engine's own pages are not. What is put here is put into the tier below at once, since no other
worker finds it here: eviction drops a copy.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass
from functools import partial
from itertools import filterfalse
from typing import TYPE_CHECKING, Annotated, Self

import msgspec

from baton.errors import StoreError, StoreFullError
from baton.registry import Plugin
from baton.store.capacity import Capacity, StoredEntry
from baton.store.interface import NO_TENANT, PutResult, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.clock import UnixTime
    from baton.store.interface import Body, EntryName, TenantLabel, TierContext, TierFactory

logger = logging.getLogger(__name__)


class HostTierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`capacity_bytes` is for each worker (each rank of it) by itself.

    A tenant holds at most `tenant_share` of it.
    """

    capacity_bytes: Annotated[int, msgspec.Meta(ge=1)] = 1 << 30
    tenant_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


@dataclass(slots=True)
class _Entry:
    body: bytes
    used_at: UnixTime
    tenant: TenantLabel


class HostLease:
    """See `EntryLease`: a reference to bytes that never change."""

    def __init__(self, entry: _Entry) -> None:
        self._body, self.tenant = entry.body, entry.tenant

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
        self._tenant_bytes = int(options.tenant_share * options.capacity_bytes)
        self._held_bytes: Counter[TenantLabel] = Counter()
        self._clock, self._below = context.clock, context.below
        self._entries: OrderedDict[EntryName, _Entry] = OrderedDict()
        self._used_bytes = self._num_dropped = 0

    def find(self, names: Sequence[EntryName]) -> int:
        missing = next(filterfalse(self._entries.__contains__, names), None)
        return len(names) if missing is None else names.index(missing)

    def put(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        if name in self._entries:
            self._touch(name)
            return PutResult.EXISTS
        if len(body) > self._capacity_bytes:
            raise StoreFullError(f"an entry of {len(body)} bytes where {self._capacity_bytes} fit")
        if len(body) > self._tenant_bytes and tenant != NO_TENANT:
            raise StoreFullError(
                f"an entry of {len(body)} bytes where a tenant may hold {self._tenant_bytes}: "
                "tenant_share is too small for it"
            )
        self._make_room_in_share(len(body), tenant)
        while self._used_bytes + len(body) > self._capacity_bytes:
            self.discard(next(iter(self._entries)))
            self._num_dropped += 1
        self._entries[name] = _Entry(bytes(body), self._clock.unix_now(), tenant)
        self._used_bytes += len(body)
        self._held_bytes[tenant] += len(body)
        self._write_through(name, body, tenant)
        return PutResult.STORED

    def _make_room_in_share(self, num_bytes: int, tenant: TenantLabel) -> None:
        """Drop a tenant's entries, the least recently used first.

        With some slack beyond need, since all entries are looked at each time.
        """
        held = Capacity(self._tenant_bytes, self._held_bytes[tenant])
        shortage = held.shortage(num_bytes)
        if tenant == NO_TENANT or not shortage:
            return
        stop_at = self._held_bytes[tenant] - shortage
        for name in [n for n, entry in self._entries.items() if entry.tenant == tenant]:
            if self._held_bytes[tenant] <= stop_at:
                break
            self.discard(name)
            self._num_dropped += 1

    def try_lease(self, name: EntryName) -> HostLease | None:
        if name not in self._entries:
            return None
        self._touch(name)
        return HostLease(self._entries[name])

    def discard(self, name: EntryName) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._used_bytes -= len(entry.body)
            self._held_bytes[entry.tenant] -= len(entry.body)
            if not self._held_bytes[entry.tenant]:
                del self._held_bytes[entry.tenant]

    def entries(self) -> list[StoredEntry]:
        return [
            StoredEntry(name, len(entry.body), entry.used_at, tenant=entry.tenant)
            for name, entry in self._entries.items()
        ]

    def is_whole(self, name: EntryName) -> bool:
        return name in self._entries

    def usage(self) -> Usage:
        return Usage(self._used_bytes, self._capacity_bytes, 0, self._num_dropped, 0)

    def close(self) -> None:
        """See `Tier`: the memory goes, as the process's own does."""
        self._entries.clear()
        self._held_bytes.clear()
        self._used_bytes = 0

    def _touch(self, name: EntryName) -> None:
        self._entries.move_to_end(name)
        self._entries[name].used_at = self._clock.unix_now()

    def _write_through(self, name: EntryName, body: Body, tenant: TenantLabel) -> None:
        if self._below is None:
            return
        try:
            self._below.put(name, body, tenant)
        except StoreError as exc:  # counted where it failed
            logger.debug("store: an entry is in this process's memory alone: %s", exc)


def _build(options: HostTierOptions) -> TierFactory:
    return partial(HostTier, options)


PLUGIN = Plugin(HostTierOptions, _build)
