"""Entries that a disk refused to read are read again after a while."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from baton.store.folder.unreadable_entries import MAX_NAMES, READ_AGAIN_S, UnreadableEntries
from baton.testing.clocks import ManualClock
from baton.testing.store_contract import name_of

if TYPE_CHECKING:
    import pytest

ERROR = OSError(errno.EIO, "Input/output error")


def test_they_are_left_alone_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    entries = UnreadableEntries(Path("/kv"), clock)
    with caplog.at_level(logging.WARNING):
        entries.add(name_of("a"), ERROR)
        clock.advance(READ_AGAIN_S - 1)
        entries.add(name_of("b"), ERROR)
    assert len(caplog.records) == 1
    assert "Input/output error" in caplog.text
    assert name_of("a") in entries
    clock.advance(1)
    assert name_of("a") not in entries
    assert name_of("b") in entries
    entries.remove(name_of("b"))
    assert name_of("b") not in entries
    assert entries.num_errors == 2


def test_not_more_than_some_are_remembered() -> None:
    entries = UnreadableEntries(Path("/kv"), ManualClock())
    names = [name_of(f"{i}") for i in range(MAX_NAMES + 1)]
    for name in names:
        entries.add(name, ERROR)
    assert [name in entries for name in names] == [False] + [True] * MAX_NAMES
