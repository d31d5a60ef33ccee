"""Recorded traffic as a workload. Broken lines are counted and reported.

Mooncake: {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}
    Milliseconds. `hash_ids[i]` names tokens `[512 i, 512 (i + 1))` of the prompt and all before
    them: equal ids are equal tokens.
Azure: a CSV of TIMESTAMP, ContextTokens, GeneratedTokens; nothing about shared prompts.
OpenAI batches: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": { … }}
    Real text, no times.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal, Protocol, assert_never

import msgspec

from baton.bench.workloads.requests import (
    Conversation,
    Endpoint,
    GivenBody,
    Request,
    Segment,
    Segments,
    Workload,
)
from baton.bench.workloads.synthetic import Lengths, new_request
from baton.errors import UNDECODABLE, BatonError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

NUM_SHOWN: Final = 5
MAX_INPUT_TOKENS: Final = 10_000_000
MAX_OUTPUT_TOKENS: Final = 1_000_000


class BrokenLineError(BatonError):
    """A line that is no request of this format."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One line: a request, and when it arrived (seconds; None: not recorded)."""

    ask: Request
    arrival_s: float | None


@dataclass(frozen=True, slots=True)
class Broken:
    """A line that is no request; `number` counts from 1."""

    number: int
    reason: str


class LineReader(Protocol):
    """Parses the lines of one format."""

    def read(self, number: int, line: str) -> Recorded | None:
        """Parse one line; None for a header.

        Raises:
            BrokenLineError: it is no request.
        """
        ...


@dataclass(frozen=True, slots=True)
class TraceLines:
    """All lines of a file."""

    recorded: tuple[Recorded, ...]
    broken: tuple[Broken, ...]

    @property
    def broken_share(self) -> float:
        """The share of broken lines."""
        return len(self.broken) / max(1, len(self.broken) + len(self.recorded))


def read_lines(reader: LineReader, lines: Iterable[str]) -> TraceLines:
    """Parse all lines but empty ones."""
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
    """Check the share of broken lines.

    Raises:
        ConfigError: too many are broken, or none is left.
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


BLOCK_TOKENS: Final = 512


class MooncakeLine(msgspec.Struct, frozen=True):
    """One request."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


_decode_mooncake: Final = msgspec.json.Decoder(MooncakeLine).decode


class MooncakeReader:
    """See `LineReader`."""

    def read(self, number: int, line: str) -> Recorded | None:
        """See `LineReader`."""
        try:
            found = _decode_mooncake(line)
        except (UnicodeEncodeError, *UNDECODABLE) as exc:
            raise BrokenLineError(str(exc)) from exc
        check_length("timestamp", int(found.timestamp), 0, 10**15)
        check_length("input_length", found.input_length, 1, MAX_INPUT_TOKENS)
        check_length("output_length", found.output_length, 0, MAX_OUTPUT_TOKENS)
        ask = Request(_segments(number, found), max(1, found.output_length))
        return Recorded(ask, found.timestamp / 1000)


def _segments(number: int, line: MooncakeLine) -> Segments:
    """Blocks by their ids; the tokens after them belong to this request alone."""
    parts = []
    rest = line.input_length
    for hash_id in line.hash_ids:
        num_tokens = min(rest, BLOCK_TOKENS)
        if num_tokens:
            parts.append(Segment(f"block/{hash_id}", num_tokens))
        rest -= num_tokens
    if rest:
        parts.append(Segment(f"line/{number}", rest))
    return Segments(tuple(parts))


COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FINER_THAN_US: Final = re.compile(r"(\.\d{6})\d+")


class AzureReader:
    """See `LineReader`. The header names the columns; other columns are ignored."""

    def __init__(self) -> None:
        self._places: tuple[int, ...] | None = None

    def read(self, number: int, line: str) -> Recorded | None:
        """See `LineReader`."""
        cells = [cell.strip().strip('"') for cell in line.strip().lstrip("\ufeff").split(",")]
        if self._places is None:
            if not set(COLUMNS) <= set(cells):
                raise BrokenLineError(f"no heading with the columns {', '.join(COLUMNS)}")
            self._places = tuple(cells.index(name) for name in COLUMNS)
            return None
        if len(cells) <= max(self._places):
            raise BrokenLineError(f"{len(cells)} columns")
        when, context, generated = (cells[place] for place in self._places)
        lengths = Lengths(
            check_length("ContextTokens", _number(context), 1, MAX_INPUT_TOKENS),
            max(1, check_length("GeneratedTokens", _number(generated), 0, MAX_OUTPUT_TOKENS)),
        )
        return Recorded(new_request(f"line/{number}", lengths), _instant(when))


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError as exc:
        raise BrokenLineError(f"{text[:40]!r} is no number of tokens") from exc


def _instant(text: str) -> float:
    try:
        found = datetime.fromisoformat(_FINER_THAN_US.sub(r"\1", text))
    except ValueError as exc:
        raise BrokenLineError(f"{text[:40]!r} is no time") from exc
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


ENDPOINTS: Final[dict[str, Endpoint]] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
}


class BatchLine(msgspec.Struct, frozen=True):
    """One request."""

    url: str
    body: dict[str, object]
    method: Literal["POST"] = "POST"


class Limits(msgspec.Struct, frozen=True):
    """The fields of a body that limit its answer."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None


_decode_batch: Final = msgspec.json.Decoder(BatchLine).decode


class BatchReader:
    """See `LineReader`."""

    def read(self, number: int, line: str) -> Recorded | None:
        """See `LineReader`."""
        del number
        try:
            found = _decode_batch(line)
            limits = msgspec.convert(found.body, Limits)
        except (UnicodeEncodeError, *UNDECODABLE) as exc:
            raise BrokenLineError(str(exc)) from exc
        endpoint = ENDPOINTS.get(found.url)
        if endpoint is None:
            raise BrokenLineError(f"url is {found.url[:60]!r}, not one of {', '.join(ENDPOINTS)}")
        needed = "messages" if endpoint == "chat" else "prompt"
        if needed not in found.body:
            raise BrokenLineError(f"body has no {needed}")
        wanted = limits.max_completion_tokens or limits.max_tokens
        return Recorded(Request(GivenBody(endpoint, found.body), wanted), None)


TraceFormat = Literal["mooncake", "azure", "openai"]
MAX_BROKEN_SHARE: Final = 0.01
MAX_FILE_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace file, and how it is replayed.

    `format` None: detected from the first line. `speed` 2 replays it in half the time. More than
    `max_broken_share` of broken lines is an error. `length_divisor` 16 makes prompts, answers and
    shared blocks a sixteenth as long, rounded up, for a model or a machine that is smaller.
    """

    path: Path
    format: TraceFormat | None = None
    speed: float = 1.0
    max_broken_share: float = MAX_BROKEN_SHARE
    length_divisor: int = 1


def read_trace(file: TraceFile) -> Workload:
    """Its requests in the order of arrival, the first at 0.

    Raises:
        ConfigError: it cannot be read, is empty, has too many broken lines, or has texts of its
            own and is to be divided.
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
    if file.length_divisor > 1:
        trace = replace(trace, recorded=tuple(_divide(file, each) for each in trace.recorded))
    return _make_workload(file, kind, trace)


def _divide(file: TraceFile, recorded: Recorded) -> Recorded:
    """The same request with shorter parts."""
    ask, divisor = recorded.ask, file.length_divisor
    if isinstance(ask.prompt, GivenBody):
        raise ConfigError(f"{file.path}: its prompts are texts, whose lengths cannot be divided")
    parts = tuple(
        replace(part, num_tokens=-(-part.num_tokens // divisor)) for part in ask.prompt.parts
    )
    num_output_tokens = ask.num_output_tokens and -(-ask.num_output_tokens // divisor)
    ask = replace(ask, prompt=Segments(parts), num_output_tokens=num_output_tokens)
    return replace(recorded, ask=ask)


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
        _describe(file, kind, len(recorded)),
        generate,
        largest=_as_probe(max((each.ask for each in recorded), key=_size)),
        num_requests=len(recorded),
        has_arrivals=has_arrivals,
        block_tokens=-(-BLOCK_TOKENS // file.length_divisor) if kind == "mooncake" else None,
        warnings=warnings,
    )


def _describe(file: TraceFile, kind: TraceFormat, num_requests: int) -> str:
    """What is replayed: two results with another description did not answer the same."""
    speed = f", {file.speed:g} times as fast" if file.speed != 1 else ""
    divided = f", lengths divided by {file.length_divisor}" if file.length_divisor > 1 else ""
    return f"{num_requests} requests ({kind}){speed}{divided}"


def _arrival(recorded: Recorded) -> float:
    return recorded.arrival_s or 0.0


def _size(ask: Request) -> int:
    if isinstance(ask.prompt, GivenBody):  # characters are no tokens, but the order is the same
        return len(str(ask.prompt.fields.get("messages", ask.prompt.fields.get("prompt"))))
    return ask.prompt.num_tokens + (ask.num_output_tokens or 0)


def _as_probe(ask: Request) -> Request:
    """The same size; generated prompts get other tokens, so that no cache has them later."""
    if isinstance(ask.prompt, GivenBody):
        return ask
    return replace(ask, prompt=Segments((Segment("probe", ask.prompt.num_tokens),)))
