"""A registry reads what is installed once, and again where there are other places to look."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton import registry
from baton.store.interface import TIERS

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_metadata_is_read_once_for_each_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry._find_installed.cache_clear()
    find, num = registry.entry_points, []

    def counted(group: str) -> object:
        num.append(group)
        return find(group=group)

    monkeypatch.setattr(registry, "entry_points", counted)
    kinds = TIERS.kinds()
    TIERS.plugin("file")
    assert (TIERS.kinds(), num) == (kinds, ["baton.tiers"])

    info = tmp_path / "another-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[baton.tiers]\nanother = nowhere:PLUGIN\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert set(TIERS.kinds()) == {*kinds, "another"}
