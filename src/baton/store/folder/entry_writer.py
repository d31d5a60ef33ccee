"""Keeps new entries in a folder, some at a time: one lock for all of them, and one wait for a disk.

    counted as about to be kept ──► bodies written, and on the disk ──► named, and counted as kept

A process that is killed leaves entries that are complete, and counts that are too high.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.errors import StoreError, StoreFullError
from baton.store.capacity import SLACK_ENTRIES, Shortage
from baton.store.folder.directory import FilesystemFullError, to_store_error
from baton.store.folder.entry_times import to_times_ns
from baton.store.interface import PutResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from baton.store.capacity import StoredEntry
    from baton.store.folder.bodies import FileBodies, NewEntry
    from baton.store.folder.directory import UnnamedFile
    from baton.store.folder.shared_capacity import SharedCapacity
    from baton.store.interface import EntryName, PutOutcome, TenantLabel

WINDOW_BYTES: Final = 64 << 20
"""Written before any of it is named: so much that the wait at its end does not count."""
WINDOW_ENTRIES: Final = 64
"""Files that are open at once."""
_MAX_ROUNDS: Final = 4


@dataclass(frozen=True, slots=True)
class EntryWriter:
    """One owner thread: its tier's.

    `make_room` makes entries go, and `recount` sets the counts right; both raise StoreError.
    `report_full` is called where the filesystem has less room than the tier may take.
    `make_entry` states what eviction must know of a new entry that takes up so many bytes.
    """

    bodies: FileBodies
    capacity: SharedCapacity
    make_room: Callable[[Shortage], None]
    recount: Callable[[], None]
    make_entry: Callable[[EntryName, int], StoredEntry]
    report_full: Callable[[], None]

    def write(self, entries: Sequence[NewEntry], tenant: TenantLabel) -> list[PutOutcome]:
        """Keep entries that were not found; what became of each, in order.

        One that cannot be kept costs no other.
        """
        outcomes: list[PutOutcome] = []
        for window in _divide(entries):
            outcomes += self._write_or_make_room(window, tenant)
        return outcomes

    def _write_or_make_room(
        self, entries: Sequence[NewEntry], tenant: TenantLabel
    ) -> list[PutOutcome]:
        """Write a window; where the filesystem is full, others go first, and it is tried once more.

        Else a tier on a filesystem that is smaller than its capacity would keep its first entries,
        and no later one.
        """
        outcomes = self._write_window(entries, tenant)
        refused = [at for at, each in enumerate(outcomes) if isinstance(each, FilesystemFullError)]
        if not refused:
            return outcomes
        again = [entries[at] for at in refused]
        self.report_full()
        try:
            self.make_room(Shortage(sum(self.bodies.compute_cost(len(e.body)) for e in again)))
        except StoreError:
            return outcomes
        for at, outcome in zip(refused, self._write_window(again, tenant), strict=True):
            outcomes[at] = outcome
        return outcomes

    def _write_window(self, entries: Sequence[NewEntry], tenant: TenantLabel) -> list[PutOutcome]:
        costs = [self.bodies.compute_cost(len(entry.body)) for entry in entries]
        try:
            self._reserve_or_drop_spares(entries, sum(costs), tenant)
        except StoreFullError as exc:
            if len(entries) == 1:
                return [exc]
            half = len(entries) // 2  # some of them may fit
            parts = entries[:half], entries[half:]
            return [each for part in parts for each in self._write_window(part, tenant)]
        except StoreError as exc:
            return [exc for _ in entries]
        try:
            with ExitStack() as stack:
                files = self.bodies.write(entries, tenant, stack)
                links = [
                    (cost, partial(self._try_link, index, self.make_entry(entry.name, cost), file))
                    for index, (entry, cost, file) in enumerate(
                        zip(entries, costs, files, strict=True)
                    )
                ]
                return self.capacity.commit(links, tenant)
        except StoreError as exc:  # none was linked
            self._release(costs)
            return [exc for _ in entries]
        finally:
            self.bodies.settle()

    def _reserve_or_drop_spares(
        self, entries: Sequence[NewEntry], cost: int, tenant: TenantLabel
    ) -> None:
        """See `_reserve`. Where it fails, files that were kept for these entries go."""
        try:
            self._reserve(entries, cost, tenant)
        except StoreError:
            spare_bytes = self.bodies.spare_bytes
            self.bodies.drop_spares()
            self.capacity.release(spare_bytes)
            raise

    def _reserve(self, entries: Sequence[NewEntry], cost: int, tenant: TenantLabel) -> None:
        """Count entries as about to be kept, and take memory for their bodies; make room first.

        Where files of removed entries are written again, no more entries go than make room for
        these: what went for later ones could not be kept for them.

        Raises:
            StoreFullError: they are too large, or others fill what is freed.
            StoreError: the entries cannot be counted.
        """
        self.capacity.check_fits(cost, tenant)
        sizes = [len(entry.body) for entry in entries]
        try_take = partial(self.bodies.try_take, sizes)
        slack_entries = 0 if self.bodies.want_spares(sizes) else SLACK_ENTRIES
        for num_rounds in range(1, _MAX_ROUNDS + 1):
            shortage = self.capacity.try_reserve(
                cost,
                try_take,
                tenant,
                spare_bytes=self.bodies.spare_bytes,
                slack_entries=slack_entries,
            )
            if shortage is None:
                return
            self.make_room(shortage)
            if num_rounds == _MAX_ROUNDS - 1:  # users that were killed may hold memory still
                self.recount()
        raise StoreFullError(f"no room for {cost} bytes: others take what is freed")

    def _try_link(
        self, index: int, entry: StoredEntry, file: UnnamedFile | StoreError, place: int
    ) -> PutOutcome:
        """Give a file its times and its name, under the lock."""
        outcome = file if isinstance(file, StoreError) else _link(file, entry, place)
        if outcome is not PutResult.STORED:
            self._give_back(index)
        return outcome

    def _release(self, costs: Sequence[int]) -> None:
        """Without the lock: that it could not be had may be why nothing is kept."""
        for index in range(len(costs)):
            self._give_back(index)
        self.capacity.release(sum(costs))

    def _give_back(self, index: int) -> None:
        with suppress(StoreError):  # a look at all entries frees it
            self.bodies.give_back(index)


def _link(file: UnnamedFile, entry: StoredEntry, place: int) -> PutOutcome:
    try:
        file.set_times(to_times_ns(entry, place))
        is_new = file.try_link(entry.name.hex())
    except OSError as exc:
        return to_store_error(exc)
    return PutResult.STORED if is_new else PutResult.EXISTS


def _divide(entries: Sequence[NewEntry]) -> Iterator[Sequence[NewEntry]]:
    window: list[NewEntry] = []
    num_bytes = 0
    for entry in entries:
        num_bytes += len(entry.body)
        if window and (num_bytes > WINDOW_BYTES or len(window) == WINDOW_ENTRIES):
            yield window
            window, num_bytes = [], len(entry.body)
        window.append(entry)
    if window:
        yield window
