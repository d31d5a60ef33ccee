"""The contract of a tier, and of a store made of tiers: entries by name, kept while there is room.

An entry is a name and a body of bytes. Whoever puts it there first wins: a name stands for one
content (`store.entry_format`), so that a second put of it has nothing to change.

    put ──► STORED | EXISTS         try_lease ──► EntryLease ──► try_read ──► the body, or nothing
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import (
    TYPE_CHECKING,
    Final,
    NamedTuple,
    NewType,
    Protocol,
    Self,
    TypeAlias,
    runtime_checkable,
)

from baton.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.auth.credentials import Credentials
    from baton.clock import Clock
    from baton.errors import StoreError
    from baton.net.tls import Tls
    from baton.store.capacity import StoredEntry

EntryName = NewType("EntryName", bytes)
"""32 bytes: the SHA-256 that names an entry (`store.entry_format`)."""

TenantLabel = NewType("TenantLabel", bytes)
"""8 bytes that stand for the tenant whose KV an entry is: a keyed hash of its salt."""

TENANT_BYTES: Final = 8
NO_TENANT: Final = TenantLabel(bytes(TENANT_BYTES))
"""Of entries that are no tenant's (completion markers and the like)."""

Body: TypeAlias = "bytes | bytearray | memoryview"

NAME_BYTES: Final = 32
MAX_BODY_BYTES: Final = 1 << 32


class PutResult(Enum):
    """What became of an entry that was put."""

    STORED = "stored"
    EXISTS = "exists"


class NamedBody(NamedTuple):
    """An entry to put."""

    name: EntryName
    body: Body


PutOutcome: TypeAlias = "PutResult | StoreError"
"""What became of one entry of several; an error is what `Tier.put` would raise."""


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """Requests to a server that failed or were late, and whether it is asked now."""

    num_failures: int
    is_available: bool


@dataclass(slots=True)
class PeerCounts:
    """What other processes have read from a tier, and put into it. Bytes are of bodies."""

    num_read: int = 0
    read_bytes: int = 0
    num_written: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CompressionReport:
    """Bodies that this process has compressed, their bytes before and after; is it on now."""

    raw_bytes: int
    compressed_bytes: int
    is_on: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is, as its users count it, and what this process made go since it opened it.

    `used_bytes` is of all processes; too high for a while after one was killed. Entries that had to
    make room went to the tier below, or were dropped; damaged ones were removed. `num_read_errors`:
    attempts to read an entry that the system refused (EIO); the entry stays. `capacity_bytes`
    is 0 where nothing is known to limit it. `server`: of a tier on a server. `direct_io`: of a
    tier on a disk, whether large bodies are written past the page cache and do not stay in it.
    `copied_by`: of a tier in memory, what copies large bodies into it (`transfer.streaming_copy`).
    `peers`: of a tier that this process shows to others. `compression`: of one that may compress.
    """

    used_bytes: int
    capacity_bytes: int
    num_demoted: int
    num_dropped: int
    num_damaged: int
    num_expired: int = 0
    server: ServerHealth | None = None
    direct_io: bool | None = None
    copied_by: str | None = None
    peers: PeerCounts | None = None
    compression: CompressionReport | None = None
    num_read_errors: int = 0


class EntryLease(Protocol):
    """An entry that stays readable until `release`, whatever becomes of its name."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the body."""
        ...

    @property
    def tenant(self) -> TenantLabel:
        """Whose it is, as its writer stated."""
        ...

    def try_read(self, into: memoryview) -> bool:
        """Copy the body into `num_bytes` writable bytes; whether it is what was put.

        If not (flipped, torn, cut short), the entry is removed and `into` holds anything. Where the
        disk fails, the entry stays, and `into` holds anything.
        """
        ...

    def release(self) -> None:
        """Let go. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Tier(Protocol):
    """A place for entries, of bounded size. One owner thread each; other processes may share it.

    Blocks on I/O. An entry is there whole or not at all, at whatever byte its writer was killed.
    """

    def find(self, names: Sequence[EntryName]) -> int:
        """How many leading names are there: stops at the first miss."""
        ...

    def put(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        """Keep a body; others make room for it, as the tier's eviction policy chooses.

        Where the tier bounds what one tenant may hold, the tenant's own entries make room first.

        Raises:
            StoreFullError: there is no room, and none can be made.
            StoreError: it cannot be written. Nothing is stored then.
        """
        ...

    def try_lease(self, name: EntryName) -> EntryLease | None:
        """Hold an entry for reading, which counts as its last use; None if it is not there."""
        ...

    def discard(self, name: EntryName) -> None:
        """Remove an entry, if it is there. Leases of it stay readable."""
        ...

    def entries(self) -> list[StoredEntry]:
        """What it holds, in any order. Looks at every entry.

        Raises:
            StoreError: it cannot be looked at.
        """
        ...

    def is_whole(self, name: EntryName) -> bool:
        """Whether an entry is there, and is what was put. It stays in any case, and is not used.

        Raises:
            StoreError: it cannot be looked at.
        """
        ...

    def usage(self) -> Usage:
        """How full it is. Cheap, does not wait; from any thread, while it is open.

        Raises:
            StoreError: it cannot be looked at.
        """
        ...

    def close(self) -> None:
        """Close the tier; whether entries stay depends on its kind. Idempotent."""
        ...


@runtime_checkable
class MaintainsEntries(Protocol):
    """A tier whose entries are looked after in the background, by who has time for it."""

    def maintain(self) -> None:
        """Remove what has expired; above the high mark, evict to the low mark (`store.capacity`).

        Raises:
            StoreError: entries cannot be listed or removed.
        """
        ...


@runtime_checkable
class PinsEntries(Protocol):
    """A tier that can be made to keep entries: they are not evicted, and do not expire."""

    def pin(self, name: EntryName) -> bool:
        """Keep an entry, also across restarts; whether it is there.

        Raises:
            StoreFullError: too large a share of the tier is pinned already.
            StoreError: it cannot be pinned.
        """
        ...

    def unpin(self, name: EntryName) -> bool:
        """Let an entry be evicted again; whether it is there.

        Raises:
            StoreError: it cannot be unpinned.
        """
        ...


@runtime_checkable
class EndsWithUsers(Protocol):
    """A tier whose entries go with the last process that has it open."""

    @property
    def was_unused(self) -> bool:
        """Whether no other process had it open when this one opened it."""
        ...


@runtime_checkable
class RemoteLookup(Protocol):
    """A tier where each look is a round trip: it is asked once for many names."""

    def find_each(self, names: Sequence[EntryName]) -> Sequence[bool]:
        """Which names are there; those beyond the first miss may be reported as missing, too."""
        ...


@runtime_checkable
class ServerPlace(Protocol):
    """A tier on one server, as who keeps account of what is there sees it."""

    @property
    def is_billed(self) -> bool:
        """Whether each look costs money."""
        ...

    @property
    def is_read_only(self) -> bool:
        """Whether only the server's own process puts entries there, and keeps account of them."""
        ...

    def is_available(self) -> bool:
        """Whether it is asked now: not after a failure, until it has answered again."""
        ...

    def check_each(self, names: Sequence[EntryName]) -> Sequence[bool] | None:
        """Which names are there. They will not be read next: none is fetched ahead.

        Where each look costs money, those beyond the first miss may be reported as missing, too.
        None: it is not known, because the server is not asked now, or has not answered in time.
        """
        ...


@runtime_checkable
class HasPlaces(Protocol):
    """A tier on several servers, each of which has entries of its own."""

    @property
    def places(self) -> Sequence[Tier]:
        """Each server by itself."""
        ...


@runtime_checkable
class DelaysPromotion(Protocol):
    """A tier whose entries are copied into the first tier at some of their reads only."""

    def count_read(self, name: EntryName) -> bool:
        """An entry was read; whether it is to be copied."""
        ...


@runtime_checkable
class DemotesEntries(Protocol):
    """A tier that copies what makes room for a put into the tier below, before the put returns."""

    def has_room(self, num_bytes: int) -> bool:
        """Whether a body of so many bytes can be put without that. Cheap; may be wrong.

        Raises:
            StoreError: the tier cannot be looked at.
        """
        ...


@runtime_checkable
class LeasesNewest(Protocol):
    """A store with tiers of one process above tiers of many: copies in the upper ones may be old.

    That matters for entries that are replaced under one name, as no KV is.
    """

    def try_lease_newest(self, name: EntryName) -> EntryLease | None:
        """See `Tier.try_lease`: from the lowest tier that has the entry, and not copied up."""
        ...


@runtime_checkable
class PutsMany(Protocol):
    """A tier that puts several entries in less time than one after the other."""

    def put_many(
        self, entries: Sequence[NamedBody], tenant: TenantLabel = NO_TENANT
    ) -> Sequence[PutOutcome]:
        """Keep bodies of one tenant, as `Tier.put` keeps each; what became of each, in order.

        Others may find them in any order, the first when the last is written. One that cannot be
        kept costs no other one.
        """
        ...


class PutsEntries(PutsMany, Protocol):
    """Where a tier puts what it has no room for."""

    def put(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        """See `Tier.put`."""
        ...


@runtime_checkable
class WritesBehind(Protocol):
    """A tier that takes entries from the one above without making it wait."""

    def put_behind(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        """Take an entry; it is written later, or dropped where that fails.

        This process finds it at once, others once it is written.

        Raises:
            StoreFullError: too much waits to be written already.
            StoreError: it cannot be written now.
        """
        ...


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """How this process and others reach each other's tiers.

    `serves`: it answers them, where a tier is configured to listen; a command that only looks at
    the store does not. `tls`: values are encrypted, as all else between workers.
    """

    credentials: Credentials
    tls: Tls | None = None
    serves: bool = False


@dataclass(frozen=True, slots=True)
class TierContext:
    """What every tier is built from, besides its own options.

    `cluster` names the cluster in paths: printable, and no secret once it is used; `other_names`
    are for where another user took that path, and cannot be foreseen. `key`: 32 bytes, a secret of
    the cluster's, without which no entry is believed. Entries that must go are handed to `below`,
    if there is such a tier. `may_create`: a tier that is kept on a disk is made if it is not there.
    `peers`: None where this process reaches no others.
    """

    cluster: str
    key: bytes = field(repr=False)
    clock: Clock
    below: PutsEntries | None = None
    other_names: tuple[str, ...] = ()
    may_create: bool = True
    peers: PeerAccess | None = None


class TierFactory(Protocol):
    """What an entry point of `baton.tiers` builds from its options."""

    def __call__(self, context: TierContext) -> Tier:
        """Open it, and clean up after writers that died.

        Raises:
            ConfigError: such a tier cannot be opened here, with the reason.
        """
        ...


TIERS: Final[Registry[TierFactory]] = Registry("baton.tiers", "store.options")
