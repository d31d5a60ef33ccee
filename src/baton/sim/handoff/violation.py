"""An invariant that does not hold."""

from __future__ import annotations

from typing import Literal, TypeAlias

Invariant: TypeAlias = Literal["I1", "I2", "I3", "I4", "I5", "I7", "I8", "stuck", "error"]


class ViolationError(BaseException):
    """An invariant does not hold."""

    def __init__(self, invariant: Invariant, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what = invariant, what
