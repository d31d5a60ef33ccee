"""The steps that docs/journey.md lists."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import baton

PACKAGE = Path(baton.__file__).parent
PAGE = Path(__file__).parents[1] / "docs/journey.md"
_ROW = re.compile(r"\| `([\w/]+\.py)` \| `([\w.]+)` \|")


@dataclass(frozen=True)
class Step:
    """One row: a function of a file below src/baton, under a heading."""

    section: str
    file: str
    function: str


def read_steps() -> list[Step]:
    """All rows, in order."""
    steps: list[Step] = []
    section = ""
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif row := _ROW.match(line):
            steps.append(Step(section, *row.groups()))
    return steps
