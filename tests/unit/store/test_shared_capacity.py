"""The counts of one folder as several users change them."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from baton.errors import ConfigError
from baton.store.capacity import Shortage
from baton.store.folder.reservations import MAX_USERS, Reservations
from baton.store.folder.shared_capacity import NOTHING_REMOVED, Removed, SharedCapacity
from baton.store.interface import PutResult

if TYPE_CHECKING:
    from pathlib import Path


def has_memory() -> bool:
    return True


def test_looking_at_all_entries_forgets_nobody_who_is_writing(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    one, other = SharedCapacity(folder, 1000), SharedCapacity(folder, 1000)
    assert one.try_reserve(600, has_memory) is None
    other.recount(dict)
    assert other.try_reserve(600, has_memory) is not None
    assert one.commit([(600, lambda _: PutResult.STORED)]) == [PutResult.STORED]
    assert other.try_reserve(600, has_memory) is not None
    other.recount(lambda: {0: 100})  # an operator has removed files
    assert other.try_reserve(600, has_memory) is None
    # somebody else has the name
    assert other.commit([(600, lambda _: PutResult.EXISTS)]) == [PutResult.EXISTS]
    assert one.try_reserve(900, has_memory) is None
    one.release(900)
    assert one.try_reserve(300, lambda: False) == Shortage(
        300
    )  # there is room, but no memory for it
    one.remove(lambda: Removed(100, 0))
    one.remove(lambda: NOTHING_REMOVED)  # it was gone already
    assert other.try_reserve(1000, has_memory) is None
    assert one.try_reserve(1, has_memory) is not None
    other.close()  # as a killed user leaves it: it will not write any more
    assert one.try_reserve(1000, has_memory) is None
    one.close()
    os.close(folder)


def test_what_is_released_is_not_counted_though_another_holds_the_lock(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    one, other = SharedCapacity(folder, 1000), SharedCapacity(folder, 1000)
    assert one.try_reserve(1000, has_memory) is None
    other.under_lock(lambda: one.release(1000))
    assert other.try_reserve(1000, has_memory) is None
    one.close()
    other.close()
    os.close(folder)


def test_a_release_that_is_not_written_is_with_the_next_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    one, other = SharedCapacity(folder, 1000), SharedCapacity(folder, 1000)
    assert one.try_reserve(600, has_memory) is None

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "a filesystem that writes nothing in place")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        one.release(600)
    assert other.peek().reserved_bytes == 600
    assert one.try_reserve(100, has_memory) is None
    assert other.peek().reserved_bytes == 100
    one.close()
    other.close()
    os.close(folder)


def test_there_are_no_more_users_than_records(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    users = [Reservations(folder) for _ in range(MAX_USERS)]
    with pytest.raises(ConfigError, match="128 users"):
        Reservations(folder)
    users[100].add(7)
    users.pop(100).close()
    assert users[0].total_bytes() == 7
    users.append(Reservations(folder))
    assert users[0].total_bytes() == 0
    for user in users:
        user.close()
    os.close(folder)
