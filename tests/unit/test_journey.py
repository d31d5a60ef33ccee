"""docs/journey.md names functions that exist."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from tests.journey import PACKAGE, read_steps

if TYPE_CHECKING:
    from pathlib import Path

STEPS = read_steps()


def find_functions(path: Path) -> set[str]:
    """Qualified names of the functions and methods of a file."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found


def test_the_page_has_steps() -> None:
    assert len(STEPS) > 30
    assert any(step.section == "One layer" for step in STEPS)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.file}:{step.function}")
def test_each_function_exists(step) -> None:
    assert step.function in find_functions(PACKAGE / step.file)
