"""W3C Trace Context, level 1: `traceparent` and `tracestate` in, the same out.

A header that does not follow the specification is ignored, and a new trace begins: what a client
sends never reaches a worker unchecked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from baton.ids import new_span_id, new_trace_id

if TYPE_CHECKING:
    from collections.abc import Iterable

TRACEPARENT: Final = b"traceparent"
TRACESTATE: Final = b"tracestate"
MAX_TRACEPARENT_BYTES: Final = 256
MAX_TRACESTATE_BYTES: Final = 512
SAMPLED_FLAG: Final = 1

_FIELDS: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE: Final = b"0" * 32
_NO_SPAN: Final = b"0" * 16
_STATE: Final = re.compile(rb"[\x20-\x7e]{1,%d}" % MAX_TRACESTATE_BYTES)


@dataclass(frozen=True, slots=True)
class ParentSpan:
    """The span that a request is part of, as its sender names it. Ids are lower-case hex."""

    trace_id: str
    span_id: str
    is_sampled: bool


class TraceContext(msgspec.Struct, frozen=True):
    """A request's own span: `parent_id` "" begins a trace.

    `headers` are lines that make a receiver's span a child of this one, each with CR LF.
    """

    trace_id: str
    span_id: str
    parent_id: str
    is_sampled: bool
    headers: bytes


@dataclass(frozen=True, slots=True)
class IncomingContext:
    """A request's trace headers: `parent` None: no trace. `is_ignored`: one was invalid."""

    parent: ParentSpan | None
    state: bytes
    is_ignored: bool


_NONE: Final = IncomingContext(None, b"", is_ignored=False)
_IGNORED: Final = IncomingContext(None, b"", is_ignored=True)


def parse_traceparent(value: bytes) -> ParentSpan | None:
    """Read a `traceparent`; None if it does not follow the specification."""
    if len(value) > MAX_TRACEPARENT_BYTES:
        return None
    found = _FIELDS.fullmatch(value)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    is_unknown = version == b"ff" or (version == b"00" and rest is not None)
    if is_unknown or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    is_sampled = bool(int(flags, 16) & SAMPLED_FLAG)
    return ParentSpan(trace_id.decode("ascii"), span_id.decode("ascii"), is_sampled)


def read_context(headers: Iterable[tuple[bytes, bytes]]) -> IncomingContext:
    """The context in a request's headers, whose names are lower-case.

    A `tracestate` that is too long or not printable is dropped, and so is one without a valid
    `traceparent`; neither invalidates the other header.
    """
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == TRACEPARENT:
            parents.append(value)
        elif name == TRACESTATE:
            states.append(value)
    if not parents:
        return _NONE
    parent = parse_traceparent(parents[0]) if len(parents) == 1 else None
    if parent is None:
        return _IGNORED
    state = b",".join(states)
    return IncomingContext(parent, state if _STATE.fullmatch(state) else b"", is_ignored=False)


def begin_span(incoming: IncomingContext, *, is_sampled: bool) -> TraceContext:
    """A new span in the client's trace, or in a new one, which is sampled if `is_sampled`."""
    parent = incoming.parent
    if parent is None:
        trace_id, parent_id = new_trace_id(), ""
        span_id = trace_id[16:]  # unique within its trace
    else:
        trace_id, parent_id, is_sampled = parent.trace_id, parent.span_id, parent.is_sampled
        span_id = new_span_id()
    flags = SAMPLED_FLAG if is_sampled else 0
    headers = f"traceparent: 00-{trace_id}-{span_id}-{flags:02x}\r\n".encode("ascii")
    if incoming.state:
        headers += b"tracestate: %b\r\n" % incoming.state
    return TraceContext(trace_id, span_id, parent_id, is_sampled, headers)
