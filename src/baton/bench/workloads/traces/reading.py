"""A trace file → a workload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, assert_never

from baton.bench.workloads.asking import Conversation, GivenBody, Segment, Segments, Workload
from baton.bench.workloads.traces.azure import AzureReader
from baton.bench.workloads.traces.batches import BatchReader
from baton.bench.workloads.traces.lines import (
    Recorded,
    TraceLines,
    check_lines,
    describe_broken,
    read_lines,
)
from baton.bench.workloads.traces.mooncake import MooncakeReader
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.bench.workloads.asking import Ask
    from baton.bench.workloads.traces.lines import LineReader

TraceFormat = Literal["mooncake", "azure", "openai"]
MAX_BROKEN_SHARE: Final = 0.01
MAX_FILE_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class TraceFile:
    """Where a trace is, and how it is played.

    `format` None: found out by its first line. `speed` 2 plays it in half the time. More than
    `max_broken_share` of broken lines is an error.
    """

    path: Path
    format: TraceFormat | None = None
    speed: float = 1.0
    max_broken_share: float = MAX_BROKEN_SHARE


def read_trace(file: TraceFile) -> Workload:
    """Its requests, in the order of their arrival, the first at 0.

    Raises:
        ConfigError: unreadable, too many broken lines, or nothing in it.
    """
    try:
        if file.path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{file.path}: more than {MAX_FILE_BYTES >> 30} GiB; split it")
        with file.path.open(encoding="utf-8", errors="replace") as lines:
            kind = file.format or _guess_format(lines.readline())
            lines.seek(0)
            trace = read_lines(_reader(kind), lines)
    except OSError as exc:
        raise ConfigError(f"cannot read the trace {file.path}: {exc.strerror}") from exc
    check_lines(trace, str(file.path), file.max_broken_share)
    return _make_workload(file, kind, trace)


def _guess_format(first_line: str) -> TraceFormat:
    if "ContextTokens" in first_line:
        return "azure"
    return "openai" if '"body"' in first_line else "mooncake"


def _reader(kind: TraceFormat) -> LineReader:
    match kind:
        case "mooncake":
            return MooncakeReader()
        case "azure":
            return AzureReader()
        case "openai":
            return BatchReader()
        case other:
            assert_never(other)


def _make_workload(file: TraceFile, kind: TraceFormat, trace: TraceLines) -> Workload:
    has_arrivals = all(each.arrival_s is not None for each in trace.recorded)
    recorded = sorted(trace.recorded, key=_arrival) if has_arrivals else trace.recorded
    first_s = _arrival(recorded[0])

    def generate() -> Iterator[Conversation]:
        for each in recorded:
            arrival_s = (_arrival(each) - first_s) / file.speed if has_arrivals else None
            yield Conversation((each.ask,), arrival_s=arrival_s)

    broken = describe_broken(trace.broken)
    warnings = (f"{len(trace.broken)} broken lines left out: {broken}",) if broken else ()
    return Workload(
        f"trace {file.path.name}",
        f"{len(recorded)} requests ({kind})",
        generate,
        largest=_as_probe(max((each.ask for each in recorded), key=_size)),
        num_requests=len(recorded),
        has_arrivals=has_arrivals,
        warnings=warnings,
    )


def _arrival(recorded: Recorded) -> float:
    return recorded.arrival_s or 0.0


def _size(ask: Ask) -> int:
    if isinstance(ask.prompt, GivenBody):  # words are not tokens, but the longest is the longest
        return len(str(ask.prompt.fields.get("messages", ask.prompt.fields.get("prompt"))))
    return ask.prompt.num_tokens + (ask.num_output_tokens or 0)


def _as_probe(ask: Ask) -> Ask:
    """The same size; of made-up prompts other tokens, that no cache keeps them for later."""
    if isinstance(ask.prompt, GivenBody):
        return ask
    return replace(ask, prompt=Segments((Segment("probe", ask.prompt.num_tokens),)))
