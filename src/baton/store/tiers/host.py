"""`host`: this process's own memory, above a tier that other workers share.

Nothing but this process can change what is in it, so it is not checked when it is read, as an
engine's own pages are not. What is put here is put into the tier below at once, since no other
worker finds it here: eviction drops a copy. With `listen` other processes do find it, by their tier
`peer`; what they put is checked when it comes.
"""

from __future__ import annotations

import logging
import threading
from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from baton.errors import ConfigError, StoreError, StoreFullError
from baton.kv.digest_table import NO_ROW, DigestTable
from baton.kv.row_order import RowOrder
from baton.registry import Plugin
from baton.store.capacity import Capacity, StoredEntry
from baton.store.entry_format import HEADER_BYTES, has_digest, make_header, read_header
from baton.store.interface import (
    MAX_BODY_BYTES,
    NO_TENANT,
    EntryName,
    NamedBody,
    PutResult,
    Usage,
)
from baton.store.memory_lease import MemoryLease
from baton.store.peer.addresses import parse_listen
from baton.store.peer.server import EntryServer, ServerOptions
from baton.store.puts import put_each, take_one

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.store.interface import Body, PutOutcome, TenantLabel, TierContext, TierFactory

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


@dataclass(slots=True, eq=False)
class _Holder:
    """A tenant, and what of the tier is its: bytes are of bodies."""

    label: TenantLabel
    held_bytes: int = 0
    num_entries: int = 0


_NO_HOLDER: Final = _Holder(NO_TENANT)
"""Of rows that are free."""


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
        self._clock, self._below = context.clock, context.below
        self._lock = threading.Lock()
        self._num_dropped = 0
        self._clear()
        self._server = self._try_serve(options, context)

    def find(self, names: Sequence[EntryName]) -> int:
        with self._lock:
            return self._table.count_leading(names)

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

    def try_lease(self, name: EntryName) -> MemoryLease | None:
        with self._lock:
            row = self._table.find(name)
            if row == NO_ROW:
                return None
            self._touch(row)
            return MemoryLease(self._bodies[row], self._holders[row].label)

    def discard(self, name: EntryName) -> None:
        with self._lock:
            row = self._table.find(name)
            if row != NO_ROW:
                self._remove(row)

    def entries(self) -> list[StoredEntry]:
        with self._lock:
            return [
                StoredEntry(
                    EntryName(self._table.digest(row)),
                    len(self._bodies[row]),
                    self._used_at[row],
                    tenant=self._holders[row].label,
                )
                for row in self._order
            ]

    def is_whole(self, name: EntryName) -> bool:
        return bool(self.find((name,)))

    def usage(self) -> Usage:
        peers = None if self._server is None else self._server.counts
        return Usage(self._used_bytes, self._capacity_bytes, 0, self._num_dropped, 0, peers=peers)

    def close(self) -> None:
        """See `Tier`: the memory goes, as the process's own does."""
        if self._server is not None:
            self._server.stop()
        with self._lock:
            self._clear()

    def holds(self, names: Sequence[EntryName]) -> list[bool]:
        with self._lock:
            rows = self._table.find_each(names)
        return [row != NO_ROW for row in rows.tolist()]

    def read_value(self, name: EntryName, *, is_use: bool) -> tuple[bytes, bytes] | None:
        with self._lock:
            row = self._table.find(name)
            if row == NO_ROW:
                return None
            if is_use:
                self._touch(row)
            header, body = self._headers.get(row), self._bodies[row]
            tenant = self._holders[row].label
        if header is None:
            header = make_header(self._key, name, body, tenant=tenant)
            with self._lock:
                row = self._table.find(name)
                if row != NO_ROW and self._bodies[row] is body:  # not replaced meanwhile
                    self._headers[row] = header
        return header, body

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
            row = self._table.find(name)
            if row != NO_ROW:
                self._touch(row)
                return PutResult.EXISTS
        self._require_fit(len(body), tenant)
        kept = _copy(body)
        with self._lock:
            if self._table.find(name) != NO_ROW:  # a peer was quicker
                return PutResult.EXISTS
            self._make_room(len(kept), tenant)
            holder = self._tenants.setdefault(tenant, _Holder(tenant))
            row = self._table.add(name)
            if row == len(self._bodies):
                self._bodies.append(kept)
                self._holders.append(holder)
                self._used_at.append(self._clock.unix_now())
            else:
                self._bodies[row], self._holders[row] = kept, holder
                self._used_at[row] = self._clock.unix_now()
            self._order.append(row)
            self._used_bytes += len(kept)
            holder.held_bytes += len(kept)
            holder.num_entries += 1
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
        holder = self._tenants.get(tenant)
        is_shared_out = self._tenant_bytes < self._capacity_bytes
        if is_shared_out and holder is not None and tenant != NO_TENANT:
            shortage = Capacity(self._tenant_bytes, holder.held_bytes).shortage(num_bytes)
            stop_at = holder.held_bytes - shortage
            if shortage:
                for row in [row for row in self._order if self._holders[row] is holder]:
                    if holder.held_bytes <= stop_at:
                        break
                    self._drop(row)
        while self._used_bytes + num_bytes > self._capacity_bytes:
            self._drop(self._order.first)

    def _drop(self, row: int) -> None:
        self._remove(row)
        self._num_dropped += 1

    def _remove(self, row: int) -> None:
        holder, num_bytes = self._holders[row], len(self._bodies[row])
        self._table.remove(self._table.digest(row))
        self._order.remove(row)
        self._bodies[row], self._holders[row] = b"", _NO_HOLDER
        self._headers.pop(row, None)
        self._used_bytes -= num_bytes
        holder.held_bytes -= num_bytes
        holder.num_entries -= 1
        if not holder.num_entries:
            del self._tenants[holder.label]

    def _touch(self, row: int) -> None:
        self._order.move_to_end(row)
        self._used_at[row] = self._clock.unix_now()

    def _clear(self) -> None:
        """Begin with no entries: their names in a table, all else in columns by its rows."""
        self._table, self._order = DigestTable(), RowOrder()
        self._bodies: list[bytes] = []
        self._holders: list[_Holder] = []
        self._used_at = array("d")
        self._headers: dict[int, bytes] = {}
        """Made when the first peer reads an entry: a header costs as much as to copy the body."""
        self._tenants: dict[TenantLabel, _Holder] = {}
        self._used_bytes = 0


def _copy(body: Body) -> bytes:
    """Of this tier's own.

    Raises:
        StoreFullError: the process has less memory than the tier may use.
    """
    try:
        return bytes(body)
    except MemoryError:
        raise StoreFullError(f"no memory for an entry of {len(body)} bytes") from None


def _build(options: HostTierOptions) -> TierFactory:
    return partial(HostTier, options)


PLUGIN = Plugin(HostTierOptions, _build)
