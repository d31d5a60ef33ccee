"""What the doctor reports: findings, and the report that holds them. The shape of `--json`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.ops.doctor.host import Host

SCHEMA_VERSION: Final = 1
EXIT_OK: Final = 0
EXIT_PROBLEM: Final = 1


class Level(StrEnum):
    """How bad it is.

    `problem`: Baton's default path does not work. `warning`: something that is configured, or that
    this host has the hardware for, does not work or is slow. `note`: worth knowing.
    """

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


class Area(StrEnum):
    """Where in the report a finding stands; in the order of the report."""

    TRANSPORTS = "transports"
    STORE = "store"
    FLEET = "fleet"
    MACHINE = "machine"
    DEVICES = "devices"
    NETWORK = "network"
    MEMORY = "memory"
    LIMITS = "limits"
    KERNEL = "kernel"
    VERSIONS = "versions"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `fix` is one shell command; None: there is nothing to run."""

    area: Area
    name: str
    level: Level
    found: str
    why: str
    fix: str | None = None


def make_printable(finding: Finding) -> Finding:
    """The same without line breaks and control characters.

    Parts of it come from a driver, a library or another host: none of them may steer a terminal.
    """
    return msgspec.structs.replace(
        finding,
        name=one_line(finding.name),
        found=one_line(finding.found),
        why=one_line(finding.why),
        fix=None if finding.fix is None else one_line(finding.fix),
    )


def one_line(text: str) -> str:
    """Text of another process as it may be printed: no line breaks, no control characters."""
    line = " ".join(text.split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, in the order in which they are shown.

    `subject` is the host's name or the gateway's URL; `baton` the version that looked.
    """

    schema: int = SCHEMA_VERSION
    baton: str
    subject: str
    duration_s: float
    findings: tuple[Finding, ...]

    def count(self, level: Level) -> int:
        """Findings of this level."""
        return sum(finding.level is level for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0, or 1 if there is a problem."""
        return EXIT_PROBLEM if self.count(Level.PROBLEM) else EXIT_OK


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
