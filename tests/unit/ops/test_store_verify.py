"""`baton store verify` beside others that evict and put."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from baton.clock import MachineClock
from baton.ops.store import verify
from baton.store.tiered import TieredStore, open_store
from baton.testing.store_contract import body_of, name_of
from baton.testing.store_syscalls import failing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

    from baton.store.capacity import StoredEntry
    from baton.store.interface import EntryName


def open_files(folder: Path) -> TieredStore:
    options = {"file": {"directory": str(folder)}}
    return open_store(("file",), options, cluster="c", key=bytes(32), clock=MachineClock())


def test_an_entry_that_goes_and_is_put_again_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_files(tmp_path / "kv")
    (tier,) = store.tiers
    store.put(name_of("one"), body_of("one"))
    is_whole, looks = tier.inner.is_whole, []

    def look_while_it_is_replaced(name: EntryName) -> bool:
        if not looks:
            tier.inner.discard(name)
        looks.append(is_whole(name))
        if len(looks) == 1:
            tier.inner.put(name, body_of("one"))
        return looks[-1]

    monkeypatch.setattr(tier.inner, "is_whole", look_while_it_is_replaced)
    (checked,) = verify([tier], remove=False)
    assert looks == [False, True]
    assert (checked.num_entries, checked.num_damaged) == (1, 0)
    store.close()


def test_an_entry_whose_bytes_changed_is_damaged_at_each_look(tmp_path: Path) -> None:
    store = open_files(tmp_path / "kv")
    for content in ("one", "two"):
        store.put(name_of(content), body_of(content))
    path = tmp_path / "kv" / name_of("one").hex()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    (checked,) = verify(store.tiers, remove=True)
    assert (checked.num_entries, checked.num_damaged, checked.num_removed) == (2, 1, 1)
    assert store.find([name_of("two")]) == 1
    assert store.find([name_of("one")]) == 0
    store.close()


def test_an_entry_that_the_disk_does_not_read_is_reported_and_stays(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = open_files(tmp_path / "kv")
    for content in ("one", "two"):
        store.put(name_of(content), body_of(content))
    with failing(0, fail, ("preadv",)) as calls:
        (checked,) = verify(store.tiers, remove=True)
    assert calls.has_failed
    assert (checked.num_entries, checked.num_damaged, checked.num_unreadable) == (2, 0, 1)
    assert store.find([name_of("one"), name_of("two")]) == 2
    store.close()


def test_another_key_beside_an_eviction_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it every entry looks damaged, but for one that a worker evicts meanwhile."""
    store = open_files(tmp_path / "kv")
    for content in "abcd":
        store.put(name_of(content), body_of(content))
    options = {"file": {"directory": str(tmp_path / "kv")}}
    other = open_store(("file",), options, cluster="c", key=b"x" * 32, clock=MachineClock())
    (tier,) = other.tiers
    list_entries = tier.inner.entries

    def list_and_evict() -> Sequence[StoredEntry]:
        found = list_entries()
        store.discard(found[0].name)
        return found

    monkeypatch.setattr(tier.inner, "entries", list_and_evict)
    (checked,) = verify([tier], remove=True)
    assert (checked.num_damaged, checked.num_removed, checked.num_whole) == (3, 0, 0)
    other.close()
    store.close()
