"""Folders of entries under their policies: age, room, pins, the clock, and locks that are held."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.clock import Instant, UnixTime
from baton.errors import ConfigError, StoreError, StoreFullError, UnknownPluginError
from baton.store.folder import directory
from baton.store.folder.bodies import FileBodies, compute_cost
from baton.store.folder.shared_capacity import LOCK_TIMEOUT_S
from baton.store.folder.tier import FolderTier
from baton.store.interface import TIERS, EntryName, PutResult, TierContext
from baton.store.victims import MIN_CHOSEN
from baton.testing.store_contract import (
    BODY_BYTES,
    CONTRACT_KEY,
    body_of,
    name_of,
    put,
    read,
    scan,
)
from baton.testing.store_syscalls import count_descriptors, failing

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

ENTRY_BYTES = compute_cost(BODY_BYTES)
HOUR_S = 3600.0
WAIT_S = 20.0


@dataclass(slots=True)
class WallClock:
    """A clock that an operator, or NTP, sets."""

    at: float = 1_700_000_000.0

    def now(self) -> Instant:
        return Instant(self.at)

    def unix_now(self) -> UnixTime:
        self.at += 0.001
        return UnixTime(self.at)


@dataclass(frozen=True, slots=True)
class Place:
    """Where tiers of one kind are opened."""

    kind: str
    parent: Path
    clock: WallClock

    @property
    def folder(self) -> Path:
        return self.parent / "baton-contract-store"

    @contextmanager
    def opened(self, num_entries: int = 100, **options: object) -> Generator[FolderTier]:
        """A tier with room for so many entries."""
        where = self.parent if self.kind == "shared" else self.folder
        factory = TIERS.build(
            self.kind,
            {"directory": str(where), "capacity_bytes": num_entries * ENTRY_BYTES} | options,
        )
        tier = factory(TierContext("contract", CONTRACT_KEY, self.clock))
        assert isinstance(tier, FolderTier)
        try:
            yield tier
        finally:
            tier.close()


@pytest.fixture(name="place", params=["shared", "file"])
def place_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path, WallClock())


def kept(tier: FolderTier, contents: str) -> str:
    """Which of these are there; no use of them."""
    return "".join(content for content in contents if tier.find([name_of(content)]))


def test_an_unknown_policy_is_refused(place: Place) -> None:
    with pytest.raises(UnknownPluginError, match="lru, s3fifo"), place.opened(eviction="mru"):
        pass


def test_s3fifo_keeps_what_was_used_again_and_knows_what_it_evicted(place: Place) -> None:
    with place.opened(16, eviction="s3fifo") as tier, place.opened(16, eviction="s3fifo") as other:
        for content in "abcd":
            put(tier, content)
        for content in "abcd":
            read(other, content)  # uses are counted by all processes together
        for i in range(40):
            put(tier, f"once {i}")
        assert kept(tier, "abcd") == "abcd"
        evicted = [i for i in range(40) if not tier.find([name_of(f"once {i}")])]
        put(other, f"once {evicted[-1]}")
        (entry,) = [e for e in tier.entries() if e.name == name_of(f"once {evicted[-1]}")]
        assert entry.is_protected, "it returned soon after its eviction"
        put(other, "new")
        (entry,) = [e for e in tier.entries() if e.name == name_of("new")]
        assert not entry.is_protected


def test_uses_and_places_survive_a_restart(place: Place) -> None:
    with place.opened(16) as other:  # so that a shared tier stays
        with place.opened(16) as tier:
            put(tier, "a")
            read(tier, "a")
            read(tier, "a")
        (before,) = other.entries()
        with place.opened(16) as tier:
            assert tier.entries() == [before]
        assert (before.num_uses, before.is_protected, before.is_pinned) == (2, False, False)
        assert before.used_at > before.queued_at


def test_what_was_not_used_for_long_is_not_found(place: Place) -> None:
    with place.opened(ttl_s=HOUR_S) as tier:
        for content in "abc":
            put(tier, content)
        place.clock.at += HOUR_S / 2
        read(tier, "a")
        assert tier.pin(name_of("c"))
        place.clock.at += HOUR_S / 2 + 1
        assert kept(tier, "abc") == "ac"
        assert read(tier, "b") is None
        assert put(tier, "b") is PutResult.STORED
        place.clock.at += HOUR_S + 1
        tier.maintain()
        assert [entry.name for entry in tier.entries()] == [name_of("c")]
        assert tier.usage().num_expired == 3
        assert tier.usage().used_bytes == scan(tier).used_bytes


def test_room_is_made_above_the_high_mark_alone(place: Place) -> None:
    with place.opened(20) as tier:
        for i in range(19):
            put(tier, f"entry {i}")
        tier.maintain()
        assert scan(tier).num_entries == 19
        put(tier, "entry 19")
        tier.maintain()
        assert scan(tier).num_entries == 18
        assert not tier.find([name_of("entry 0")])


def test_marks_are_as_configured(place: Place) -> None:
    with place.opened(20, high_mark=0.5, low_mark=0.2) as tier:
        for i in range(10):
            put(tier, f"entry {i}")
        tier.maintain()
        assert scan(tier).num_entries == 10
        put(tier, "entry 10")
        tier.maintain()
        assert scan(tier).num_entries == 4


def test_a_low_mark_above_the_high_one_is_refused(place: Place) -> None:
    with pytest.raises(ConfigError, match="low_mark"), place.opened(20, high_mark=0.8):
        pass


def test_pinned_entries_stay_within_their_share(place: Place) -> None:
    with place.opened(8) as tier:
        for content in "abcdefgh":
            put(tier, content)
        for content in "abcd":
            assert tier.pin(name_of(content))
        assert tier.pin(name_of("a")), "twice is once"
        with pytest.raises(StoreFullError, match="50%"):
            tier.pin(name_of("e"))
        assert not tier.pin(name_of("missing"))
        with place.opened(8) as other:
            for i in range(20):
                put(other, f"entry {i}")
            assert kept(other, "abcdefgh") == "abcd"
            assert other.unpin(name_of("a"))
            put(other, "last")
            assert not other.unpin(name_of("missing"))
            assert kept(other, "abcd") == "bcd"
            assert read(other, "b") == body_of("b")


def test_where_all_is_pinned_the_store_is_full(place: Place) -> None:
    with place.opened(4) as tier:
        for content in "ab":
            put(tier, content)
            tier.pin(name_of(content))
        with place.opened(2) as smaller, pytest.raises(StoreFullError):  # an operator's change
            put(smaller, "c")
        assert kept(tier, "ab") == "ab"


def test_a_clock_that_is_set_back_leaves_no_entry_that_never_goes(place: Place) -> None:
    with place.opened(8, ttl_s=HOUR_S) as tier:
        for content in "abcd":
            put(tier, content)
        before = max(entry.used_at for entry in tier.entries())
        place.clock.at -= 24 * HOUR_S
        for i in range(6):  # some have to go
            put(tier, f"entry {i}")
        assert all(entry.used_at < before - 23 * HOUR_S for entry in tier.entries())
        for i in range(6, 16):
            put(tier, f"entry {i}")
        assert kept(tier, "abcd") == ""
        assert tier.find([name_of("entry 15")]) == 1
        assert tier.usage().num_expired == 0


def test_a_clock_that_is_set_forward_costs_caching_only(place: Place) -> None:
    with place.opened(8, ttl_s=HOUR_S) as tier:
        put(tier, "a")
        place.clock.at += 365 * 24 * HOUR_S
        assert read(tier, "a") is None
        put(tier, "b")
        place.clock.at -= 365 * 24 * HOUR_S
        assert read(tier, "b") == body_of("b")
        place.clock.at += HOUR_S + 1
        assert read(tier, "b") is None, "the read has set its time right"


@contextmanager
def stopped_holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a file's lock, and is stopped."""
    code = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'r+b')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\nprint('held', flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            holder.send_signal(signal.SIGSTOP)
            status = Path(f"/proc/{holder.pid}/stat")
            deadline = time.monotonic() + WAIT_S
            while status.read_text("utf-8").rsplit(")", 1)[1].split()[0] != "T":
                assert time.monotonic() < deadline
            with path.open("r+b") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield holder
        finally:
            holder.kill()


def test_a_stopped_process_that_holds_the_lock_is_waited_for_once(place: Place) -> None:
    with place.opened(8) as tier:
        for content in "abcdefgh":
            put(tier, content)
        with stopped_holder(place.folder / "capacity") as holder:
            began_at = time.monotonic()
            for i in range(50):
                with pytest.raises(StoreError, match="locked by another process"):
                    put(tier, f"entry {i}")
            tier.discard(name_of("a"))
            with pytest.raises(StoreError):
                tier.maintain()
            for content in "bcdefgh":
                assert read(tier, content) == body_of(content), "reading needs no lock"
            assert time.monotonic() - began_at < 25 * LOCK_TIMEOUT_S, "not once for each of 50"
            holder.kill()
            holder.wait(WAIT_S)
            assert put(tier, "i") is PutResult.STORED, "its lock went with it"


def test_what_could_not_be_named_for_want_of_the_lock_takes_no_room(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written when another process takes the lock, and keeps it for too long."""
    write, body = FileBodies.write, bytes(30 * ENTRY_BYTES)
    with place.opened(36) as tier, ExitStack() as holder:
        put(tier, "a")
        used_bytes = tier.usage().used_bytes

        def write_until_locked(*arguments: Any) -> Any:
            files = write(*arguments)
            lock = holder.enter_context((place.folder / "capacity").open("r+b"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            return files

        with monkeypatch.context() as patch:
            patch.setattr(FileBodies, "write", write_until_locked)
            with pytest.raises(StoreError, match="locked by another process"):
                tier.put(name_of("large"), body)
        assert tier.usage().used_bytes == used_bytes
        holder.close()
        assert tier.put(name_of("large"), body) is PutResult.STORED
        assert kept(tier, "a"), "nothing had to go for it"


def test_a_stopped_process_that_opens_the_folder_is_not_waited_for_without_limit(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "OPEN_TIMEOUT_S", 0.2)
    with place.opened():
        pass
    place.folder.mkdir(mode=0o700, exist_ok=True)
    (place.folder / "users").touch()
    with stopped_holder(place.folder / "users") as holder:
        with pytest.raises(ConfigError, match="holds its lock"), place.opened():
            pass
        holder.kill()
        holder.wait(WAIT_S)
        with place.opened() as tier:
            assert put(tier, "a") is PutResult.STORED


def mount(where: Path, *arguments: str) -> None:
    command = ["mount", *arguments, str(where)]
    subprocess.run(command, check=True, capture_output=True)


def test_a_disk_that_is_read_only_is_refused_with_the_reason(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        mount(disk, "-t", "tmpfs", "-o", "size=4m", "baton-test")
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"cannot mount a tmpfs: {exc}")
    try:
        place = Place("file", disk, WallClock())
        with place.opened() as tier:
            put(tier, "a")
        mount(disk, "-o", "remount,ro")
        with pytest.raises(ConfigError, match="Read-only"), place.opened():
            pass
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True, capture_output=True)


def test_a_disk_that_becomes_read_only_is_read(place: Place) -> None:
    """As after an error of ext4: its mount stays writable for no one, with files open."""

    def refuse() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with place.opened(4) as tier:
        for content in "abcd":
            put(tier, content)
        with failing(None, refuse, ("link", "unlink", "utime", "write", "pwrite")) as calls:
            with pytest.raises(StoreError):
                put(tier, "e")
            for content in "abcd":
                tier.discard(name_of(content))
                assert read(tier, content) == body_of(content)
            with pytest.raises(StoreError):
                put(tier, "e")
            assert calls.num_calls > 0
        assert put(tier, "e") is PutResult.STORED
        assert scan(tier).used_bytes <= scan(tier).capacity_bytes


def test_many_small_entries_make_room_in_their_order(place: Place) -> None:
    """So many that most lists of them are made in pieces, between other work."""
    num_entries = 5 * MIN_CHOSEN

    def name(number: int) -> EntryName:
        return EntryName(number.to_bytes(32, "little"))

    num_open = count_descriptors()
    with place.opened(num_entries) as tier:
        body = bytes(BODY_BYTES)
        put_at: dict[EntryName, float] = {}
        for number in range(2 * num_entries):
            place.clock.at += (
                0.5  # while a list is made, entries come that are newer than its start
            )
            tier.put(name(number), body)
            put_at[name(number)] = place.clock.at
            if number >= num_entries // 2:
                lease = tier.try_lease(name(0))
                assert lease is not None, number
                lease.release()
        assert tier._evictor._victims._num_lists >= 4
        entries = [entry for entry in tier.entries() if entry.name != name(0)]
        assert all(abs(entry.used_at - put_at[entry.name]) < 0.1 for entry in entries)
        kept = {name(0), *(entry.name for entry in entries)}
        assert tier.usage().used_bytes == scan(tier).used_bytes
        newest = [name(number) for number in range(2 * num_entries)][1 - len(kept) :]
        assert kept == {name(0), *newest}
        assert len(kept) > num_entries - 20
    assert count_descriptors() == num_open
