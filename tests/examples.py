"""How many examples hypothesis draws: some in `make test`, more in `make explore`."""

from __future__ import annotations

from typing import Final

import hypothesis

IN_TESTS: Final = 30
IN_EXPLORE: Final = 250
FEW: Final = 10
"""Tests whose examples are large name less than this: those are all drawn in `make test`, too."""
USUAL: Final = 50
"""What the numbers that tests name are relative to."""


def register_profile(*, explores: bool) -> None:
    """For all tests that name no number.

    A busy machine is slow, and how fast code is, is measured in benchmarks/. Each change is judged
    by the same examples; who looks for new ones asks for that.
    """
    hypothesis.settings.register_profile(
        "baton",
        deadline=None,
        derandomize=not explores,
        max_examples=IN_EXPLORE if explores else IN_TESTS,
    )
    hypothesis.settings.load_profile("baton")


def examples(num: int) -> int:
    """Three fifths of this in `make test` (if more than a few), five times it in `make explore`."""
    return max(num * hypothesis.settings().max_examples // USUAL, min(num, FEW))
