"""Archives of a store: whatever is done to one, it is refused as a whole."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.errors import ProtocolError, StoreError
from baton.handoff.pool_mode.store_access import open_keyed_store
from baton.ops import store_archive
from baton.ops.store_archive import BEGIN, END_BYTES, export_entries, import_entries
from baton.store.entry_format import HEADER_BYTES
from baton.testing.store_contract import BODY_BYTES, body_of, name_of, put, read

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

    from baton.store.counted_tier import CountedTier
    from baton.store.interface import EntryName

KEY = ClusterKey.from_hex("5" * 64)
ENTRY_BYTES = HEADER_BYTES + BODY_BYTES


@contextmanager
def opened(folder: Path, capacity_bytes: int = 1 << 20) -> Generator[Sequence[CountedTier]]:
    options = {"file": {"directory": str(folder), "capacity_bytes": capacity_bytes}}
    store = open_keyed_store(("file",), options, key=KEY, clock=MachineClock())
    try:
        yield store.tiers
    finally:
        store.close()


@pytest.fixture(name="archive")
def archive_fixture(tmp_path: Path) -> Path:
    """Of the entries a, b and c."""
    path = tmp_path / "archive"
    with opened(tmp_path / "kv") as tiers:
        for content in "abc":
            put(tiers[0], content)
        assert export_entries(tiers, path, KEY, ()).num_entries == 3
    assert path.stat().st_size == len(BEGIN) + 3 * ENTRY_BYTES + END_BYTES
    return path


def check_refused(archive: Path, place: Path) -> None:
    with opened(place) as tiers:
        with pytest.raises(ProtocolError):
            import_entries(tiers, archive, KEY)
        assert tiers[0].entries() == [], "nothing of it was put"


def test_a_changed_byte_anywhere_is_refused(archive: Path, tmp_path: Path) -> None:
    whole, chance = archive.read_bytes(), random.Random(1)
    edges = [*range(len(BEGIN) + HEADER_BYTES), *range(len(whole) - END_BYTES, len(whole))]
    for at in [*edges, *chance.sample(range(len(whole)), 40)]:
        changed = bytearray(whole)
        changed[at] ^= 1 << chance.randrange(8)
        archive.write_bytes(changed)
        check_refused(archive, tmp_path / "other")


def test_parts_of_archives_are_refused(archive: Path, tmp_path: Path) -> None:
    whole = archive.read_bytes()
    end = whole[-END_BYTES:]
    first = whole[len(BEGIN) : len(BEGIN) + ENTRY_BYTES]
    for content in (
        b"",
        whole[:-1],
        whole + b"\0",
        whole[: -END_BYTES - ENTRY_BYTES] + end,  # one is missing
        whole[:-END_BYTES] + first + end,  # one is there twice
        BEGIN + end,
        b"BATONKA2" + whole[8:],
    ):
        archive.write_bytes(content)
        check_refused(archive, tmp_path / "other")


def test_what_has_no_room_is_counted(archive: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "other", BODY_BYTES) as tiers:
        done = import_entries(tiers, archive, KEY)
        assert (done.num_entries, done.num_refused) == (0, 3)


def test_a_damaged_entry_is_left_out(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as tiers:
        put(tiers[0], "a")
        put(tiers[0], "b")
        path = tmp_path / "kv" / name_of("a").hex()
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert export_entries(tiers, tmp_path / "archive", KEY, ()).num_entries == 1
    with opened(tmp_path / "other") as tiers:
        import_entries(tiers, tmp_path / "archive", KEY)
        assert read(tiers[0], "b") == body_of("b")


def test_two_exports_to_one_file_do_not_write_into_each_other(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "archive.unfinished"
    other.write_text("of somebody else")
    iter_bodies = store_archive._iter_bodies

    def export_meanwhile(tiers: Sequence[CountedTier], names: Sequence[EntryName]) -> Iterator[Any]:
        for at, body in enumerate(iter_bodies(tiers, names)):
            if at == 1:
                monkeypatch.setattr(store_archive, "_iter_bodies", iter_bodies)
                export_entries(tiers, archive, KEY, (name_of("c"),))
            yield body

    with opened(tmp_path / "kv") as tiers:
        monkeypatch.setattr(store_archive, "_iter_bodies", export_meanwhile)
        assert export_entries(tiers, archive, KEY, ()).num_entries == 3
    with opened(tmp_path / "other") as tiers:
        assert import_entries(tiers, archive, KEY).num_entries == 3
    assert other.read_text() == "of somebody else"
    assert len(list(tmp_path.iterdir())) == 4, "two stores, the archive, and the other file"


def test_files_that_cannot_be_used_are_reported(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as tiers:
        with pytest.raises(StoreError, match="No such file"):
            import_entries(tiers, tmp_path / "missing", KEY)
        with pytest.raises(StoreError, match="cannot write"):
            export_entries(tiers, tmp_path / "no folder" / "archive", KEY, ())
