"""The counts of one folder as several users change them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from baton.errors import ConfigError
from baton.store.capacity import Shortage
from baton.store.folder.reservations import MAX_USERS, Reservations
from baton.store.folder.shared_capacity import NOTHING_REMOVED, Removed, SharedCapacity

if TYPE_CHECKING:
    from pathlib import Path


def has_memory() -> bool:
    return True


def test_looking_at_all_entries_forgets_nobody_who_is_writing(tmp_path: Path) -> None:
    given_back: list[int] = []
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    one, other = SharedCapacity(folder, 1000), SharedCapacity(folder, 1000)
    assert one.try_reserve(600, has_memory) is None
    other.recount(dict)
    assert other.try_reserve(600, has_memory) is not None
    assert one.commit(600, lambda _: 600) == 600
    assert other.try_reserve(600, has_memory) is not None
    other.recount(lambda: {0: 100})  # an operator has removed files
    assert other.try_reserve(600, has_memory) is None
    assert other.commit(600, lambda _: 0) == 0  # somebody else has the name
    assert one.try_reserve(900, has_memory) is None
    one.release(900, lambda: given_back.append(900))
    assert given_back == [900]
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
