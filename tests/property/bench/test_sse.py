"""However a stream of events is cut into reads, the same events come out."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton.bench.load.stream import EventParser

DATA = st.binary(max_size=12).filter(lambda data: not set(data) & set(b"\r\n"))
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def streams(draw):
    """Events as lists of data lines, and the bytes that carry them."""
    events = draw(st.lists(st.lists(DATA, min_size=1, max_size=3), max_size=5))
    sent = b""
    for lines in events:
        end = draw(ENDS)
        noise = draw(st.sampled_from([b"", b": ping" + end, b"event: x" + end, b"id: 1" + end]))
        sent += noise + b"".join(b"data: " + line + end for line in lines) + end
    return [b"\n".join(lines) for lines in events], sent


@given(streams(), st.lists(st.integers(0, 200), max_size=8))
def test_events_do_not_depend_on_reads(stream, cuts):
    events, sent = stream
    places = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    parser = EventParser()
    found = [event for start, end in pairwise(places) for event in parser.feed(sent[start:end])]
    found += parser.feed(b"\n")  # a CR at the very end may be half of a CR LF
    assert found == events


@given(streams())
def test_a_byte_at_a_time(stream):
    events, sent = stream
    parser = EventParser()
    found = [event for byte in sent for event in parser.feed(bytes([byte]))]
    assert found + parser.feed(b"\n") == events
