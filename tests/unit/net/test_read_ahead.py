"""Bytes read beyond what was asked for: all of them, once, in order."""

from hypothesis import given
from hypothesis import strategies as st

from baton.net.channel import AHEAD_BYTES, ReadAhead

DATA = bytes(i * 7 % 251 for i in range(4 * AHEAD_BYTES))


class Kernel:
    """Gives what it has to the first buffers, and counts how often it was asked."""

    def __init__(self, data):
        self.data, self.num_calls = data, 0

    def receive(self, buffers):
        self.num_calls += 1
        num_given = 0
        for buffer in buffers:
            piece, self.data = self.data[: len(buffer)], self.data[len(buffer) :]
            buffer[: len(piece)] = piece
            num_given += len(piece)
        return num_given


def test_a_header_its_payload_and_the_end_of_it_are_one_call():
    kernel, ahead = Kernel(b"head" + b"x" * 100), ReadAhead()
    place = bytearray(100)
    assert ahead.take(4, kernel.receive) == b"head"
    assert ahead.has_bytes
    assert ahead.place([memoryview(place)], kernel.receive) == 100
    assert place == b"x" * 100
    assert ahead.take(4, kernel.receive) is None
    assert kernel.num_calls == 1
    kernel.data = b"more"
    assert ahead.take(4, kernel.receive) == b"more"


def test_what_is_looked_at_stays_until_it_is_skipped():
    kernel, ahead = Kernel(b"head" + b"x" * 10), ReadAhead()
    assert ahead.peek(kernel.receive)[:4] == b"head"
    assert ahead.peek(kernel.receive)[:4] == b"head"
    ahead.skip(4)
    assert ahead.take(99, kernel.receive) == b"x" * 10
    assert not ahead.peek(kernel.receive)
    assert kernel.num_calls == 1  # the one that brought less than there was room for


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * AHEAD_BYTES)), max_size=12))
def test_every_byte_is_given_once_and_in_order(asked):
    kernel, ahead, given_out = Kernel(DATA), ReadAhead(), b""
    for is_header, num_bytes in asked:
        if is_header:
            given_out += ahead.take(num_bytes, kernel.receive) or b""
        else:
            halves = [memoryview(bytearray(num_bytes // 2)), memoryview(bytearray(num_bytes))]
            num_placed = ahead.place(halves, kernel.receive)
            given_out += (bytes(halves[0]) + bytes(halves[1]))[:num_placed]
    assert DATA.startswith(given_out)
    assert len(given_out) + len(kernel.data) <= len(DATA)
    assert ahead.has_bytes == (len(given_out) + len(kernel.data) < len(DATA))
