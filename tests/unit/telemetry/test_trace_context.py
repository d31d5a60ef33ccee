"""W3C Trace Context, level 1: what is accepted, what is ignored, and what is sent on."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.telemetry.trace_context import (
    MAX_TRACESTATE_BYTES,
    ParentSpan,
    begin_span,
    parse_traceparent,
    read_context,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01".encode()


def test_a_valid_traceparent_is_read() -> None:
    assert parse_traceparent(VALID) == ParentSpan(TRACE, SPAN, is_sampled=True)
    assert parse_traceparent(VALID[:-2] + b"00") == ParentSpan(TRACE, SPAN, is_sampled=False)
    # Flags beyond the first are not ours to interpret.
    assert parse_traceparent(VALID[:-2] + b"fe") == ParentSpan(TRACE, SPAN, is_sampled=False)


def test_a_later_version_may_have_more_fields() -> None:
    assert parse_traceparent(b"cc" + VALID[2:] + b"-what-comes") is not None
    assert parse_traceparent(b"cc" + VALID[2:]) is not None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00-abc-def-01",
        b"ff" + VALID[2:],
        VALID + b"-more",
        VALID + b"more",
        VALID.upper(),
        b"00-" + b"0" * 32 + b"-" + SPAN.encode() + b"-01",
        b"00-" + TRACE.encode() + b"-" + b"0" * 16 + b"-01",
        VALID + b"\r\nx: y",
        b" " + VALID,
        b"cc" + VALID[2:] + b"-" + b"x" * 300,
    ],
)
def test_what_does_not_follow_the_specification_is_ignored(value: bytes) -> None:
    assert parse_traceparent(value) is None
    found = read_context([(b"traceparent", value), (b"tracestate", b"a=1")])
    assert found.parent is None
    assert found.is_ignored
    span = begin_span(found, is_sampled=False)
    assert span.parent_id == ""
    assert b"tracestate" not in span.headers


def test_two_traceparents_are_none() -> None:
    found = read_context([(b"traceparent", VALID), (b"traceparent", VALID)])
    assert found.parent is None
    assert found.is_ignored


def test_a_request_without_a_trace_begins_one() -> None:
    found = read_context([(b"host", b"x"), (b"tracestate", b"a=1")])
    assert not found.is_ignored
    one, other = (begin_span(found, is_sampled=sampled) for sampled in (True, False))
    assert one.trace_id != other.trace_id
    assert (one.is_sampled, other.is_sampled) == (True, False)


def test_workers_are_children_of_the_gateways_span() -> None:
    headers = [(b"traceparent", VALID), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    span = begin_span(read_context(headers), is_sampled=False)
    assert (span.trace_id, span.parent_id, span.is_sampled) == (TRACE, SPAN, True)
    assert span.span_id != SPAN
    sent = [line.split(b": ") for line in span.headers.split(b"\r\n")[:-1]]
    assert sent[1] == [b"tracestate", b"a=1,b=2"]
    assert parse_traceparent(sent[0][1]) == ParentSpan(TRACE, span.span_id, is_sampled=True)


@pytest.mark.parametrize("state", [b"a=\xff", b"a=1\x00", b"a" * (MAX_TRACESTATE_BYTES + 1), b""])
def test_an_unfit_tracestate_is_dropped_alone(state: bytes) -> None:
    found = read_context([(b"traceparent", VALID), (b"tracestate", state)])
    assert found.parent is not None
    assert found.state == b""


@given(st.binary(max_size=80), st.binary(max_size=600))
def test_nothing_else_is_ever_sent_on(parent: bytes, state: bytes) -> None:
    found = read_context([(b"traceparent", parent), (b"tracestate", state)])
    headers = begin_span(found, is_sampled=True).headers
    line = rb"traceparent: 00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]\r\n(tracestate: [ -~]{1,512}\r\n)?"
    assert re.fullmatch(line, headers)
