"""`file` against the public contract, and when its directory is full, gone, stale or not shared."""

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest

from baton.errors import ConfigError, TransferError
from baton.testing.transport_contract import NetworkTransportContract
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, TransportKit, check_write
from baton.testing.transport_contract.process import WriterProcess
from baton.testing.transport_pair import TransportPair, whole_pages
from baton.transfer.interface import (
    TRANSPORTS,
    Arrived,
    GrantQuiescent,
    RemoteLost,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.transports.file import remote as file_remote

ALL_PAGES = [whole_pages(range(NUM_PAGES), range(NUM_PAGES), PAGE_BYTES)]
SHAPES = ((256, 65_536),)
LARGE = [whole_pages(range(256), range(256), 65_536)]


class FileKit(TransportKit):
    kind = "file"

    def __init__(self, directory, **more):
        self.options = {"directory": str(directory), **more}


class FileContract(NetworkTransportContract):
    """Every test leaves an empty directory behind; after a kill, the next worker's start does."""

    kind = "file"
    peer_writes = False

    def connect_unauthenticated(self, descriptor):
        host, port = descriptor.endpoint.split(":")
        return socket.create_connection((host, int(port)), timeout=5)

    @pytest.fixture(autouse=True)
    def _directory(self, monkeypatch, request):
        directory = tempfile.mkdtemp(dir=self.where)
        monkeypatch.setattr(type(self), "options", {"directory": directory, **self.more})
        yield
        is_killed = request.function.__qualname__.startswith("ProcessContract.")
        if is_killed and "in_peace" not in request.node.name:
            FileKit(directory, stale_after_s=0).make_side().close()
        assert list(Path(directory).iterdir()) == []
        Path(directory).rmdir()


class TestFileInMemory(FileContract):
    where = "/dev/shm"
    more: ClassVar = {"max_unread_bytes": 1 << 20}


class TestFileOnDisk(FileContract):
    where = None
    more: ClassVar = {"direct": True, "sync": "data"}


del FileContract


@pytest.fixture
def small_filesystem(tmp_path):
    """A tmpfs of 4 MiB in a mount of its own."""
    where = tmp_path / "small"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "baton-test", str(where)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"cannot mount a tmpfs: {exc}")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True, capture_output=True)


def files_in(directory):
    return {
        path.name
        for path in Path(directory).rglob("*")
        if path.is_file() and path.name not in ("lock", "proof")
    }


def test_a_full_filesystem_fails_the_write_and_no_other(small_filesystem):
    """16 MiB do not fit into 4; afterwards, and while it stays full, nothing is left behind."""
    kit = FileKit(small_filesystem)
    pair = TransportPair.of(kit.make_side(SHAPES), kit.make_side(SHAPES))
    pair.writer.fill(seed=1)
    remote, grant = pair.attach(), pair.open_grant(range(256))
    large = pair.writer.transport.submit(pair.write(remote, grant, LARGE, notification=b"large"))
    pair.pump(lambda: bool(pair.seen(WriteFailed)))
    failed = pair.seen(WriteFailed)[0]
    assert failed.transfer == large
    assert "No space left" in str(failed.error)
    assert files_in(small_filesystem) == set()
    assert os.statvfs(small_filesystem).f_bfree * 4096 > 3 << 20  # what it took is free again
    check_write(pair, remote, grant, [whole_pages(range(8), range(8), 65_536)])
    assert not pair.seen(RemoteLost)
    assert [event.notification for event in pair.seen(Arrived)] == [b"write 0"]
    pair.close()
    assert list(small_filesystem.iterdir()) == []


def test_a_write_that_fails_in_its_second_part_file_does_not_spoil_the_next(
    small_filesystem, monkeypatch
):
    """The first one has landed by then: the receiver must not take the next write for its rest."""
    monkeypatch.setattr(file_remote, "PART_FILE_BYTES", 1 << 20)
    kit = FileKit(small_filesystem)
    pair = TransportPair.of(kit.make_side(SHAPES), kit.make_side(SHAPES))
    pair.writer.fill(seed=1)
    remote, grant = pair.attach(), pair.open_grant(range(256))
    ballast = small_filesystem / "ballast"
    pair.writer.transport.submit(pair.write(remote, grant, LARGE, notification=b"large"))
    pair.pump(lambda: bool(pair.reader.pages()[:16].any()))
    ballast.write_bytes(bytes(os.statvfs(small_filesystem).f_bavail * 4096))
    pair.pump(lambda: bool(pair.seen(WriteFailed)))
    assert "No space left" in str(pair.seen(WriteFailed)[0].error)
    assert pair.seen(Arrived) == []
    ballast.unlink()
    check_write(pair, remote, grant, [whole_pages(range(40), range(100, 140), 65_536)])
    assert files_in(small_filesystem) == set()
    pair.close()


def test_the_rest_of_a_refused_write_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(file_remote, "PART_FILE_BYTES", 1 << 19)
    kit = FileKit(tmp_path, max_unread_bytes=1 << 20)
    pair = TransportPair.of(kit.make_side(SHAPES), kit.make_side(SHAPES))
    pair.writer.fill(seed=1)
    remote, grant = pair.attach(), pair.open_grant(range(20))
    failed = pair.writer.transport.submit(pair.write(remote, grant, LARGE))
    pair.pump(lambda: bool(pair.seen(WriteFailed)))
    assert pair.seen(WriteFailed)[0].transfer == failed
    assert pair.writer.transport._remotes[remote]._next_number < 10  # of 32
    assert not pair.reader.pages()[20:].any()
    check_write(pair, remote, grant, [whole_pages(range(20), range(20), 65_536)])
    assert files_in(tmp_path) == set()
    pair.close()


def test_a_directory_without_room_for_a_folder_is_a_typed_error(small_filesystem):
    free = os.statvfs(small_filesystem).f_bavail * 4096
    (small_filesystem / "ballast").write_bytes(bytes(free))
    with pytest.raises(TransferError, match="cannot keep part files"):
        FileKit(small_filesystem).make_side()
    assert [path.name for path in small_filesystem.iterdir()] == ["ballast"]


def test_a_directory_that_is_not_there_is_a_typed_error(tmp_path):
    with pytest.raises(TransferError, match="cannot keep part files in"):
        FileKit(tmp_path / "absent").make_side()
    with pytest.raises(ConfigError, match="directory"):
        TRANSPORTS.build("file", {})


def test_workers_that_see_different_directories_do_not_attach(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    writer, reader = FileKit(tmp_path / "a").make_side(), FileKit(tmp_path / "b").make_side()
    pair = TransportPair.of(writer, reader)
    writer.transport.attach(reader.descriptor)
    pair.pump(lambda: bool(pair.seen(RemoteLost)))
    assert "same directory on both sides" in str(pair.seen(RemoteLost)[0].error)
    pair.close()


def test_another_folder_of_the_same_name_is_not_the_peers(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    writer, reader = FileKit(tmp_path / "a").make_side(), FileKit(tmp_path / "b").make_side()
    (folder,) = (path for path in (tmp_path / "b").iterdir())
    shutil.copytree(folder, tmp_path / "a" / folder.name)
    (tmp_path / "a" / folder.name / "proof").write_bytes(bytes(16))
    pair = TransportPair.of(writer, reader)
    writer.transport.attach(reader.descriptor)
    pair.pump(lambda: bool(pair.seen(RemoteLost)))
    assert "is not the peer's folder" in str(pair.seen(RemoteLost)[0].error)
    pair.close()


def test_what_a_killed_worker_left_is_removed_once_it_is_old_and_what_lives_is_not(tmp_path):
    kit = FileKit(tmp_path)
    living = kit.make_side(SHAPES)
    with WriterProcess(kit.make_side(SHAPES), kit.credentials, kit.options) as writer:
        writer.stop()
        before = {path.name for path in tmp_path.iterdir()}
        assert len(before) == 3
        writer.kill()
        FileKit(tmp_path, stale_after_s=3600).make_side().close()
        assert {path.name for path in tmp_path.iterdir()} == before  # too young to be sure
        FileKit(tmp_path, stale_after_s=0).make_side().close()
        left = {path.name for path in tmp_path.iterdir()}
        assert len(left) == 2
        assert any(living.epoch in name for name in left)
    living.close()
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_removed_that_is_not_a_dead_workers(tmp_path):
    """A neighbour's folder, a store's (its lock has another name), and one that died young."""
    epoch, token = "0" * 32, "0" * 16
    neighbour, store = tmp_path / "baton-llama3-results", tmp_path / f"baton-{epoch}-store"
    unlocked, empty = tmp_path / f"baton-{epoch}-{token}", tmp_path / f"baton-{epoch}-{'1' * 16}"
    for folder in (neighbour, store, unlocked):
        folder.mkdir()
        (folder / "users").write_text("data")
    (neighbour / "lock").touch()  # nobody holds it
    empty.mkdir()
    FileKit(tmp_path, stale_after_s=0).make_side().close()
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (neighbour, store, unlocked)
    }
    assert (store / "users").read_text() == "data"


def test_a_killed_writers_unread_part_files_are_removed_by_the_receiver(tmp_path):
    kit = FileKit(tmp_path)
    with WriterProcess(kit.make_side(SHAPES), kit.credentials, kit.options) as writer:
        spool = tmp_path / writer.reader.transport._spool.name
        writer.stop()
        writer.kill()
        (spool / "unrelated").touch()
        writer.pump(lambda: files_in(spool) == {"unrelated"})
        (spool / "unrelated").unlink()


def test_a_stopped_receiver_holds_up_the_writer_within_a_bound(tmp_path):
    """The writer leaves no more than `max_unread_bytes` in the directory, and goes on later."""
    kit = FileKit(tmp_path, max_unread_bytes=20 << 20)
    shapes = ((1024, 65_536),)
    pair = TransportPair.of(kit.make_side(shapes), kit.make_side(shapes))
    pair.writer.fill(seed=1)
    remote, grant = pair.attach(), pair.open_grant(range(1024))
    groups = [whole_pages(range(1024), range(1024), 65_536)]
    transfer = pair.writer.transport.submit(pair.write(remote, grant, groups))
    for _ in range(100):
        pair.writer_events += pair.writer.transport.poll()
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 16 << 20 <= on_disk <= (20 << 20) + 4096
    pair.pump(lambda: bool(pair.seen(WriteCompleted)))
    assert pair.seen(WriteCompleted) == [WriteCompleted(transfer, 64 << 20)]
    assert (pair.reader.pages() == pair.writer.pages()).all()
    pair.close()


def test_a_grant_that_is_closed_in_mid_part_file_changes_no_more(tmp_path):
    kit = FileKit(tmp_path)
    pair = TransportPair.of(kit.make_side(SHAPES), kit.make_side(SHAPES))
    pair.writer.fill(seed=1)
    remote, grant = pair.attach(), pair.open_grant(range(256))
    pair.writer.transport.submit(pair.write(remote, grant, LARGE))
    pair.pump(lambda: bool(pair.reader.pages()[0].any()))
    assert not pair.reader.pages()[-1].any()
    pair.reader.transport.close_grant(grant)
    at_close = pair.reader.snapshot()
    pair.pump(lambda: bool(pair.seen(WriteFailed)))
    assert pair.reader.snapshot() == at_close
    assert pair.seen(GrantQuiescent) == [GrantQuiescent(grant)]
    assert not pair.seen(Arrived)
    assert files_in(tmp_path) == set()
    pair.close()


def test_a_part_file_in_mid_flight_changes_no_more_once_its_handoff_has_ended(tmp_path):
    kit = FileKit(tmp_path)
    pair = TransportPair.of(kit.make_side(SHAPES), kit.make_side(SHAPES))
    pair.writer.fill(seed=1)
    remote, grant = pair.attach(), pair.open_grant(range(256))
    pair.writer.transport.submit(pair.write(remote, grant, LARGE))
    pair.pump(lambda: bool(pair.reader.pages()[0].any()))
    assert pair.reader.transport.finish_grant(grant)
    at_end = pair.reader.snapshot()
    pair.pump(lambda: bool(pair.seen(WriteFailed)))
    assert pair.reader.snapshot() == at_end
    assert not pair.seen(Arrived)
    pair.close()


@pytest.mark.parametrize("damage", ["shorter", "link", "folder"])
def test_a_part_file_that_is_not_what_was_told_ends_the_connection(tmp_path, monkeypatch, damage):
    kit = FileKit(tmp_path)
    pair = TransportPair.of(kit.make_side(SHAPES), kit.make_side(SHAPES))
    remote, grant = pair.attach(), pair.open_grant(range(256))
    pair.writer.fill(seed=1)
    pair.writer.transport.submit(pair.write(remote, grant, [whole_pages([1], [1], 65_536)]))
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(65_536))
    while not (found := files_in(tmp_path) - {"secret"}) or next(iter(found)).endswith(".part"):
        pair.writer_events += pair.writer.transport.poll()
    (part_file,) = tmp_path.glob("baton-*/*-0")
    if damage == "shorter":
        os.truncate(part_file, 65_535)
    else:
        part_file.unlink()
        part_file.symlink_to(secret) if damage == "link" else part_file.mkdir()
    pair.pump(lambda: bool(pair.seen(RemoteLost)))
    assert not any(pair.reader.region.memory)
    assert secret.exists()
    pair.close()
    assert {path.name for path in tmp_path.iterdir()} == {"secret"}
