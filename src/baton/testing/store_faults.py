"""What may befall a tier whose entries are files: its writers die, its bytes change, disks fill up.

Whatever happens, an entry is what was put, or it is missing (invariant I8).
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import subprocess
import sys
import threading
from abc import abstractmethod
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from baton.errors import StoreError, StoreFullError
from baton.store.entry_format import HEADER_BYTES, make_header
from baton.store.folder import directory
from baton.store.interface import PutResult
from baton.testing.store_contract import BODY_BYTES, body_of, name_of, put, read, scan
from baton.testing.store_syscalls import SystemCallFaultContract, failing

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

LARGE_BYTES = 4 << 20
NUM_WRITERS = 4


class FolderFaultContract(SystemCallFaultContract):  # noqa: PLR0904 - a test for each fault
    """A subclass names its `kind`, and defines where in a place the entries are."""

    kind: str

    @abstractmethod
    def options(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        """The options with which the tier is opened."""

    @abstractmethod
    def folder(self, place: Path) -> Path:
        """Where its files are."""

    def entry(self, place: Path, content: str) -> Path:
        """An entry's file."""
        return self.folder(place) / name_of(content).hex()

    @contextmanager
    def half_written(self, place: Path, naming: str) -> Generator[subprocess.Popen[str]]:
        """A process that is in the middle of writing the entry "a"."""
        options = json.dumps(self.options(place, 4 * LARGE_BYTES))
        command = [sys.executable, "-m", "baton.testing.store_writer", self.kind, options, "a"]
        with subprocess.Popen(  # noqa: S603 - this same Python
            [*command, str(LARGE_BYTES), naming],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            try:
                stdout: IO[str] = writer.stdout  # type: ignore[assignment]
                self.check_half_written(int(stdout.readline()), writer.pid, place)
                yield writer
            finally:
                writer.kill()

    def check_half_written(self, num_written: int, pid: int, place: Path) -> None:
        """See that the fault is there: half of the entry is written, into a file."""
        assert num_written == HEADER_BYTES + LARGE_BYTES // 2
        assert num_written in find_open_sizes(pid, self.folder(place))

    def own_files(self) -> set[str]:
        """What a folder without entries may have in it."""
        return {"users", "capacity", "reserved", "tenants", "removed"}

    @pytest.mark.parametrize("naming", ["unnamed", "named"])
    def test_a_writer_killed_in_the_middle_leaves_nothing(
        self, tmp_path: Path, naming: str
    ) -> None:
        with self.opened(tmp_path, 4 * LARGE_BYTES) as tier:
            with self.half_written(tmp_path, naming) as writer:
                assert read(tier, "a") is None
                writer.kill()
                assert writer.wait(30) < 0
            assert read(tier, "a") is None
            assert scan(tier).num_entries == 0
        with self.opened(tmp_path, 4 * LARGE_BYTES) as tier:
            left = {path.name for path in self.folder(tmp_path).iterdir()}
            assert left <= self.own_files()
            for content in "abc":  # all of the capacity can be used again
                tier.put(name_of(content), body_of(content, LARGE_BYTES))
            assert scan(tier).num_entries == 3
            assert read(tier, "a") == body_of("a", LARGE_BYTES)

    def test_what_is_being_written_is_not_cleaned_up(self, tmp_path: Path) -> None:
        with (
            self.half_written(tmp_path, "named"),
            self.opened(tmp_path, 4 * LARGE_BYTES),
        ):
            names = {path.name for path in self.folder(tmp_path).iterdir()}
            assert any(name.startswith(directory.UNFINISHED) for name in names)

    def test_a_flipped_bit_anywhere_is_a_miss(self, tmp_path: Path) -> None:
        chance = random.Random(5)  # noqa: S311
        places = [*range(HEADER_BYTES), *chance.sample(range(HEADER_BYTES, BODY_BYTES), 40)]
        with self.opened(tmp_path) as tier:
            for at in places:
                assert put(tier, "a") is PutResult.STORED
                flip_bit(self.entry(tmp_path, "a"), at, chance.randrange(8))
                assert read(tier, "a") is None
                assert tier.find([name_of("a")]) == 0
            assert scan(tier).num_damaged == len(places)
            put(tier, "a")
            assert read(tier, "a") == body_of("a")

    def test_an_entry_made_without_the_key_is_a_miss(self, tmp_path: Path) -> None:
        """By who may write to the folder: another cluster's worker, another user of a disk."""
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            forged = body_of("b")
            header = make_header(bytes(32), name_of("a"), forged)
            self.entry(tmp_path, "a").write_bytes(header + forged)
            assert read(tier, "a") is None
            put(tier, "a")
            put(tier, "b")
            # One of this cluster's own entries under another's name.
            self.entry(tmp_path, "b").rename(self.entry(tmp_path, "a"))
            assert read(tier, "a") is None
            assert scan(tier).num_damaged == 2
            put(tier, "a")
            assert read(tier, "a") == body_of("a")

    def test_a_file_cut_short_or_grown_is_a_miss(self, tmp_path: Path) -> None:
        full_layout = HEADER_BYTES + BODY_BYTES
        lengths = (0, 1, HEADER_BYTES - 1, HEADER_BYTES, 4096, full_layout - 1, full_layout + 1)
        with self.opened(tmp_path) as tier:
            for length in lengths:
                put(tier, "a")
                os.truncate(self.entry(tmp_path, "a"), length)
                assert read(tier, "a") is None
                put(tier, "a")
                assert read(tier, "a") == body_of("a")

    def test_a_file_cut_short_while_it_is_read_is_a_miss(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            lease = tier.try_lease(name_of("a"))
            assert lease is not None
            with lease:
                os.truncate(self.entry(tmp_path, "a"), HEADER_BYTES + 10)
                assert not lease.try_read(memoryview(bytearray(lease.num_bytes)))

    @pytest.mark.parametrize("call", ["open", "fstat", "pread", "preadv"])
    def test_an_entry_that_the_disk_does_not_read_stays(self, tmp_path: Path, call: str) -> None:
        def fail() -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with self.opened(tmp_path) as tier, self.opened(tmp_path) as other:
            put(tier, "a")
            assert tier.find([name_of("a")]) == 1
            with failing(0, fail, (call,)) as calls:
                assert read(tier, "a") is None
            assert calls.has_failed
            with failing(0, fail, (call,)) as calls, pytest.raises(StoreError, match="read"):
                tier.is_whole(name_of("a"))
            assert calls.has_failed
            assert scan(tier).num_damaged == 0
            assert tier.usage().num_read_errors == 1
            assert tier.is_whole(name_of("a"))
            assert read(other, "a") == body_of("a")
            assert tier.find([name_of("a")]) == 0, "it is left alone for a while"
            assert read(tier, "a") is None
            assert put(tier, "a") is PutResult.STORED, "it was computed again"
            assert read(tier, "a") == body_of("a")
            assert scan(tier).used_bytes == tier.usage().used_bytes
            assert tier.usage().num_read_errors == 1

    def test_a_process_without_descriptors_reads_an_entry_later(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            try:
                assert read(tier, "a") is None
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert read(tier, "a") == body_of("a")
            assert tier.usage().num_read_errors == 0

    def test_an_entry_under_another_name_is_a_miss(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            self.entry(tmp_path, "a").rename(self.entry(tmp_path, "b"))
            assert read(tier, "b") is None

    def test_what_is_no_file_is_a_miss(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            self.entry(tmp_path, "a").mkdir()
            self.entry(tmp_path, "b").symlink_to("/etc/passwd")
            os.mkfifo(self.entry(tmp_path, "c"))
            for content in "abc":
                assert read(tier, content) is None

    def test_no_room_in_the_filesystem_is_reported_and_leaves_nothing(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            with files_bounded(BODY_BYTES // 2), pytest.raises(StoreFullError):
                put(tier, "b")
            assert read(tier, "b") is None
            assert read(tier, "a") == body_of("a")
            assert put(tier, "b") is PutResult.STORED

    def test_a_folder_that_is_gone_costs_caching_only(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            for path in self.folder(tmp_path).iterdir():
                path.unlink()
            self.folder(tmp_path).rmdir()
            assert read(tier, "a") is None
            with pytest.raises(StoreError):
                put(tier, "a")

    def test_of_many_writers_of_one_name_one_wins(self, tmp_path: Path) -> None:
        outcomes: list[PutResult] = []
        barrier = threading.Barrier(NUM_WRITERS, timeout=60)

        def write(content: str) -> None:
            with self.opened(tmp_path, NUM_WRITERS * LARGE_BYTES) as tier:
                barrier.wait()
                outcomes.append(tier.put(name_of(content), body_of(content, LARGE_BYTES // 8)))
                barrier.wait()

        run_at_once([(write, "a")] * NUM_WRITERS)
        assert sorted(outcome.value for outcome in outcomes) == ["exists"] * 3 + ["stored"]

    def test_many_users_of_a_small_tier_read_right_or_miss(self, tmp_path: Path) -> None:
        capacity = 12 * BODY_BYTES
        num_right: list[int] = []

        def work(seed: int) -> None:
            chance = random.Random(seed)  # noqa: S311
            right = 0
            with self.opened(tmp_path, capacity) as tier:
                for _ in range(60):
                    content = f"entry {chance.randrange(24)}"
                    found = read(tier, content)
                    assert found in {None, body_of(content)}
                    right += found is not None
                    try:
                        put(tier, content)
                    except StoreFullError:
                        continue  # the others take what is freed
            num_right.append(right)

        with self.opened(tmp_path, capacity) as tier:
            run_at_once([(work, seed) for seed in range(NUM_WRITERS)])
            assert len(num_right) == NUM_WRITERS, "a user has met an error"
            assert sum(num_right) > 0
            found = scan(tier)
            assert found.used_bytes <= capacity
            assert found.num_damaged == 0
            committed = (self.folder(tmp_path) / "capacity").read_bytes()
            assert int.from_bytes(committed, "little") == found.used_bytes
            assert set((self.folder(tmp_path) / "reserved").read_bytes()) == {0}

    def test_no_other_user_can_look_inside(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            folder = self.folder(tmp_path)
            assert folder.stat().st_mode & 0o777 == 0o700
            assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def find_open_sizes(pid: int, folder: Path) -> set[int]:
    """Sizes of the files on a folder's filesystem that a process has open."""
    device = folder.stat().st_dev
    found = [path.stat() for path in Path(f"/proc/{pid}/fd").iterdir()]
    return {status.st_size for status in found if status.st_dev == device}


def flip_bit(path: Path, at: int, bit: int) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes((byte ^ 1 << bit,)))


@contextmanager
def files_bounded(num_bytes: int) -> Generator[None]:
    """No file of this process may grow beyond so much."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_at_once(calls: list[tuple[object, object]]) -> None:
    """Each call in a thread of its own; returns when all have."""
    threads = [threading.Thread(target=call, args=(argument,)) for call, argument in calls]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
