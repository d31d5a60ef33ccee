"""Server-sent events: what a stream's bytes mean."""

import pytest

from baton.bench.load import stream
from baton.bench.load.stream import EventParser
from baton.errors import ProtocolError


def test_several_events_in_one_read_and_one_in_several():
    parser = EventParser()
    assert parser.feed(b'data: {"a":1}\n\ndata: {"b"') == [b'{"a":1}']
    assert parser.feed(b":2}\n") == []
    assert parser.feed(b"\ndata: [DONE]\n\n") == [b'{"b":2}', b"[DONE]"]


def test_comments_and_other_fields_are_passed_over():
    assert EventParser().feed(b": ping\n\nevent: x\nid: 3\ndata:no blank\n\n") == [b"no blank"]


def test_an_endless_event_is_refused(monkeypatch):
    monkeypatch.setattr(stream, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    with pytest.raises(ProtocolError):
        parser.feed(b"data: " + b"x" * 200)


def test_endless_lines_of_one_event_are_refused(monkeypatch):
    monkeypatch.setattr(stream, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    with pytest.raises(ProtocolError):
        parser.feed(b"data: 1234\n" * 30)
