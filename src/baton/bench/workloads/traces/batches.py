"""Whole requests, one a line, as OpenAI's batch API takes them: no times, real text.

{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [ … ]}}
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from baton.bench.workloads.asking import Ask, Endpoint, GivenBody
from baton.bench.workloads.traces.lines import BrokenLineError, Recorded

ENDPOINTS: Final[dict[str, Endpoint]] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
}


class Line(msgspec.Struct, frozen=True):
    """One request."""

    url: str
    body: dict[str, object]
    method: Literal["POST"] = "POST"


class Limits(msgspec.Struct, frozen=True):
    """What of a body says how long its answer may be."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None


_decode: Final = msgspec.json.Decoder(Line).decode


class BatchReader:
    """See `LineReader`."""

    def read(self, number: int, line: str) -> Recorded | None:
        """See `LineReader`."""
        del number
        try:
            found = _decode(line)
            limits = msgspec.convert(found.body, Limits)
        except (msgspec.DecodeError, UnicodeEncodeError) as exc:
            raise BrokenLineError(str(exc)) from exc
        endpoint = ENDPOINTS.get(found.url)
        if endpoint is None:
            raise BrokenLineError(f"url is {found.url[:60]!r}, not one of {', '.join(ENDPOINTS)}")
        needed = "messages" if endpoint == "chat" else "prompt"
        if needed not in found.body:
            raise BrokenLineError(f"body has no {needed}")
        wanted = limits.max_completion_tokens or limits.max_tokens
        return Recorded(Ask(GivenBody(endpoint, found.body), wanted), None)
