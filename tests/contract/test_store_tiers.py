"""Both tiers, and the two of them as one store."""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from baton.clock import MachineClock
from baton.errors import ConfigError, StoreFullError
from baton.store.counted_tier import make_families
from baton.store.folder.directory import Folder, remove_if_abandoned
from baton.store.interface import TIERS, PutResult, Tier, TierContext
from baton.store.tiered import TieredStore, open_store
from baton.store.tiers.shared import SharedTier, SharedTierOptions
from baton.testing.store_contract import (
    BODY_BYTES,
    CONTRACT_KEY,
    BoundedTierContract,
    StoreContract,
    body_of,
    name_of,
    put,
    read,
    scan,
)
from baton.testing.store_faults import FolderFaultContract

CLOCK = MachineClock()
CONTRACT: Any = {"cluster": "contract", "key": CONTRACT_KEY, "clock": CLOCK}


class TestSharedTier(FolderFaultContract):
    kind = "shared"

    def options(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {"directory": str(place), "capacity_bytes": capacity_bytes}

    def folder(self, place: Path) -> Path:
        return place / "baton-contract-store"

    def open_tier(self, place: Path, capacity_bytes: int) -> Tier:
        options = self.options(place, capacity_bytes)
        return TIERS.build(self.kind, options)(TierContext("contract", CONTRACT_KEY, CLOCK))

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


class TestFileTier(FolderFaultContract):
    kind = "file"

    def options(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {"directory": str(place / "files"), "capacity_bytes": capacity_bytes}

    def folder(self, place: Path) -> Path:
        return place / "files"

    def open_tier(self, place: Path, capacity_bytes: int) -> Tier:
        options = self.options(place, capacity_bytes)
        return TIERS.build(self.kind, options)(TierContext("contract", CONTRACT_KEY, CLOCK))

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


class TestTiers(StoreContract):
    def open_tier(self, place: Path, capacity_bytes: int) -> Tier:
        half = capacity_bytes // 2
        options = {
            "shared": {"directory": str(place), "capacity_bytes": half},
            "file": {"directory": str(place / "files"), "capacity_bytes": half},
        }
        return open_store(("shared", "file"), options, **CONTRACT)

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
            assert above.exists()
            assert [read(store, f"entry {i}") for i in range(12)] == [
                body_of(f"entry {i}") for i in range(12)
            ]

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
    assert read(store, "a") == body_of("a")  # and comes up, for which another goes down
    store.put(name_of("large"), body_of("large", 40_000))
    with pytest.raises(StoreFullError):
        store.put(name_of("too large"), body_of("too large", 2_000_000))
    found = counted(store)
    store.close()
    assert counted(store) == found, "after the end, as it was then"
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


def test_a_damaged_entry_is_counted(tmp_path: Path) -> None:
    files = TestFileTier()
    options = {"file": files.options(tmp_path, 1_000_000)}
    with closing(open_store(("file",), options, **CONTRACT)) as store:
        put(store, "a")
        path = files.entry(tmp_path, "a")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert read(store, "a") is None
        found = counted(store)
        assert found["damaged_total", "file"] == 1
        assert ("used_bytes", "file") not in found


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


def test_a_full_disk_costs_caching_only(tiny_disk: Path) -> None:
    shared = TestSharedTier()
    with shared.opened(tiny_disk, 1 << 30) as tier:
        for i in range(9):
            tier.put(name_of(f"entry {i}"), body_of(f"entry {i}", 100_000))
        with pytest.raises(StoreFullError):
            tier.put(name_of("too much"), body_of("too much", 300_000))
        found = scan(tier)
        assert found.num_entries > 0
        for i in range(found.num_entries):
            assert read(tier, f"entry {i}") == body_of(f"entry {i}", 100_000)
        tier.discard(name_of("entry 0"))
        assert tier.put(name_of("b"), body_of("b", 100_000)) is PutResult.STORED


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
