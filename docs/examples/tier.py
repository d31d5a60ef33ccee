"""A tier in the memory of one process: the smallest that passes the contract."""

from __future__ import annotations

import msgspec

from baton.errors import StoreFullError
from baton.registry import Plugin
from baton.store.capacity import StoredEntry
from baton.store.interface import NO_TENANT, PutResult, Usage

# Bodies and tenants by name; insertion order is order of use.
_places: dict[str, dict[bytes, tuple[bytes, bytes]]] = {}


class DictTierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Set by `[store.options.dict]`."""

    place: str
    capacity_bytes: int = 1 << 20


class DictLease:
    """Bytes never change: a lease is a reference."""

    def __init__(self, body: bytes, tenant: bytes) -> None:
        self._body, self.num_bytes, self.tenant = body, len(body), tenant

    def try_read(self, into: memoryview) -> bool:
        into[:] = self._body
        return True

    def release(self) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None: ...


class DictTier:
    """See `Tier`."""

    def __init__(self, options, context) -> None:
        self._entries = _places.setdefault(options.place, {})
        self._capacity, self._below, self._num_dropped = options.capacity_bytes, context.below, 0

    def find(self, names) -> int:
        missing = (i for i, name in enumerate(names) if name not in self._entries)
        return next(missing, len(names))

    def put(self, name, body, tenant=NO_TENANT) -> PutResult:
        if name in self._entries:
            return PutResult.EXISTS
        if len(body) > self._capacity:
            raise StoreFullError("the entry is larger than the tier")
        while self._used() + len(body) > self._capacity:
            oldest = next(iter(self._entries))
            dropped = self._entries.pop(oldest)
            self._num_dropped += 1
            if self._below is not None:
                self._below.put(oldest, *dropped)
        self._entries[name] = bytes(body), tenant
        return PutResult.STORED

    def try_lease(self, name) -> DictLease | None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        self._entries[name] = entry  # used last
        return DictLease(*entry)

    def discard(self, name) -> None:
        self._entries.pop(name, None)

    def entries(self) -> list[StoredEntry]:
        return [
            StoredEntry(name, len(body), used_at, tenant=tenant)
            for used_at, (name, (body, tenant)) in enumerate(self._entries.items())
        ]

    def is_whole(self, name) -> bool:
        return name in self._entries

    def usage(self) -> Usage:
        below = self._below is not None
        demoted, dropped = (self._num_dropped, 0) if below else (0, self._num_dropped)
        return Usage(self._used(), self._capacity, demoted, dropped, 0)

    def close(self) -> None: ...

    def _used(self) -> int:
        return sum(len(body) for body, _ in self._entries.values())


PLUGIN = Plugin(DictTierOptions, lambda options: lambda context: DictTier(options, context))
