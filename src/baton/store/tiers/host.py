"""`host`: this process's own memory, above a tier that other workers share.

Nothing but this process can change what is in it, so it is not checked when it is read, as an
engine's own pages are not. What is put here is put into the tier below at once, since no other
worker finds it here: eviction drops a copy. With `listen` other processes do find it, by their tier
`peer`; what they put is checked when it comes.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from functools import partial
from itertools import filterfalse
from typing import TYPE_CHECKING, Annotated, Literal, Self

import msgspec

from baton.errors import ConfigError, StoreError, StoreFullError
from baton.registry import Plugin
from baton.store.capacity import Capacity, StoredEntry
from baton.store.entry_format import HEADER_BYTES, has_digest, make_header, read_header
from baton.store.interface import MAX_BODY_BYTES, NO_TENANT, NamedBody, PutResult, Usage
from baton.store.peer.addresses import parse_listen
from baton.store.peer.server import EntryServer, ServerOptions
from baton.store.puts import put_each, take_one

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.clock import UnixTime
    from baton.store.interface import (
        Body,
        EntryName,
        PutOutcome,
        TenantLabel,
        TierContext,
        TierFactory,
    )

logger = logging.getLogger(__name__)


class HostTierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`capacity_bytes` is for each worker (each rank of it) by itself.

    `listen`: `HOST:PORT` where other processes of the cluster read this tier (tier `peer`);
    `peers_may`: or write it as well. A tenant holds at most `tenant_share` of the capacity.
    """

    capacity_bytes: Annotated[int, msgspec.Meta(ge=1)] = 1 << 30
    listen: str | None = None
    peers_may: Literal["read", "write"] = "read"
    tenant_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


@dataclass(slots=True)
class _Entry:
    body: bytes
    used_at: UnixTime
    tenant: TenantLabel
    header: bytes | None = None
    """Made when the first peer reads it: it costs as much as to copy the body."""


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
    """See `Tier` and `ServedEntries`. Peers are answered by another thread: a lock is between.

    The memory of an entry that made room is free once its leases are released.
    """

    def __init__(self, options: HostTierOptions, context: TierContext) -> None:
        """Listen for peers, where that is configured.

        Raises:
            ConfigError: the address cannot be bound, or peers would write into tiers below.
        """
        self._capacity_bytes, self._key = options.capacity_bytes, context.key
        self._tenant_bytes = int(options.tenant_share * options.capacity_bytes)
        self._held_bytes: Counter[TenantLabel] = Counter()
        self._clock, self._below = context.clock, context.below
        self._lock = threading.Lock()
        self._entries: OrderedDict[EntryName, _Entry] = OrderedDict()
        self._used_bytes = self._num_dropped = 0
        self._server = self._try_serve(options, context)

    def find(self, names: Sequence[EntryName]) -> int:
        missing = next(filterfalse(self._entries.__contains__, names), None)
        return len(names) if missing is None else names.index(missing)

    def put(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        return take_one(self.put_many((NamedBody(name, body),), tenant))

    def put_many(
        self, entries: Sequence[NamedBody], tenant: TenantLabel = NO_TENANT
    ) -> list[PutOutcome]:
        """See `PutsMany`: what is new goes into the tier below at once."""
        outcomes = put_each(self._add, entries, tenant)
        added = [
            entry
            for entry, outcome in zip(entries, outcomes, strict=True)
            if outcome is PutResult.STORED
        ]
        if added and self._below is not None:
            for outcome in self._below.put_many(added, tenant):
                if isinstance(outcome, StoreError):  # counted where it failed
                    logger.debug("store: an entry is in this process's memory alone: %s", outcome)
        return outcomes

    def try_lease(self, name: EntryName) -> HostLease | None:
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return None
            self._touch(name, entry)
        return HostLease(entry)

    def discard(self, name: EntryName) -> None:
        with self._lock:
            self._remove(name)

    def entries(self) -> list[StoredEntry]:
        with self._lock:
            entries = [*self._entries.items()]
        return [
            StoredEntry(name, len(entry.body), entry.used_at, tenant=entry.tenant)
            for name, entry in entries
        ]

    def is_whole(self, name: EntryName) -> bool:
        return name in self._entries

    def usage(self) -> Usage:
        peers = None if self._server is None else self._server.counts
        return Usage(self._used_bytes, self._capacity_bytes, 0, self._num_dropped, 0, peers=peers)

    def close(self) -> None:
        """See `Tier`: the memory goes, as the process's own does."""
        if self._server is not None:
            self._server.stop()
        with self._lock:
            self._entries.clear()
            self._held_bytes.clear()
            self._used_bytes = 0

    def holds(self, names: Sequence[EntryName]) -> list[bool]:
        return [name in self._entries for name in names]

    def read_value(self, name: EntryName, *, is_use: bool) -> tuple[bytes, bytes] | None:
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return None
            if is_use:
                self._touch(name, entry)
        if entry.header is None:
            entry.header = make_header(self._key, name, entry.body, tenant=entry.tenant)
        return entry.header, entry.body

    def put_value(self, name: EntryName, value: memoryview) -> PutResult:
        header = read_header(name, bytes(value[:HEADER_BYTES]), len(value))
        body = value[HEADER_BYTES:]
        # What a tier has compressed for itself is no value that tiers exchange.
        if header is None or header.whole_bytes or not has_digest(self._key, header, body):
            raise StoreError(f"{name.hex()} is no entry that a holder of the cluster key has put")
        return self._add(name, body, header.tenant)

    @property
    def address(self) -> tuple[str, int] | None:
        """Where peers reach this tier; None: they do not."""
        return None if self._server is None else self._server.address

    def _try_serve(self, options: HostTierOptions, context: TierContext) -> EntryServer | None:
        if options.listen is None or context.peers is None or not context.peers.serves:
            return None
        takes_entries = options.peers_may == "write"
        if takes_entries and context.below is not None:
            raise ConfigError(
                'store.options.host.peers_may = "write": peers write into the memory of a process '
                "that has no other tier: set store.tiers to host alone"
            )
        host, port = parse_listen(options.listen)
        max_bytes = HEADER_BYTES + min(options.capacity_bytes, MAX_BODY_BYTES)
        server = EntryServer(self, ServerOptions(host, port, takes_entries, max_bytes))
        server.start(context.peers, context.clock)
        return server

    def _add(self, name: EntryName, body: Body, tenant: TenantLabel) -> PutResult:
        with self._lock:
            if name in self._entries:
                self._touch(name, self._entries[name])
                return PutResult.EXISTS
        self._require_fit(len(body), tenant)
        added = _Entry(bytes(body), self._clock.unix_now(), tenant)
        with self._lock:
            if name in self._entries:  # a peer was quicker
                return PutResult.EXISTS
            self._make_room(len(body), tenant)
            self._entries[name] = added
            self._used_bytes += len(body)
            self._held_bytes[tenant] += len(body)
        return PutResult.STORED

    def _require_fit(self, num_bytes: int, tenant: TenantLabel) -> None:
        if num_bytes > self._capacity_bytes:
            raise StoreFullError(f"an entry of {num_bytes} bytes where {self._capacity_bytes} fit")
        if num_bytes > self._tenant_bytes and tenant != NO_TENANT:
            raise StoreFullError(
                f"an entry of {num_bytes} bytes where a tenant may hold {self._tenant_bytes}: "
                "tenant_share is too small for it"
            )

    def _make_room(self, num_bytes: int, tenant: TenantLabel) -> None:
        """Drop entries, the least recently used first: the tenant's own where its share is full.

        A tenant's own with some slack beyond need, since all entries are looked at for them. Under
        the lock, as `_remove`.
        """
        shortage = Capacity(self._tenant_bytes, self._held_bytes[tenant]).shortage(num_bytes)
        if tenant != NO_TENANT and shortage:
            stop_at = self._held_bytes[tenant] - shortage
            for name in [n for n, entry in self._entries.items() if entry.tenant == tenant]:
                if self._held_bytes[tenant] <= stop_at:
                    break
                self._drop(name)
        while self._used_bytes + num_bytes > self._capacity_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, name: EntryName) -> None:
        self._remove(name)
        self._num_dropped += 1

    def _remove(self, name: EntryName) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._used_bytes -= len(entry.body)
            self._held_bytes[entry.tenant] -= len(entry.body)
            if not self._held_bytes[entry.tenant]:
                del self._held_bytes[entry.tenant]

    def _touch(self, name: EntryName, entry: _Entry) -> None:
        self._entries.move_to_end(name)
        entry.used_at = self._clock.unix_now()


def _build(options: HostTierOptions) -> TierFactory:
    return partial(HostTier, options)


PLUGIN = Plugin(HostTierOptions, _build)
