"""Tier `file` past the page cache: sizes, durability, and filesystems that refuse it.

What every folder must do, and how it fails, is tested of the same tier in `test_store_tiers`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import threading
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any

import pytest

from baton.errors import StoreError
from baton.ops.doctor.finding import Level
from baton.ops.doctor.store import check_tier
from baton.store.entry_format import HEADER_BYTES
from baton.store.folder import bodies
from baton.store.folder.direct_files import ALIGNMENT_BYTES, NUM_SLOTS, align
from baton.store.folder.directory import UNFINISHED
from baton.store.folder.shared_capacity import SharedCapacity
from baton.store.interface import PutResult
from baton.testing.store_contract import BODY_BYTES, body_of, name_of, put, read, read_lease
from baton.testing.store_syscalls import count_descriptors, failing
from tests.contract.direct_tier import Durable, open_direct_tier
from tests.unit.store.test_remote_buffers import refuse_thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NO_HOST: Any = None
"""A tier is looked at on this machine, not on the recorded ones of the doctor's tests."""
ROOM_FOR_TWO = 2 * bodies.compute_cost(BODY_BYTES)
OWN_FILES = {"users", "capacity", "reserved", "tenants", "removed"}


@pytest.fixture(name="place")
def place_fixture(tmp_path: Path) -> Path:
    """Where files can be written past the page cache."""
    with closing(open_direct_tier(tmp_path)) as tier:
        if not tier.usage().direct_io:
            pytest.skip(f"the filesystem of {tmp_path} refuses O_DIRECT")
    return tmp_path


@pytest.mark.parametrize(
    "num_bytes",
    [
        *(k * ALIGNMENT_BYTES - HEADER_BYTES + d for k in (2, 3) for d in (-1, 0, 1)),
        *(k * ALIGNMENT_BYTES for k in (2, NUM_SLOTS, NUM_SLOTS + 1)),
        (3 * NUM_SLOTS + 1) * ALIGNMENT_BYTES + 77,
    ],
)
def test_bodies_that_end_anywhere(place: Path, num_bytes: int) -> None:
    with closing(open_direct_tier(place)) as tier:
        for content in "ab":  # the second one in slots that were used before
            tier.put(name_of(content), body_of(content, num_bytes))
        for content in "ab":
            lease = tier.try_lease(name_of(content))
            assert lease is not None
            with lease:
                assert read_lease(lease) == body_of(content, num_bytes)
            path = place / "files" / name_of(content).hex()
            assert path.stat().st_size == align(HEADER_BYTES + num_bytes)


def test_tiers_with_and_without_read_each_others_entries(place: Path) -> None:
    with (
        closing(open_direct_tier(place)) as direct,
        closing(open_direct_tier(place, direct_io=False)) as cached,
    ):
        put(direct, "a")
        put(cached, "b")
        assert (direct.usage().direct_io, cached.usage().direct_io) == (True, False)
        for tier in (direct, cached):
            assert read(tier, "a") == body_of("a")
            assert read(tier, "b") == body_of("b")


def test_a_new_entry_is_written_into_the_file_of_the_one_that_makes_room(place: Path) -> None:
    paths = {content: place / "files" / name_of(content).hex() for content in "abcd"}
    calls: list[str] = []
    with closing(open_direct_tier(place, ROOM_FOR_TWO, durable="all")) as tier:
        put(tier, "a")
        put(tier, "b")
        first, num_open = paths["a"].stat(), count_descriptors()
        kinds = ("posix_fallocate", "rename", "fdatasync", "link")
        with failing(None, lambda: calls.append(seen.name), kinds) as seen:
            put(tier, "c")
        assert calls == ["rename", "fdatasync", "link"]
        assert (paths["c"].stat().st_ino, paths["c"].stat().st_nlink) == (first.st_ino, 1)
        assert count_descriptors() == num_open
        assert not paths["a"].exists()
        assert [read(tier, content) for content in "abc"] == [None, body_of("b"), body_of("c")]
        tier.put(name_of("d"), body_of("d", ROOM_FOR_TWO - HEADER_BYTES))  # of another size
        assert tier.usage().used_bytes == ROOM_FOR_TWO
    assert {path.name for path in (place / "files").iterdir()} - OWN_FILES == {paths["d"].name}


def test_a_process_that_may_start_no_thread_keeps_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_direct_tier(place)) as tier:
        num_open = count_descriptors()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse_thread)
            for _ in range(NUM_SLOTS + 1):
                with pytest.raises(StoreError, match="new thread"):
                    put(tier, "a")
        assert count_descriptors() == num_open
        assert tier.usage().used_bytes == 0
        assert put(tier, "a") is PutResult.STORED
        assert read(tier, "a") == body_of("a")


def test_the_file_of_an_entry_that_is_read_is_not_written(place: Path) -> None:
    with closing(open_direct_tier(place, ROOM_FOR_TWO)) as tier:
        put(tier, "a")
        put(tier, "b")
        first = (place / "files" / name_of("a").hex()).stat()
        lease = tier.try_lease(name_of("a"))
        assert lease is not None
        with lease:
            assert read(tier, "b") == body_of("b")  # so that "a" is what was used least recently
            put(tier, "c")
            assert (place / "files" / name_of("c").hex()).stat().st_ino != first.st_ino
            assert read_lease(lease) == body_of("a")
        assert tier.find([name_of("a")]) == 0


def test_files_kept_for_entries_that_could_not_be_counted_take_no_room(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes the lock once there is room, and keeps it for too long."""
    remove = SharedCapacity.remove
    with closing(open_direct_tier(place, ROOM_FOR_TWO)) as tier, ExitStack() as holder:
        put(tier, "a")
        put(tier, "b")

        def remove_then_lock(*arguments: Any) -> int:
            num_bytes = remove(*arguments)
            lock = holder.enter_context((place / "files" / "capacity").open("r+b"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            return num_bytes

        monkeypatch.setattr(SharedCapacity, "remove", remove_then_lock)
        with pytest.raises(StoreError, match="locked by another process"):
            put(tier, "c")
        assert tier.usage().used_bytes == ROOM_FOR_TWO // 2
        assert not list((place / "files").glob(f"{UNFINISHED}*"))


def test_an_entry_whose_file_is_written_again_while_it_is_opened_is_a_miss(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the file was opened by name, before it is locked; it is no damage."""
    try_share = bodies.try_share
    with (
        closing(open_direct_tier(place, ROOM_FOR_TWO)) as tier,
        closing(open_direct_tier(place, ROOM_FOR_TWO)) as reader,
    ):
        put(tier, "a")
        put(tier, "b")

        def share_late(fd: int) -> bool:
            monkeypatch.setattr(bodies, "try_share", try_share)
            put(tier, "c")
            assert os.fstat(fd).st_ino == (place / "files" / name_of("c").hex()).stat().st_ino
            return try_share(fd)

        monkeypatch.setattr(bodies, "try_share", share_late)
        assert read(reader, "a") is None
        assert reader.usage().num_damaged == 0
        assert read(reader, "c") == body_of("c")


def test_a_pin_does_not_go_to_the_entry_that_is_written_into_the_file(place: Path) -> None:
    """Another process makes room between the look at the name and the pin."""
    with (
        closing(open_direct_tier(place, ROOM_FOR_TWO)) as tier,
        closing(open_direct_tier(place, ROOM_FOR_TWO)) as other,
    ):
        put(tier, "a")
        put(tier, "b")

        def make_room() -> None:
            with suppress(StoreError):  # the lock is held for too long
                put(other, "c")

        with failing(0, make_room, ("fchmod",)) as calls:
            assert tier.pin(name_of("a"))
        assert calls.has_failed
        assert [entry.name for entry in tier.entries() if entry.is_pinned] == [name_of("a")]


def test_an_entry_in_the_file_of_another_is_read_as_soon_as_it_has_its_name(place: Path) -> None:
    """Its writer has the file locked until then; before it has closed it, others may look."""
    found: list[bytes | None] = []
    with (
        closing(open_direct_tier(place, ROOM_FOR_TWO)) as tier,
        closing(open_direct_tier(place, ROOM_FOR_TWO)) as reader,
    ):
        put(tier, "a")
        put(tier, "b")
        # The first thing that a put does after it was linked: removing the name of the old file.
        with failing(None, lambda: found.append(read(reader, "c")), ("unlink",)):
            put(tier, "c")
        assert found[-1] == body_of("c")
        assert reader.usage().num_damaged == 0


def test_a_locked_entry_is_a_miss_and_no_damage(place: Path) -> None:
    """Who removes what dead writers left locks a file for a moment that may be an entry by now."""
    with closing(open_direct_tier(place)) as tier:
        put(tier, "a")
        with (place / "files" / name_of("a").hex()).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert read(tier, "a") is None
        assert tier.usage().num_damaged == 0
        assert read(tier, "a") == body_of("a")


def is_cached(path: Path) -> bool:
    """Whether the beginning of a file is in the page cache.

    By mincore, which reads nothing: a read with RWF_NOWAIT may find what it has begun to read.
    """
    resident = (ctypes.c_ubyte * 1)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(1), resident)
        del first  # else it could not be unmapped
    assert not failed
    return bool(resident[0] & 1)


def is_memory(place: Path) -> bool:
    """Whether files here stay in the page cache, whatever is asked."""
    path = place / "file"
    with path.open("wb") as file:
        file.write(bytes(ALIGNMENT_BYTES))
        file.flush()
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return is_cached(path)


def test_large_entries_that_were_read_do_not_stay_in_the_page_cache(place: Path) -> None:
    if is_memory(place):
        pytest.skip("files of a memory filesystem are in memory")
    path = place / "files" / name_of("a").hex()
    with (
        closing(open_direct_tier(place, durable="all")) as direct,
        closing(open_direct_tier(place, direct_io=False)) as cached,
    ):
        put(direct, "a")
        assert read(cached, "a") == body_of("a")
        assert is_cached(path)
        assert read(direct, "a") == body_of("a")
        assert not is_cached(path)


@pytest.mark.parametrize("direct_io", [True, False])
def test_an_entry_is_on_the_disk_before_it_has_its_name(tmp_path: Path, direct_io: bool) -> None:
    calls: list[str] = []
    with closing(open_direct_tier(tmp_path, direct_io=direct_io, durable="large")) as tier:
        with failing(None, lambda: calls.append(seen.name), ("fdatasync", "link")) as seen:
            put(tier, "a")
            tier.put(name_of("small"), b"small")
        assert calls == ["fdatasync", "link", "link"]
        with failing(0, fail, ("fdatasync",)) as seen, pytest.raises(StoreError):
            put(tier, "b")
        assert seen.has_failed
        assert tier.find([name_of("b")]) == 0


@pytest.mark.parametrize(("durable", "num_waits"), [("all", 2), ("large", 1), ("none", 0)])
def test_which_entries_are_waited_for(tmp_path: Path, durable: Durable, num_waits: int) -> None:
    with (
        closing(open_direct_tier(tmp_path, durable=durable)) as tier,
        failing(None, lambda: None, ("fdatasync",)) as seen,
    ):
        put(tier, "a")
        tier.put(name_of("small"), b"small")
        assert seen.num_calls == num_waits


def test_the_doctor_tries_the_disk_and_leaves_nothing(place: Path) -> None:
    (finding,) = check_tier("file", {"directory": str(place / "new")}, NO_HOST)
    assert (finding.level, finding.found) == (Level.OK, f"{place} has O_DIRECT")
    options = {"directory": str(place / "files"), "direct_io": False}
    (finding,) = check_tier("file", options, NO_HOST)
    assert (finding.level, finding.found) == (Level.OK, f"{place / 'files'}, direct_io = false")
    assert [path.name for path in place.iterdir()] == ["files"]


def fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture(name="refusing_disk")
def refusing_disk_fixture(tmp_path: Path) -> Iterator[Path]:
    """A filesystem without O_DIRECT."""
    where = tmp_path / "disk"
    where.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "ramfs", "baton-test", str(where)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"cannot mount a ramfs: {exc}")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True, capture_output=True)


def test_a_filesystem_that_refuses_is_used_by_way_of_the_page_cache(
    refusing_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        os.close(os.open(refusing_disk, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    with closing(open_direct_tier(refusing_disk)) as tier:
        assert not tier.usage().direct_io
        put(tier, "a")
        assert read(tier, "a") == body_of("a")
    assert [record.message for record in caplog.records if "O_DIRECT" in record.message]
    (finding,) = check_tier("file", {"directory": str(refusing_disk / "new" / "folder")}, NO_HOST)
    assert finding.level is Level.WARNING
    assert finding.found == f"{refusing_disk} refuses O_DIRECT"
    caplog.clear()
    with closing(open_direct_tier(refusing_disk, direct_io=False)) as tier:
        assert read(tier, "a") == body_of("a")
    assert not caplog.records
