"""Two sides' circumstances → what was not the same. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from baton.bench.load.report import Report

ASKED: Final = ("workload.name", "workload.description", "load.description", "server.endpoint")
"""Where these differ, the two sides were asked different things."""
IGNORED: Final = ("manifest.started_at", "manifest.load_after", "manifest.machine.load")
MOST_LOAD: Final = 0.5


class Difference(msgspec.Struct, frozen=True):
    """One field that is not the same; `is_asked`: so the two were asked different things."""

    field: str
    a: str
    b: str
    is_asked: bool


def find_differences(a: Sequence[Report], b: Sequence[Report]) -> tuple[Difference, ...]:
    """By field; several runs' values are joined. What was asked comes first."""
    one, other = _gather(a), _gather(b)
    found = [
        Difference(name, one.get(name, "-"), other.get(name, "-"), name in ASKED)
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name) and name not in IGNORED
    ]
    return tuple(sorted(found, key=lambda each: not each.is_asked))


def find_cautions(reports: Sequence[Report], side: str) -> Iterator[str]:
    """What makes a side's figures doubtful."""
    for report in reports:
        name = f"{side} ({report.manifest.started_at})"
        if report.is_partial:
            yield f"{name} is partial: {report.stopped or 'interrupted'}"
        for problem in report.client.problems:
            yield f"{name}: {problem}"
        if report.figures.num_failed:
            num = report.figures.num_failed
            yield f"{name}: {num} of {num + report.figures.num_complete} requests failed"
        machine = report.manifest.machine
        if machine.load[0] > MOST_LOAD * machine.num_cpus:
            yield f"{name}: the machine had a load of {machine.load[0]:.1f} before the run"


def _gather(reports: Sequence[Report]) -> dict[str, str]:
    values: dict[str, list[str]] = {}
    for report in reports:
        parts = {
            "manifest": report.manifest,
            "server": report.server,
            "workload": report.workload,
            "load": report.load,
        }
        for name, value in _flatten("", msgspec.to_builtins(parts)):
            values.setdefault(name, []).append(value)
    return {name: ", ".join(dict.fromkeys(each)) for name, each in values.items()}


def _flatten(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        mapping: Mapping[str, object] = value
        for key, each in mapping.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else key, each)
    elif isinstance(value, list | tuple):
        yield prefix, " ".join(map(str, value))
    else:
        yield prefix, str(value)
