"""The store of a simulated cluster: entries in memory, kept as production keeps them in files.

Records, their digests, the room and who must go are the production code's (`store.record`,
`store.room`); the folder is not. It outlives every worker, and an entry is there whole or not at
all; afterwards it may rot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, assert_never

from baton.errors import StoreError, StoreFullError
from baton.store import record
from baton.store.interface import Level, Put, Usage
from baton.store.room import Held, Room, choose_victims

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.sim.handoff.plan import StorePlan
    from baton.sim.handoff.timeline import Timeline
    from baton.store.interface import Body, EntryName

RotHow: TypeAlias = Literal["refuse", "lose", "flip", "cut", "swap"]
"""What befalls an entry: it is not kept, or goes, or its bytes change, are cut, or another's."""


@dataclass(slots=True)
class _Entry:
    data: bytearray
    used_s: float


class SimShelf:
    """Implements `store.interface.Tier` for all workers of a run.

    `met` counts what befell entries; `lost` names those that are not what was put, or nowhere.
    """

    def __init__(self, plan: StorePlan, timeline: Timeline) -> None:
        self.rots: list[RotHow] = []
        self.met: Counter[str] = Counter()
        self.lost: set[EntryName] = set()
        self._capacity_bytes = plan.capacity_bytes
        self._timeline = timeline
        self._entries: dict[EntryName, _Entry] = {}

    def find(self, names: Sequence[EntryName]) -> int:
        """See `Tier`."""
        missing = (n for n, name in enumerate(names) if name not in self._entries)
        return next(missing, len(names))

    def put(self, name: EntryName, body: Body) -> Put:
        """See `Tier`."""
        if name in self._entries:
            self._entries[name].used_s = self._timeline.now_s
            return Put.ALREADY
        data = bytearray(record.make_header(name, body)) + bytes(body)
        how = self.rots.pop() if self.rots else None
        if how == "refuse":
            self.met["rot: refuse"] += 1
            self.lost.add(name)
            raise StoreError("no space left on the device")
        self._make_room(len(data))
        self._entries[name] = _Entry(data, self._timeline.now_s)
        if how is not None:
            self._rot(name, how)
        return Put.STORED

    def try_lease(self, name: EntryName) -> SimLease | None:
        """See `Tier`."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        header = bytes(entry.data[: record.HEADER_BYTES])
        digest = record.read_digest(name, header, len(entry.data))
        if digest is None:
            self._damaged(name)
            return None
        entry.used_s = self._timeline.now_s
        body = bytes(entry.data[record.HEADER_BYTES :])
        return SimLease(body, digest, lambda: self._damaged(name))

    def discard(self, name: EntryName) -> None:
        """See `Tier`."""
        self._entries.pop(name, None)

    def usage(self) -> Usage:
        """See `Tier`."""
        used = self._used_bytes()
        return Usage(len(self._entries), used, self._capacity_bytes, self.met["damaged"])

    def level(self) -> Level:
        """See `Tier`."""
        return Level(
            self._used_bytes(),
            self._capacity_bytes,
            num_handed_down=0,
            num_dropped=self.met["evicted"],
            num_damaged=self.met["damaged"],
        )

    def close(self) -> None:
        """See `Tier`: it outlives its users."""

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > self._capacity_bytes:
            raise StoreFullError("an entry larger than the store")
        shortage = Room(self._capacity_bytes, self._used_bytes()).shortage(num_bytes)
        if shortage:
            held = [Held(n, len(e.data), e.used_s) for n, e in self._entries.items()]
            for victim in choose_victims(held, shortage):
                self.met["evicted"] += 1
                self.lost.add(victim.name)
                del self._entries[victim.name]

    def _used_bytes(self) -> int:
        return sum(len(entry.data) for entry in self._entries.values())

    def _rot(self, name: EntryName, how: Literal["lose", "flip", "cut", "swap"]) -> None:
        data = self._entries[name].data
        self.met[f"rot: {how}"] += 1
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
                    data[record.HEADER_BYTES :] = fits[-1][record.HEADER_BYTES :]
            case _:
                assert_never(how)

    def _damaged(self, name: EntryName) -> None:
        self.met["damaged"] += 1
        self.discard(name)


class SimLease:
    """Implements `store.interface.Lease`."""

    def __init__(self, body: bytes, digest: bytes, on_damage: Callable[[], None]) -> None:
        self._body, self._digest, self._on_damage = body, digest, on_damage

    @property
    def num_bytes(self) -> int:
        """See `Lease`."""
        return len(self._body)

    def try_read(self, into: memoryview) -> bool:
        """See `Lease`."""
        into[:] = self._body
        if record.has_digest(into, self._digest):
            return True
        self._on_damage()
        return False

    def release(self) -> None:
        """See `Lease`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
