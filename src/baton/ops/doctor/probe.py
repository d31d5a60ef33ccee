"""One look at one thing; and how quantities are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.ops.doctor.finding import Area, Finding, Level
    from baton.ops.doctor.host import Host

PROBE_TIMEOUT_S: Final = 3.0

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP: Final = 1024


@dataclass(frozen=True, slots=True)
class Probe:
    """Checks one thing and reports what it found, within `timeout_s`.

    `area` and `name` are those of the finding that stands in where `look` crashes or hangs, and
    `if_broken` is its level.
    """

    area: Area
    name: str
    check: Callable[[Host], list[Finding]]
    level_if_broken: Level
    timeout_s: float = PROBE_TIMEOUT_S


def write_bytes(num_bytes: int) -> str:
    """`17179869184` → `16 GiB`."""
    size, unit = float(num_bytes), 0
    while size >= _STEP and unit < len(_UNITS) - 1:
        size, unit = size / _STEP, unit + 1
    return f"{size:.3g} {_UNITS[unit]}" if size < 1000 else f"{size:.0f} {_UNITS[unit]}"  # noqa: PLR2004


def write_seconds(seconds: float) -> str:
    """`0.00042` → `0.42 ms`, `2.5` → `2.5 s`."""
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"  # noqa: PLR2004
