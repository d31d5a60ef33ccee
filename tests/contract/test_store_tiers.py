"""Both tiers, and the two of them as one store."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from baton.clock import MachineClock
from baton.errors import ConfigError, StoreError, StoreFullError
from baton.handoff.pool_mode.store_access import find_pieces
from baton.store.counted_tier import CountedTier, make_families
from baton.store.entry_format import HEADER_BYTES
from baton.store.folder import directory
from baton.store.folder.bodies import (
    NewEntry,
    PooledBodies,
    compute_cost,
    compute_pooled_cost,
)
from baton.store.folder.body_pool import (
    EXTENT_BYTES,
    MAX_PACKED_BYTES,
    POOL_FILE,
    BodyPool,
    Run,
    count_extents,
)
from baton.store.folder.directory import Folder, UnnamedFile, remove_if_abandoned
from baton.store.folder.entry_writer import WINDOW_ENTRIES
from baton.store.folder.shared_capacity import SharedCapacity
from baton.store.interface import (
    NO_TENANT,
    TIERS,
    NamedBody,
    PutResult,
    PutsMany,
    TenantLabel,
    Tier,
    TierContext,
)
from baton.store.tiered import TieredStore, open_store
from baton.store.tiers.shared import SharedTier, SharedTierOptions
from baton.testing.store_contract import (
    BODY_BYTES,
    CONTRACT_KEY,
    MUCH_ROOM,
    BoundedTierContract,
    StoreContract,
    body_of,
    name_of,
    put,
    read,
    read_lease,
    scan,
)
from baton.testing.store_faults import LARGE_BYTES, FolderFaultContract, flip_bit
from baton.testing.store_syscalls import SystemCallFaultContract, failing
from tests.contract.direct_tier import open_direct_tier
from tests.store_servers import fill_memory, limit_memory

CLOCK = MachineClock()
CONTRACT: Any = {"cluster": "contract", "key": CONTRACT_KEY, "clock": CLOCK}


def count_taken(folder: Path) -> int:
    """Extents of a pool that are marked as taken."""
    return (folder / "extents").read_bytes()[16:].count(1)


class TestSharedTier(FolderFaultContract):
    kind = "shared"

    def options(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {"directory": str(place), "capacity_bytes": capacity_bytes}

    def folder(self, place: Path) -> Path:
        return place / "baton-contract-store"

    def open_tier(self, place: Path, capacity_bytes: int) -> Tier:
        options = self.options(place, capacity_bytes)
        return TIERS.build(self.kind, options)(TierContext("contract", CONTRACT_KEY, CLOCK))

    def own_files(self) -> set[str]:
        return super().own_files() | {"pool", "extents"}

    def check_half_written(self, num_written: int, pid: int, place: Path) -> None:
        assert num_written == LARGE_BYTES // 2
        assert any(path.name.startswith("claim-") for path in self.folder(place).iterdir())
        assert count_taken(self.folder(place)) == count_extents(LARGE_BYTES)

    # `TestPooledBodies` has the same files, and more.
    @pytest.mark.every
    @pytest.mark.parametrize("first", [0, 1])
    def test_a_process_killed_at_any_system_call_leaves_a_right_store(
        self, tmp_path: Path, first: int
    ) -> None:
        super().test_a_process_killed_at_any_system_call_leaves_a_right_store(tmp_path, first)

    @pytest.mark.every
    @pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
    def test_a_system_call_that_fails_costs_caching_only(self, tmp_path: Path, error: int) -> None:
        super().test_a_system_call_that_fails_costs_caching_only(tmp_path, error)

    def test_what_is_being_written_is_not_cleaned_up(self, tmp_path: Path) -> None:
        capacity_bytes = 4 * LARGE_BYTES
        with self.half_written(tmp_path, "named") as writer, self.opened(tmp_path, capacity_bytes):
            folder = Folder(self.folder(tmp_path))
            with closing(folder), closing(BodyPool(folder.fd, capacity_bytes, 1)) as pool:
                pool.rebuild(())
                assert count_taken(folder.path) == count_extents(LARGE_BYTES)
                writer.kill()
                writer.wait(30)
                pool.rebuild(())
                assert count_taken(folder.path) == 0

    def test_the_last_user_takes_the_memory_away(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as one:
            with self.opened(tmp_path):
                put(one, "a")
            assert read(one, "a") == body_of("a")
        assert not self.folder(tmp_path).exists()

    def test_what_dead_clusters_left_goes_and_what_others_use_stays(self, tmp_path: Path) -> None:
        options = SharedTierOptions(directory=str(tmp_path))
        alive = SharedTier(options, TierContext("alive", CONTRACT_KEY, CLOCK))
        dead = tmp_path / "baton-dead-store"
        Folder(dead).close()  # as a killed worker leaves it
        with self.opened(tmp_path):
            assert not dead.exists()
            assert put(alive, "a") is PutResult.STORED
        alive.close()

    def test_a_folder_that_was_made_anew_meanwhile_is_not_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its lock can be had: it is that of the folder that is gone."""
        path, lock = tmp_path / "baton-x-store", fcntl.flock
        last, living = Folder(path), list[Folder]()

        def replace_before_it_is_locked(fd: int, how: int) -> None:
            monkeypatch.setattr(fcntl, "flock", lock)
            assert last.leave()
            last.close_and_remove()
            living.append(Folder(path))
            lock(fd, how)

        monkeypatch.setattr(fcntl, "flock", replace_before_it_is_locked)
        assert not remove_if_abandoned(path)
        assert path.exists()
        living[0].close()
        assert remove_if_abandoned(path)
        assert not path.exists()

    def test_a_folder_whose_removal_was_killed_half_way_is_used_again(self, tmp_path: Path) -> None:
        """Of its two files for large bodies the one is gone."""
        with self.opened(tmp_path, 4 * LARGE_BYTES) as tier:
            assert tier.put(name_of("a"), body_of("a", LARGE_BYTES)) is PutResult.STORED
            left = tmp_path / "left"
            shutil.copytree(self.folder(tmp_path), left)
        (left / POOL_FILE).unlink()
        left.rename(self.folder(tmp_path))
        with self.opened(tmp_path, 4 * LARGE_BYTES) as tier:
            assert tier.put(name_of("b"), body_of("b", LARGE_BYTES)) is PutResult.STORED
            assert tier.is_whole(name_of("b"))
            assert not tier.is_whole(name_of("a"))

    def test_another_worker_removes_a_dead_clusters_folder_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its lock is had after that: there is nothing left to be removed."""
        dead, lock = tmp_path / "baton-dead-store", directory.try_lock_alone
        Folder(dead).close()
        tried: list[Path] = []

        def lock_after_another(fd: int) -> bool:
            path = Path(f"/proc/self/fd/{fd}").readlink()
            if path.parent == dead and not tried:
                tried.append(path)
                assert remove_if_abandoned(dead)
            return lock(fd)

        monkeypatch.setattr(directory, "try_lock_alone", lock_after_another)
        with self.opened(tmp_path) as tier:
            assert tried
            assert put(tier, "a") is PutResult.STORED
        assert list(tmp_path.iterdir()) == []


class PooledTier(SharedTier):
    """The kit's bodies lie in the pool, small as they are."""

    min_pooled_bytes = MAX_PACKED_BYTES


class TestPooledBodies(SystemCallFaultContract):
    """The contract once more, and what only a pool can suffer."""

    entry_bytes = compute_pooled_cost(BODY_BYTES)
    reads_by = "fstat"

    def folder(self, place: Path) -> Path:
        return place / "baton-contract-store"

    def open_tier(self, place: Path, capacity_bytes: int) -> Tier:
        options = SharedTierOptions(directory=str(place), capacity_bytes=capacity_bytes)
        return PooledTier(options, TierContext("contract", CONTRACT_KEY, CLOCK))

    def test_a_flipped_bit_in_the_pool_is_a_miss(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            assert body_of("a") in (self.folder(tmp_path) / "pool").read_bytes()
            flip_bit(self.folder(tmp_path) / "pool", 77, 3)
            assert read(tier, "a") is None
            assert tier.usage().num_damaged == 1
            assert count_taken(self.folder(tmp_path)) == 0
            put(tier, "a")
            assert read(tier, "a") == body_of("a")

    @pytest.mark.parametrize("at", range(0, HEADER_BYTES + 12, 3))
    def test_a_flipped_bit_in_its_file_is_a_miss(self, tmp_path: Path, at: int) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            flip_bit(self.folder(tmp_path) / name_of("a").hex(), at, 1)
            assert read(tier, "a") is None
            put(tier, "a")
            assert read(tier, "a") == body_of("a")

    def test_an_entry_with_the_extents_of_another_is_a_miss(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            put(tier, "b")
            one, other = (self.folder(tmp_path) / name_of(c).hex() for c in "ab")
            packed = other.read_bytes()[HEADER_BYTES:]
            with one.open("r+b") as file:
                file.seek(HEADER_BYTES)
                file.write(packed)
            assert read(tier, "a") is None
            assert tier.usage().num_damaged == 1

    def test_extents_are_free_once_the_last_reader_is_done(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier, self.opened(tmp_path) as other:
            put(tier, "a")
            leases = [tier.try_lease(name_of("a")), other.try_lease(name_of("a"))]
            tier.discard(name_of("a"))
            for lease in leases:
                assert count_taken(self.folder(tmp_path)) == count_extents(BODY_BYTES)
                assert lease is not None
                assert read_lease(lease) == body_of("a")
                lease.release()
            assert count_taken(self.folder(tmp_path)) == 0

    def test_bodies_in_several_runs(self, tmp_path: Path) -> None:
        """Every other entry goes; what follows is larger than each gap."""
        with self.opened(tmp_path, 12 * (EXTENT_BYTES + 4096)) as tier:
            for i in range(12):
                tier.put(name_of(f"entry {i}"), body_of(f"entry {i}", EXTENT_BYTES))
            for i in range(0, 12, 2):
                tier.discard(name_of(f"entry {i}"))
            large = body_of("large", 4 * EXTENT_BYTES - 5)
            assert tier.put(name_of("large"), large) is PutResult.STORED
            lease = tier.try_lease(name_of("large"))
            assert lease is not None
            with lease:
                assert read_lease(lease) == large
            for i in range(1, 12, 2):
                lease = tier.try_lease(name_of(f"entry {i}"))
                assert lease is not None
                with lease:
                    assert read_lease(lease) == body_of(f"entry {i}", EXTENT_BYTES)

    def test_what_was_taken_for_a_body_that_was_not_counted_is_no_other_bodys(
        self, tmp_path: Path
    ) -> None:
        folder = Folder(tmp_path / "kv")
        capacity = SharedCapacity(folder.fd, MUCH_ROOM)
        pool = BodyPool(folder.fd, MUCH_ROOM, MAX_PACKED_BYTES)
        bodies = PooledBodies(folder.fd, CONTRACT_KEY, pool, capacity)
        with closing(folder), closing(capacity), closing(pool), ExitStack() as stack:
            assert bodies.try_take([BODY_BYTES])  # and then the count could not be written
            assert bodies.try_take([100])
            (file,) = bodies.write([NewEntry(name_of("a"), body_of("a", 100))], NO_TENANT, stack)
            assert isinstance(file, UnnamedFile)
            assert file.try_link(name_of("a").hex())
        assert (folder.path / name_of("a").hex()).read_bytes().endswith(body_of("a", 100))

    def test_users_with_another_capacity_find_all(self, tmp_path: Path) -> None:
        with (
            self.opened(tmp_path, 4 * EXTENT_BYTES) as small,
            self.opened(tmp_path, 40 * EXTENT_BYTES) as large,
        ):
            put(small, "first")
            for i in range(20):
                put(large, f"entry {i}")
            assert read(small, "entry 19") == body_of("entry 19")
            assert read(large, "first") == body_of("first")

    def test_a_process_killed_while_it_counts_entries_frees_no_entrys_extents(
        self, tmp_path: Path
    ) -> None:
        def killed() -> Iterator[Run]:
            os.kill(os.getpid(), signal.SIGKILL)
            yield Run(0, 0)

        capacity_bytes = 20 * self.entry_bytes
        with (
            self.opened(tmp_path, capacity_bytes) as tier,
            self.opened(tmp_path, capacity_bytes) as other,
        ):
            for content in "abc":
                put(tier, content)
            counting = tier._bodies._pool.rebuild
            child = multiprocessing.get_context("fork").Process(target=counting, args=(killed(),))
            child.start()
            child.join(60)
            assert child.exitcode == -signal.SIGKILL
            for i in range(10):
                put(other, f"entry {i}")
            assert [read(tier, content) for content in "abc"] == [body_of(c) for c in "abc"]

    def test_what_a_killed_writer_had_taken_is_used_again(self, tmp_path: Path) -> None:
        """While others live: nobody has to leave for it."""
        shared = TestSharedTier()
        with shared.opened(tmp_path, 4 * LARGE_BYTES) as tier:
            with shared.half_written(tmp_path, "unnamed") as writer:
                writer.kill()
                assert writer.wait(30) < 0
            assert count_taken(shared.folder(tmp_path)) == count_extents(LARGE_BYTES)
            for i in range(12):
                tier.put(name_of(f"entry {i}"), body_of(f"entry {i}", LARGE_BYTES))
            tier.put(name_of("b"), body_of("b", 3 * LARGE_BYTES - EXTENT_BYTES))
            assert tier.is_whole(name_of("b"))


class TestFileTier(FolderFaultContract):
    """Past the page cache; `TestSharedTier` has files of the page cache."""

    kind = "file"
    writes_by = "rename"

    def options(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {"directory": str(place / "files"), "capacity_bytes": capacity_bytes}

    def folder(self, place: Path) -> Path:
        return place / "files"

    def open_tier(self, place: Path, capacity_bytes: int) -> Tier:
        tier = open_direct_tier(place, capacity_bytes)
        assert tier.usage().direct_io, "set TMPDIR to a filesystem that has O_DIRECT"
        return tier

    def check_half_written(self, num_written: int, pid: int, place: Path) -> None:
        """Its body goes past the page cache, and has all of its room from the start."""
        (path,) = (
            path
            for path in Path(f"/proc/{pid}/fd").iterdir()
            if path.stat().st_size > LARGE_BYTES and str(self.folder(place)) in str(path.readlink())
        )
        written = path.read_bytes()
        body = body_of("a", LARGE_BYTES)
        assert num_written == LARGE_BYTES // 2
        at = num_written - 1
        assert written[at] == body[at - HEADER_BYTES]
        assert not any(written[-LARGE_BYTES // 4 :])

    def test_what_is_kept_outlives_its_users(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
        with self.opened(tmp_path) as tier:
            assert read(tier, "a") == body_of("a")


class TestHostTier(BoundedTierContract):
    def open_tier(self, place: Path, capacity_bytes: int) -> Tier:
        del place  # this process's own memory
        options = {"capacity_bytes": capacity_bytes}
        return TIERS.build("host", options)(TierContext("contract", CONTRACT_KEY, CLOCK))

    def test_its_level_is_what_its_entries_take_up(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, 10 * BODY_BYTES) as tier:
            for i in range(40):
                put(tier, f"entry {i}")
            found, usage = scan(tier), tier.usage()
            assert usage.used_bytes == found.used_bytes == 10 * BODY_BYTES
            assert (usage.num_dropped, usage.num_demoted, usage.num_damaged) == (30, 0, 0)
            tier.discard(name_of("entry 39"))
            assert tier.usage().used_bytes == 9 * BODY_BYTES

    def test_a_process_without_memory_is_full_and_its_entries_are_read(self) -> None:
        child = multiprocessing.get_context("fork").Process(target=use_without_memory)
        child.start()
        child.join(60)
        assert child.exitcode == 0

    def test_what_is_put_is_below_at_once(self, tmp_path: Path) -> None:
        """A worker's own memory is above what others share: they find what it has computed."""
        options = {
            "host": {"capacity_bytes": 3 * BODY_BYTES},
            "file": {"directory": str(tmp_path / "files")},
        }
        with (
            closing(open_store(("host", "file"), options, **CONTRACT)) as store,
            closing(open_store(("file",), options, **CONTRACT)) as other,
        ):
            for i in range(6):
                put(store, f"entry {i}")
                assert read(other, f"entry {i}") == body_of(f"entry {i}")
            assert store.find([name_of(f"entry {i}") for i in range(6)]) == 6
            assert read(store, "entry 0") == body_of("entry 0")
            assert store.tiers[0].find([name_of("entry 0")]) == 1, "it was copied up"


def use_without_memory() -> None:
    """Far below the capacity. This process keeps the limit."""
    body, into = memoryview(bytes(LARGE_BYTES)), bytearray(LARGE_BYTES)
    factory = TIERS.build("host", {"capacity_bytes": 1 << 40})
    limit_memory(os.getpid(), 8 * LARGE_BYTES)
    with closing(factory(TierContext(**CONTRACT))) as tier:
        stored = fill_memory(tier, body)
        assert tier.find(stored) == len(stored) >= 4
        assert tier.usage().used_bytes == len(stored) * LARGE_BYTES
        for name in stored:
            lease = tier.try_lease(name)
            assert lease is not None
            assert lease.try_read(memoryview(into))
        tier.discard(stored[0])
        assert tier.put(name_of("another"), body) is PutResult.STORED


def read_without_memory(place: Path) -> None:
    """An entry of the lower tier is in the pool. This process keeps the limit."""
    num_bytes = 40 << 20  # the C library keeps no memory as large for later
    options = {"shared": {"directory": str(place), "capacity_bytes": 2 * num_bytes}}
    with closing(open_store(("host", "shared"), options, **CONTRACT)) as store:
        lower, body, into = store.tiers[1], bytes(num_bytes), bytearray(num_bytes)
        lower.put(name_of("a"), body)
        assert read(lower, "a") == body  # maps the pool
        limit_memory(os.getpid(), num_bytes // 2)
        lease = store.try_lease(name_of("a"))
        assert lease is not None
        with lease:
            assert lease.try_read(memoryview(into))
        assert into == body
        store.discard(name_of("a"))
        assert count_taken(place / "baton-contract-store") == 0, "nobody reads it any more"


class TestTiers(StoreContract):
    def test_without_memory_for_a_copy_an_entry_is_read_where_it_is(self, tmp_path: Path) -> None:
        arguments = {"target": read_without_memory, "args": (tmp_path,)}
        child = multiprocessing.get_context("fork").Process(**arguments)
        child.start()
        child.join(60)
        assert child.exitcode == 0

    def open_tier(self, place: Path, capacity_bytes: int) -> Tier:
        half = capacity_bytes // 2
        options = {
            "shared": {"directory": str(place), "capacity_bytes": half},
            "file": {"directory": str(place / "files"), "capacity_bytes": half},
        }
        return open_store(("shared", "file"), options, **CONTRACT)

    def test_the_last_users_entries_go_to_the_tier_below(self, tmp_path: Path) -> None:
        options = {
            "shared": {"directory": str(tmp_path)},
            "file": {"directory": str(tmp_path / "files")},
        }
        kinds, tenant = ("shared", "file"), TenantLabel(b"a tenant")
        with closing(open_store(kinds, options, **CONTRACT)) as one:
            with closing(open_store(kinds, options, **CONTRACT)):
                one.put(name_of("a"), body_of("a"), tenant)
                one.put(name_of("large"), body_of("large", LARGE_BYTES))
            assert one.tiers[1].entries() == [], "another user is left"
        with closing(open_store(kinds, options, **CONTRACT)) as again:
            upper, lower = again.tiers
            assert upper.entries() == []
            assert {e.name: e.tenant for e in lower.entries()} == {
                name_of("a"): tenant,
                name_of("large"): NO_TENANT,
            }
            assert read(again, "a") == body_of("a")

    def test_entries_are_demoted_and_copied_up(self, tmp_path: Path) -> None:
        in_files = TestFileTier()
        options = {
            "shared": {"directory": str(tmp_path), "capacity_bytes": 100_000},
            "file": {"directory": str(tmp_path / "files")},
        }
        with closing(open_store(("shared", "file"), options, **CONTRACT)) as store:
            for i in range(12):  # 8 fit above
                put(store, f"entry {i}")
            below = in_files.entry(tmp_path, "entry 0")
            above = tmp_path / "baton-contract-store" / below.name
            assert below.exists()
            assert not above.exists()
            assert read(store, "entry 0") == body_of("entry 0")
            store.promote_waiting()
            assert above.exists()
            assert [read(store, f"entry {i}") for i in range(12)] == [
                body_of(f"entry {i}") for i in range(12)
            ]

    def test_a_read_is_one_use_and_a_look_none(self, tmp_path: Path) -> None:
        options = {
            "shared": {"directory": str(tmp_path)},
            "file": {"directory": str(tmp_path / "files")},
        }
        with closing(open_store(("shared", "file"), options, **CONTRACT)) as store:
            put(store.tiers[1], "a")
            assert store.find([name_of("a")]) == 1
            assert store.find_runs([name_of("a")]) == [("file", 1)]
            assert read(store, "a") == body_of("a")
            uses = [[entry.num_uses for entry in tier.entries()] for tier in store.tiers]
            assert uses == [[0], [1]], "the copy was not used yet"

    def test_a_read_does_not_wait_for_entries_that_make_room_for_its_copy(
        self, tmp_path: Path
    ) -> None:
        options = {
            "shared": {"directory": str(tmp_path), "capacity_bytes": 100_000},
            "file": {"directory": str(tmp_path / "files")},
        }
        with closing(open_store(("shared", "file"), options, **CONTRACT)) as store:
            for i in range(12):  # 8 fit above
                put(store, f"entry {i}")
            upper, lower = store.tiers
            num_below = lower.report().counts.num_stored
            for content in ("entry 0", "entry 1"):
                assert read(store, content) == body_of(content)
            assert lower.report().counts.num_stored == num_below
            assert upper.find([name_of("entry 0")]) == 0
            store.discard(name_of("entry 1"))
            assert not store.promote_waiting()
            assert upper.find([name_of("entry 0")]) == 1
            assert store.find([name_of("entry 1")]) == 0, "it was discarded while it waited"
            assert lower.report().counts.num_stored > num_below
            assert not store.promote_waiting()

    def test_entries_are_found_by_the_tier_that_they_are_read_from(self, tmp_path: Path) -> None:
        tiers = [
            CountedTier(
                kind,
                TIERS.build(kind, options)(TierContext("contract", CONTRACT_KEY, CLOCK)),
            )
            for kind, options in (("host", {}), ("file", {"directory": str(tmp_path / "files")}))
        ]
        host, file = tiers
        for tier, names in ((file, "abcefgh"), (host, "bdgh")):
            for name in names:
                put(tier, name)
        names = [name_of(name) for name in "abcdefghi"]
        with closing(TieredStore(tiers)) as store:
            assert store.find_runs(names) == [("file", 3), ("host", 1), ("file", 2), ("host", 2)]
            assert store.find_runs(names[1:]) == [("host", 1), *store.find_runs(names[2:])]
            assert store.find(names) == 8
            assert store.find_runs(names[-1:]) == []
            # Two entries are a piece, which lies where the second of them does.
            assert find_pieces(store, names, 2) == [
                ("file", 1),
                ("host", 1),
                ("file", 1),
                ("host", 1),
            ]
            assert find_pieces(store, names[:3], 2) == [("file", 1)]

    def test_an_entry_that_one_disk_does_not_read_comes_from_another(self, tmp_path: Path) -> None:
        def fail() -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        context = TierContext("contract", CONTRACT_KEY, CLOCK)
        places = [tmp_path / name for name in ("above", "first", "second")]
        places[0].mkdir()
        tiers = [
            CountedTier(kind, TIERS.build(kind, {"directory": str(place)})(context))
            for kind, place in zip(("shared", "file", "file"), places, strict=True)
        ]
        with closing(TieredStore(tiers)) as store:
            for tier in tiers[1:]:
                put(tier, "a")
            with failing(0, fail, ("preadv",)) as calls:
                assert read(store, "a") == body_of("a")
            assert calls.has_failed
            assert [tier.usage().num_read_errors for tier in tiers] == [0, 1, 0]
            assert tiers[0].find([name_of("a")]) == 1, "it was copied up"
            assert tiers[1].is_whole(name_of("a")), "it stays"

    def test_a_full_first_tier_is_passed_over(self, tmp_path: Path) -> None:
        options = {
            "shared": {"directory": str(tmp_path), "capacity_bytes": 4096},
            "file": {"directory": str(tmp_path / "files")},
        }
        store = open_store(("shared", "file"), options, **CONTRACT)
        put(store, "a")
        assert read(store, "a") == body_of("a")
        store.close()


def counted(store: TieredStore) -> dict[tuple[str, ...], float]:
    """All samples that are not 0, by name and label values."""
    return {
        (sample.name.removeprefix("baton_store_"), *sample.labels.values()): sample.value
        for family in make_families(store.reports())
        for sample in family.samples
        if sample.value
    }


def test_what_is_asked_of_each_tier_is_counted(tmp_path: Path) -> None:
    options = {
        "shared": {"directory": str(tmp_path), "capacity_bytes": 30_000},  # two entries
        "file": {"directory": str(tmp_path / "files"), "capacity_bytes": 1_000_000},
    }
    store = open_store(("shared", "file"), options, **CONTRACT)
    capacities = {("capacity_bytes", "shared"): 30_000, ("capacity_bytes", "file"): 1_000_000}
    assert counted(store) == capacities
    for content in "aab":
        put(store, content)
    assert read(store, "missing") is None
    assert counted(store) == capacities | {
        ("puts_total", "shared", "stored"): 2,
        ("puts_total", "shared", "exists"): 1,
        ("bytes_total", "shared", "written"): 2 * BODY_BYTES,
        ("leases_total", "shared", "miss"): 1,
        ("leases_total", "file", "miss"): 1,
        ("used_bytes", "shared"): scan(store).used_bytes,
    }
    put(store, "c")  # one goes down
    assert read(store, "a") == body_of("a")
    store.promote_waiting()  # and comes up, for which another goes down
    store.put(name_of("large"), body_of("large", 40_000))
    with pytest.raises(StoreFullError):
        store.put(name_of("too large"), body_of("too large", 2_000_000))
    found = counted(store)
    store.close()
    after = counted(store)
    assert after.pop(("puts_total", "file", "exists")) == 1, "the last user copies its entries"
    for name in (
        ("puts_total", "file", "stored"),
        ("bytes_total", "file", "written"),
        ("used_bytes", "file"),
    ):
        assert after.pop(name) > found[name]
    assert after.items() <= found.items(), "after the end, as it was then"
    num_down = found["evictions_total", "shared", "demoted"]
    assert num_down == 2
    assert found["puts_total", "shared", "full"] == 2
    assert found["puts_total", "file", "full"] == 1
    assert found["puts_total", "file", "stored"] == 1 + num_down
    assert ("evictions_total", "shared", "dropped") not in found
    assert found["leases_total", "shared", "miss"] == 2
    assert ("leases_total", "shared", "hit") not in found
    assert found["leases_total", "file", "hit"] == 1
    assert found["bytes_total", "file", "read"] == BODY_BYTES


def test_a_damaged_entry_is_counted_and_so_is_one_that_is_not_read(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    files = TestFileTier()
    options = {"file": files.options(tmp_path, 1_000_000)}
    with closing(open_store(("file",), options, **CONTRACT)) as store:
        for content in "ab":
            put(store, content)
        with failing(0, fail, ("preadv",)):
            assert read(store, "b") is None
        assert counted(store)["read_errors_total", "file"] == 1
        path = files.entry(tmp_path, "a")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert read(store, "a") is None
        found = counted(store)
        assert found["damaged_total", "file"] == 1
        assert found["used_bytes", "file"] == scan(store).used_bytes == compute_cost(BODY_BYTES)


@pytest.fixture(name="tiny_disk")
def tiny_disk_fixture(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "baton-test", str(where)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"cannot mount a tmpfs: {exc}")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True, capture_output=True)


@pytest.mark.parametrize("num_bytes", [100_000, 300_000])
@pytest.mark.parametrize("kind", ["shared", "file"])
def test_on_a_disk_smaller_than_its_capacity_the_oldest_entries_go(
    tiny_disk: Path, caplog: pytest.LogCaptureFixture, kind: str, num_bytes: int
) -> None:
    options = {"directory": str(tiny_disk / kind), "capacity_bytes": 1 << 30}
    (tiny_disk / kind).mkdir(mode=0o700)
    with closing(TIERS.build(kind, options)(TierContext(**CONTRACT))) as tier:
        for i in range(20):
            body = body_of(f"entry {i}", num_bytes)
            assert tier.put(name_of(f"entry {i}"), body) is PutResult.STORED
        left = [i for i in range(20) if read(tier, f"entry {i}") is not None]
        assert left == list(range(20 - len(left), 20))
        assert read(tier, "entry 19") == body
        assert scan(tier).num_damaged == 0
        assert tier.usage().used_bytes == scan(tier).used_bytes
    lines = [each.getMessage() for each in caplog.records if each.name.startswith("baton.store")]
    (line,) = [each for each in lines if "is full" in each]
    assert str(tiny_disk / kind) in line


def test_a_full_disk_costs_caching_only(tiny_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Others fill it: there is no entry that could make room."""
    (tiny_disk / "other").write_bytes(bytes(700_000))
    with TestSharedTier().opened(tiny_disk, 1 << 30) as tier:
        put(tier, "a")
        for _ in range(3):
            with pytest.raises(StoreFullError):
                tier.put(name_of("too much"), body_of("too much", 300_000))
        (line,) = [each.getMessage() for each in caplog.records if "not kept" in each.getMessage()]
        assert str(tiny_disk) in line
        assert "no room" in line
        assert put(tier, "b") is PutResult.STORED
        assert read(tier, "b") == body_of("b")
        (tiny_disk / "other").unlink()
        assert tier.put(name_of("c"), body_of("c", 300_000)) is PutResult.STORED


def test_a_full_memory_filesystem_kills_no_process(tiny_disk: Path) -> None:
    """Who touches memory that it has no room for gets SIGBUS."""

    def put_when_full() -> None:
        with TestSharedTier().opened(tiny_disk, 1 << 30) as tier:
            with (tiny_disk / "other").open("wb", buffering=0) as other, suppress(OSError):
                while True:
                    other.write(bytes(4096))
            for _ in range(2):
                with pytest.raises(StoreError):
                    tier.put(name_of("a"), body_of("a", 300_000))
            (tiny_disk / "other").unlink()
            tier.put(name_of("a"), body_of("a", 300_000))
            assert tier.is_whole(name_of("a"))

    child = multiprocessing.get_context("fork").Process(target=put_when_full)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_shared_leaves_room_to_others_of_its_filesystem(tiny_disk: Path) -> None:
    """Whose files have no memory yet: without it they would be killed when they touch them."""
    with TestSharedTier().opened(tiny_disk, 1 << 30) as tier:
        for i in range(20):
            assert tier.put(name_of(f"entry {i}"), body_of(f"entry {i}", 270_000))
        found = os.statvfs(tiny_disk)
        assert found.f_bavail >= found.f_blocks // 8
        assert scan(tier).num_entries > 1


def test_a_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "files"
    place.mkdir(mode=0o755)
    place.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Folder(place)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError):
        Folder(tmp_path / "link")
    assert not remove_if_abandoned(tmp_path / "link")


def test_of_tiers_that_cannot_all_be_opened_none_stays_open(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("no folder")
    options = {"shared": {"directory": str(blocked)}, "file": {"directory": str(tmp_path / "f")}}
    with pytest.raises(ConfigError):
        open_store(("shared", "file"), options, **CONTRACT)
    assert Folder(tmp_path / "f").was_unused


@pytest.mark.parametrize("kind", ["shared", "file"])
def test_entries_that_are_put_together_are_as_others_and_take_fewer_system_calls(
    kind: str, tmp_path: Path
) -> None:
    tenant, contents = (
        TenantLabel(b"a tenant"),
        [f"together {i}" for i in range(WINDOW_ENTRIES + 8)],
    )
    options = {"directory": str(tmp_path / kind), "capacity_bytes": MUCH_ROOM}
    (tmp_path / kind).mkdir(mode=0o700)
    with closing(TIERS.build(kind, options)(TierContext(**CONTRACT))) as tier:
        assert isinstance(tier, PutsMany)
        tier.put(name_of(contents[3]), body_of("first"), tenant)
        with failing(None, lambda: None) as calls:
            done = tier.put_many(
                [NamedBody(name_of(each), body_of(each)) for each in contents], tenant
            )
        num_together = calls.num_calls
        assert [at for at, each in enumerate(done) if each is PutResult.EXISTS] == [3]
        assert read(tier, contents[3]) == body_of("first")
        assert all(read(tier, each) == body_of(each) for each in contents if each != contents[3])
        assert scan(tier).num_entries == len(contents)
        assert tier.usage().used_bytes == scan(tier).used_bytes
        assert {entry.tenant for entry in tier.entries()} == {tenant}
        with failing(None, lambda: None) as calls:
            for each in contents:
                tier.put(name_of(f"alone {each}"), body_of(each), tenant)
        assert 2 * num_together < calls.num_calls


def test_what_is_put_together_goes_to_the_next_tier_where_there_is_no_room(tmp_path: Path) -> None:
    options = {
        "shared": {"directory": str(tmp_path), "capacity_bytes": BODY_BYTES},
        "file": {"directory": str(tmp_path / "files"), "capacity_bytes": MUCH_ROOM},
    }
    with closing(open_store(tuple(options), options, **CONTRACT)) as store:
        store.tiers[1].put(name_of("there"), body_of("there"))
        contents = ["there", "new", "another"]
        store.put_many([NamedBody(name_of(each), body_of(each)) for each in contents])
        reports = store.reports()
        assert [report.counts.num_stored for report in reports] == [0, 3]
        assert reports[1].counts.num_existing == 0, "what a lower tier has is not put"
        assert all(read(store, each) == body_of(each) for each in contents)
