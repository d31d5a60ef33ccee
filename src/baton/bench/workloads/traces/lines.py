"""Lines → recorded requests; a line that is none is kept with its number and reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from baton.errors import BatonError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.bench.workloads.asking import Ask

NUM_SHOWN: Final = 5
MAX_INPUT_TOKENS: Final = 10_000_000
MAX_OUTPUT_TOKENS: Final = 1_000_000


class BrokenLineError(BatonError):
    """This line is no request of this format."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One line: a request, and when it arrived (seconds; None: not said)."""

    ask: Ask
    arrival_s: float | None


@dataclass(frozen=True, slots=True)
class Broken:
    """A line that is no request; `number` counts from 1."""

    number: int
    reason: str


class LineReader(Protocol):
    """Reads one format's lines."""

    def read(self, number: int, line: str) -> Recorded | None:
        """One line; None where it is only a heading.

        Raises:
            BrokenLineError: what is wrong.
        """
        ...


@dataclass(frozen=True, slots=True)
class TraceLines:
    """A whole file's."""

    recorded: tuple[Recorded, ...]
    broken: tuple[Broken, ...]

    @property
    def broken_share(self) -> float:
        """Broken lines of all."""
        return len(self.broken) / max(1, len(self.broken) + len(self.recorded))


def read_lines(reader: LineReader, lines: Iterable[str]) -> TraceLines:
    """All lines but empty ones."""
    recorded: list[Recorded] = []
    broken: list[Broken] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = reader.read(number, line)
        except BrokenLineError as exc:
            broken.append(Broken(number, str(exc)))
        else:
            recorded += [] if found is None else [found]
    return TraceLines(tuple(recorded), tuple(broken))


def describe_broken(broken: tuple[Broken, ...]) -> str:
    """The first few, by line."""
    shown = "; ".join(f"line {each.number}: {each.reason}" for each in broken[:NUM_SHOWN])
    rest = len(broken) - NUM_SHOWN
    return shown + (f"; and {rest} more" if rest > 0 else "")


def check_lines(trace: TraceLines, name: str, max_broken_share: float) -> None:
    """Pass, or refuse a file that is mostly something else.

    Raises:
        ConfigError: too many lines are broken, or nothing is left.
    """
    if trace.broken and (trace.broken_share > max_broken_share or not trace.recorded):
        raise ConfigError(
            f"{name}: {len(trace.broken)} of {len(trace.broken) + len(trace.recorded)} lines are "
            f"broken, more than --max-broken {max_broken_share:.0%}: "
            f"{describe_broken(trace.broken)}. Is it another format (--trace-format)?"
        )
    if not trace.recorded:
        raise ConfigError(f"{name}: no requests in it")


def check_length(what: str, value: int, least: int, most: int) -> int:
    """The value, if it is in `[least, most]`.

    Raises:
        BrokenLineError: it is not.
    """
    if not least <= value <= most:
        raise BrokenLineError(f"{what} is {value}, not in [{least}, {most}]")
    return value
