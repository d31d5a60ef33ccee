"""Files of a store's folder that are being written, where a filesystem has none without a name."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from baton.clock import MachineClock
from baton.store.folder import directory
from baton.store.folder.directory import UNFINISHED, open_unnamed, remove_unfinished, write_all
from baton.store.tiered import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(directory, "_try_open_unnamed", lambda *_: None)
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_one_that_is_taken_for_abandoned_before_it_is_locked_is_written_anew(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[int] = []
    lock = fcntl.flock

    def remove_first(fd: int, operation: int) -> None:
        if (
            operation == fcntl.LOCK_EX | fcntl.LOCK_NB and not removed
        ):  # the writer's: another process is faster
            removed.append(0)
            removed[0] = remove_unfinished(folder)
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with ExitStack() as stack:
        unnamed = open_unnamed(folder, stack)
        write_all(unnamed.fd, [b"whole"])
        assert remove_unfinished(folder) == 0
        assert unnamed.try_link("entry")
    assert removed == [1]
    assert (tmp_path / "entry").read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_what_a_dead_writer_left_is_removed(folder: int, tmp_path: Path) -> None:
    left = tmp_path / f"{UNFINISHED}0"
    left.write_bytes(b"half")
    assert remove_unfinished(folder) == 1
    assert not left.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to play another user")
def test_a_path_that_another_user_took_is_not_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    squatted = tmp_path / "baton-first-store"
    squatted.mkdir()
    os.chown(squatted, 65534, 65534)
    options = {"shared": {"directory": str(tmp_path)}}
    opened = [
        open_store(
            ("shared",),
            options,
            cluster="first",
            key=bytes(32),
            clock=MachineClock(),
            other_names=("second",),
        )
        for _ in range(2)
    ]
    assert "another user's" in caplog.text
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"baton-first-store", "baton-second-store"}
    for store in opened:
        store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["baton-first-store"]
