"""`baton store verify` and `export`: entries that are there and cannot be read end neither."""

from __future__ import annotations

import errno
import os
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.errors import StoreError
from baton.handoff.pool_mode.store_access import open_keyed_store
from baton.ops.store import verify
from baton.ops.store_archive import export_entries, import_entries
from baton.store.remote.client import EntryRefusedError
from baton.store.tiers.object import ObjectClient
from baton.testing.store_contract import BODY_BYTES, body_of, name_of, put, read
from baton.testing.store_syscalls import failing

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from baton.store.counted_tier import CountedTier
    from baton.store.interface import Body

KEY = ClusterKey.from_hex("5" * 64)


@contextmanager
def opened(kind: str, **options: object) -> Generator[Sequence[CountedTier]]:
    with closing(
        open_keyed_store((kind,), {kind: options}, key=KEY, clock=MachineClock())
    ) as store:
        yield store.tiers


@pytest.fixture(name="bucket")
def bucket_fixture(tmp_path: Path) -> str:
    """Of the entries a, b, c and one that is larger than `BODY_BYTES`."""
    url = f"file://{tmp_path}/bucket"
    with opened("object", url=url) as [tier]:
        for content in "abc":
            put(tier, content)
        tier.put(name_of("large"), body_of("large", BODY_BYTES + 1))
    return url


def failing_for(
    contents: str, error: StoreError
) -> Callable[[ObjectClient, str, int], Body | None]:
    read_value = ObjectClient.read

    def read_or_fail(self: ObjectClient, key: str, max_bytes: int) -> Body | None:
        if key in {name_of(content).hex() for content in contents}:
            raise error
        return read_value(self, key, max_bytes)

    return read_or_fail


def test_a_row_of_archived_entries_ends_no_export(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are read first, and a lifecycle rule archives these."""
    with opened("object", url=bucket) as [tier]:
        for content in "defg":
            put(tier, content)
    monkeypatch.setattr(ObjectClient, "read", failing_for("abcd", EntryRefusedError("archived")))
    with opened("object", url=bucket) as tiers:
        exported = export_entries(tiers, tmp_path / "archive", KEY, ())
        assert (exported.num_entries, exported.num_unreadable) == (4, 4)


def test_of_a_bucket_they_are_counted_and_the_others_are_read(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is archived, as one that a lifecycle rule moved, and one too large for this reader."""
    monkeypatch.setattr(ObjectClient, "read", failing_for("b", EntryRefusedError("archived")))
    with opened("object", url=bucket, max_entry_bytes=BODY_BYTES) as tiers:
        (checked,) = verify(tiers, remove=True)
        assert (checked.num_unreadable, checked.num_damaged, checked.num_whole) == (2, 0, 2)
        exported = export_entries(tiers, tmp_path / "archive", KEY, ())
        assert (exported.num_entries, exported.num_unreadable) == (2, 2)
        names = [name_of(content) for content in ("a", "b", "nothing")]
        exported = export_entries(tiers, tmp_path / "some", KEY, names)
        assert (exported.num_entries, exported.num_unreadable) == (1, 1)
    with opened("file", directory=str(tmp_path / "kv")) as tiers:
        assert import_entries(tiers, tmp_path / "archive", KEY).num_entries == 2
        assert [read(tiers[0], content) for content in "ac"] == [*map(body_of, "ac")]


def test_a_server_that_fails_meanwhile_ends_both(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectClient, "read", failing_for("b", StoreError("it is late")))
    with opened("object", url=bucket) as tiers, pytest.raises(StoreError, match="it is late"):
        verify(tiers, remove=False)
    with opened("object", url=bucket) as tiers, pytest.raises(StoreError, match="try again"):
        export_entries(tiers, tmp_path / "archive", KEY, ())


def test_an_entry_that_the_disk_did_not_read_once_is_not_left_out_silently(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened("file", directory=str(tmp_path / "kv")) as tiers:
        for content in "ab":
            put(tiers[0], content)
        with failing(0, fail, ("preadv",)) as calls:
            exported = export_entries(tiers, tmp_path / "archive", KEY, ())
        assert calls.has_failed
        assert (exported.num_entries, exported.num_unreadable) == (1, 1)
