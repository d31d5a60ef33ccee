"""Names that a process need not look for again: what others remove is forgotten."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from baton.clock import Instant
from baton.store.folder import known_names
from baton.store.folder.known_names import BELIEVED_S, REMOVED_FILE, RING_NAMES, KnownNames
from baton.testing.store_contract import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOW = Instant(0.0)
NAMES = [name_of(f"{i}") for i in range(10)]


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_what_another_process_removes_is_forgotten(folder: int) -> None:
    with closing(KnownNames(folder)) as one, closing(KnownNames(folder)) as other:
        assert one.count_leading(NAMES, NOW) == 0
        one.add(NAMES)
        assert one.count_leading(NAMES, NOW) == len(NAMES)
        other.report_removed(NAMES[4])
        other.report_removed(name_of("never known"))
        assert one.count_leading(NAMES, NOW) == 4
        assert one.count_leading(NAMES[5:], NOW) == 5
        one.add(NAMES[4:5])  # it was put, and found, again
        assert one.count_leading(NAMES, NOW) == len(NAMES)
        one.forget(NAMES[0])
        assert one.count_leading(NAMES, NOW) == 0


@pytest.mark.parametrize("num_more", [-1, 0, 1, RING_NAMES])
def test_more_removals_than_the_ring_holds(folder: int, num_more: int) -> None:
    with closing(KnownNames(folder)) as one, closing(KnownNames(folder)) as other:
        one.count_leading([], NOW)
        one.add(NAMES)
        other.report_removed(NAMES[9])
        for i in range(RING_NAMES - 1 + num_more):
            other.report_removed(name_of(f"removed {i}"))
        known = one.count_leading(NAMES, NOW)
        assert known == (9 if num_more < 0 else 0), "all is forgotten where some was missed"


def test_names_are_believed_for_a_while_and_are_bounded(
    folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_names, "MAX_KNOWN", len(NAMES) - 1)
    with closing(KnownNames(folder)) as known:
        known.count_leading([], NOW)
        known.add(NAMES[1:])
        assert known.count_leading(NAMES[1:], Instant(BELIEVED_S - 1)) == 9
        assert known.count_leading(NAMES[1:], Instant(BELIEVED_S)) == 0
        known.add(NAMES)
        assert known.count_leading(NAMES, Instant(BELIEVED_S + 1)) == 0


def test_a_count_that_the_disk_has_lost_costs_a_look(tmp_path: Path, folder: int) -> None:
    """Blocks of a flash disk that were erased read as ones."""
    with closing(KnownNames(folder)) as one, closing(KnownNames(folder)) as other:
        other.report_removed(name_of("before"))
        one.count_leading([], NOW)
        one.add(NAMES)
        (tmp_path / REMOVED_FILE).write_bytes(b"\xff" * 8)
        other.report_removed(NAMES[4])
        assert one.count_leading(NAMES, NOW) == 0
        one.add(NAMES)
        other.report_removed(NAMES[4])
        assert one.count_leading(NAMES, NOW) == 4
