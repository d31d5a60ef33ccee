"""Mooncake's traces: who shared which blocks of 512 tokens, without any text.

{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}

`timestamp` is in milliseconds. `hash_ids[i]` names tokens `[512 i, 512 (i + 1))` of the prompt and
all before them: equal ids are equal tokens.
"""

from __future__ import annotations

from typing import Final

import msgspec

from baton.bench.workloads.asking import Ask, Segment, Segments
from baton.bench.workloads.traces.lines import (
    MAX_INPUT_TOKENS,
    MAX_OUTPUT_TOKENS,
    BrokenLineError,
    Recorded,
    check_length,
)

BLOCK_TOKENS: Final = 512


class Line(msgspec.Struct, frozen=True):
    """One request."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


_decode: Final = msgspec.json.Decoder(Line).decode


class MooncakeReader:
    """See `LineReader`."""

    def read(self, number: int, line: str) -> Recorded | None:
        """See `LineReader`."""
        try:
            found = _decode(line)
        except (msgspec.DecodeError, UnicodeEncodeError) as exc:
            raise BrokenLineError(str(exc)) from exc
        check_length("timestamp", int(found.timestamp), 0, 10**15)
        check_length("input_length", found.input_length, 1, MAX_INPUT_TOKENS)
        check_length("output_length", found.output_length, 0, MAX_OUTPUT_TOKENS)
        ask = Ask(_segments(number, found), max(1, found.output_length))
        return Recorded(ask, found.timestamp / 1000)


def _segments(number: int, line: Line) -> Segments:
    """Blocks by their ids; what ids do not cover is this request's own."""
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
