"""A benchmark runs for minutes before it reads its last option: each that it reads must exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SCRIPTS = sorted(path for path in BENCHMARKS.glob("*.py") if "parse_args()" in path.read_text())


def find_added(tree: ast.AST) -> set[str]:
    """The names of the options that a script adds."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    words = (
        str(getattr(word, "value", ""))
        for call in calls
        if getattr(call.func, "attr", "") == "add_argument"
        for word in call.args
    )
    return {word.lstrip("-").replace("-", "_") for word in words}


def find_read(tree: ast.AST) -> set[str]:
    """The attributes that a script reads of what is called `options`, wherever it is kept."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr not in dir(dict)
        and "options" in {getattr(node.value, "id", ""), getattr(node.value, "attr", "")}
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_is_read_was_added(script: Path) -> None:
    tree = ast.parse(script.read_text())
    assert find_read(tree) <= find_added(tree)
