"""How many examples hypothesis draws: some in `make test`, more in `make explore`."""

from __future__ import annotations

from typing import Final

import hypothesis

IN_TESTS: Final = 50
IN_EXPLORE: Final = 5 * IN_TESTS


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
    """So many in `make test`, in `make explore` as many times more as of the others."""
    return num * hypothesis.settings().max_examples // IN_TESTS
