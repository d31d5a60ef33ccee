"""Azure's LLM inference traces: lengths and times, nothing about what prompts share.

TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from baton.bench.workloads.lengths import Lengths, new_ask
from baton.bench.workloads.traces.lines import (
    MAX_INPUT_TOKENS,
    MAX_OUTPUT_TOKENS,
    BrokenLineError,
    Recorded,
    check_length,
)

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FINER_THAN_US: Final = re.compile(r"(\.\d{6})\d+")


class AzureReader:
    """See `LineReader`. The heading says where the columns are; other columns are ignored."""

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
        return Recorded(new_ask(f"line/{number}", lengths), _instant(when))


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
