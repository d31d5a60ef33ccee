"""Each package's docstring names its modules, and no module that is gone."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.journey import PACKAGE

if TYPE_CHECKING:
    from pathlib import Path

# Tiers and policies are found by entry point: their packages have no map.
MAPS = {
    path.parent: names
    for path in sorted(PACKAGE.rglob("__init__.py"))
    if (names := re.findall(r"[\w/]+\.py\b", ast.get_docstring(ast.parse(path.read_text())) or ""))
}


def test_packages_have_maps() -> None:
    assert len(MAPS) > 50


@pytest.mark.parametrize("package", MAPS, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_a_map_names_what_exists(package: Path) -> None:
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    # Some name a module of another package: by its place in `src/baton`, or of the package above.
    roots = (package, package.parent, PACKAGE, PACKAGE.parents[1])
    gone = [n for n in MAPS[package] if not any((root / n).exists() for root in roots)]
    assert (sorted(modules - set(MAPS[package])), gone) == ([], [])
