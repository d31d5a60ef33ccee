"""The arms: ways to use the same workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

SINGLE: Final = "single"
REPLICATED: Final = "replicated"
MOST_WORKERS: Final = 64


@dataclass(frozen=True, slots=True)
class Arm:
    """One way. Workers that do `both` parts, or some that prefill and others that decode."""

    name: str
    num_both: int
    num_prefill: int = 0
    num_decode: int = 0

    @property
    def num_workers(self) -> int:
        """Workers that it uses."""
        return self.num_both + self.num_prefill + self.num_decode

    @property
    def is_disaggregated(self) -> bool:
        """Whether KV has to move."""
        return self.num_prefill > 0


def choose_arms(num_workers: int, wanted: Sequence[str] = ()) -> tuple[Arm, ...]:
    """All arms of so many workers, or those that are wanted by name.

    Raises:
        ConfigError: no such arm, or too few workers to compare anything.
    """
    if not 2 <= num_workers <= MOST_WORKERS:  # noqa: PLR2004 - one prefill, one decode
        raise ConfigError(f"--workers {num_workers}: 2 to {MOST_WORKERS} can be compared")
    splits = (
        Arm(f"{num}P{num_workers - num}D", 0, num, num_workers - num)
        for num in range(1, num_workers)
    )
    arms = (Arm(SINGLE, 1), Arm(REPLICATED, num_workers), *splits)
    known = {arm.name.lower(): arm for arm in arms}
    for name in wanted:
        if name.lower() not in known:
            names = ", ".join(arm.name for arm in arms)
            raise ConfigError(f"--arm {name}: with {num_workers} workers there are {names}")
    chosen = {name.lower() for name in wanted} or set(known)
    return tuple(arm for arm in arms if arm.name.lower() in chosen)
