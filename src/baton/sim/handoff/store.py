"""The store of a simulated cluster: entries in memory, kept as production keeps them in files.

Records, their digests, the room and who must go are the production code's (`store.entry_format`,
`store.room`); the folder is not. It outlives every worker, and an entry is there whole or not at
all; afterwards it may rot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Self, TypeAlias, assert_never

from baton.errors import StoreError, StoreFullError
from baton.store import entry_format
from baton.store.capacity import Capacity, StoredEntry, choose_victims
from baton.store.interface import NO_TENANT, PutResult, Usage
from baton.store.puts import put_each

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.sim.handoff.plan import StorePlan
    from baton.sim.handoff.timeline import Timeline
    from baton.store.entry_format import EntryHeader
    from baton.store.interface import Body, EntryName, NamedBody, PutOutcome, TenantLabel

EntryFaultKind: TypeAlias = Literal["refuse", "lose", "flip", "cut", "swap"]
"""What befalls an entry: it is not kept, or goes, or its bytes change, are cut, or another's."""

KEY: Final = bytes(32)


@dataclass(slots=True)
class _Entry:
    data: bytearray
    used_s: float


class SimStore:
    """Implements `store.interface.Tier` for all workers of a run.

    `injected` counts what befell entries; `lost` names those that are not what was put, or nowhere.
    """

    def __init__(self, plan: StorePlan, timeline: Timeline) -> None:
        self.entry_faults: list[EntryFaultKind] = []
        self.injected: Counter[str] = Counter()
        self.lost: set[EntryName] = set()
        self._capacity_bytes = plan.capacity_bytes
        self._timeline = timeline
        self._entries: dict[EntryName, _Entry] = {}

    def find(self, names: Sequence[EntryName]) -> int:
        """See `Tier`."""
        missing = (n for n, name in enumerate(names) if name not in self._entries)
        return next(missing, len(names))

    def put(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        """See `Tier`."""
        if name in self._entries:
            self._entries[name].used_s = self._timeline.now_s
            return PutResult.EXISTS
        header = entry_format.make_header(KEY, name, body, tenant=tenant)
        data = bytearray(header) + bytes(body)
        how = self.entry_faults.pop() if self.entry_faults else None
        if how == "refuse":
            self.injected["entry: refuse"] += 1
            self.lost.add(name)
            raise StoreError("no space left on the device")
        self._evict(len(data))
        self._entries[name] = _Entry(data, self._timeline.now_s)
        if how is not None:
            self._corrupt(name, how)
        return PutResult.STORED

    def put_many(
        self, entries: Sequence[NamedBody], tenant: TenantLabel = NO_TENANT
    ) -> Sequence[PutOutcome]:
        """See `PutsMany`."""
        return put_each(self.put, entries, tenant)

    def try_lease(self, name: EntryName) -> SimEntryLease | None:
        """See `Tier`."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        raw = bytes(entry.data[: entry_format.HEADER_BYTES])
        header = entry_format.read_header(name, raw, len(entry.data))
        if header is None:
            self._remove_damaged(name)
            return None
        entry.used_s = self._timeline.now_s
        body = bytes(entry.data[entry_format.HEADER_BYTES :])
        return SimEntryLease(header, body, lambda: self._remove_damaged(name))

    def discard(self, name: EntryName) -> None:
        """See `Tier`."""
        self._entries.pop(name, None)

    def entries(self) -> list[StoredEntry]:
        """See `Tier`."""
        return [StoredEntry(n, len(e.data), e.used_s) for n, e in self._entries.items()]

    def is_whole(self, name: EntryName) -> bool:
        """See `Tier`."""
        return name in self._entries and name not in self.lost

    def usage(self) -> Usage:
        """See `Tier`."""
        return Usage(
            self._used_bytes(),
            self._capacity_bytes,
            num_demoted=0,
            num_dropped=self.injected["evicted"],
            num_damaged=self.injected["damaged"],
        )

    def close(self) -> None:
        """See `Tier`: it outlives its users."""

    def _evict(self, num_bytes: int) -> None:
        if num_bytes > self._capacity_bytes:
            raise StoreFullError("an entry larger than the store")
        shortage = Capacity(self._capacity_bytes, self._used_bytes()).shortage(num_bytes)
        if shortage:
            entries = [StoredEntry(n, len(e.data), e.used_s) for n, e in self._entries.items()]
            for victim in choose_victims(entries, shortage):
                self.injected["evicted"] += 1
                self.lost.add(victim.name)
                del self._entries[victim.name]

    def _used_bytes(self) -> int:
        return sum(len(entry.data) for entry in self._entries.values())

    def _corrupt(self, name: EntryName, how: Literal["lose", "flip", "cut", "swap"]) -> None:
        data = self._entries[name].data
        self.injected[f"entry: {how}"] += 1
        self.lost.add(name)
        match how:
            case "lose":
                del self._entries[name]
            case "flip":
                data[-1] ^= 1
            case "cut":
                del data[len(data) // 2 :]
            case "swap":
                others = [e.data for n, e in self._entries.items() if n != name]
                fits = [each for each in others if len(each) == len(data)]
                if fits:  # its own header, and somebody else's body
                    data[entry_format.HEADER_BYTES :] = fits[-1][entry_format.HEADER_BYTES :]
            case _:
                assert_never(how)

    def _remove_damaged(self, name: EntryName) -> None:
        self.injected["damaged"] += 1
        self.discard(name)


class SimEntryLease:
    """Implements `store.interface.EntryLease`."""

    def __init__(self, header: EntryHeader, body: bytes, on_damage: Callable[[], None]) -> None:
        self._header, self._body, self._on_damage = header, body, on_damage
        self.tenant = header.tenant

    @property
    def num_bytes(self) -> int:
        """See `EntryLease`."""
        return len(self._body)

    def try_read(self, into: memoryview) -> bool:
        """See `EntryLease`."""
        into[:] = self._body
        if entry_format.has_digest(KEY, self._header, into):
            return True
        self._on_damage()
        return False

    def release(self) -> None:
        """See `EntryLease`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
