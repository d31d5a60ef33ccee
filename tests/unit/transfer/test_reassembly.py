"""Writes that travel on several streams are told of once, when all of them is there."""

import pytest

from baton.errors import ProtocolError
from baton.transfer.transports.tcp import transport
from baton.transfer.transports.tcp.transport import WholeWrite, WriteReassembly
from baton.transfer.transports.tcp.wire import Data

GRANT = bytes(range(16))


def stripe(sequence, stripes, grant=GRANT):
    return Data(sequence, grant, 0, b"", b"", b"", stripes)


def test_a_write_of_one_stripe_is_whole_at_once():
    book = WriteReassembly()
    assert book.stripe_over(stripe(0, 1), b"n", None) == WholeWrite(b"n", None)
    assert book.stripe_over(stripe(1, 1), b"", "no") == WholeWrite(b"", "no")
    assert len(book) == 0


@pytest.mark.parametrize("bearer", range(3))
def test_a_write_is_whole_when_its_last_stripe_is_over(bearer):
    book = WriteReassembly()
    notifications = [b"n" if number == bearer else b"" for number in range(3)]
    assert book.stripe_over(stripe(5, 3), notifications[0], None) is None
    assert book.stripe_over(stripe(6, 2), b"other", None) is None
    assert book.stripe_over(stripe(5, 3), notifications[1], None) is None
    assert book.stripe_over(stripe(5, 3), notifications[2], None) == WholeWrite(b"n", None)
    assert book.stripe_over(stripe(6, 2), b"", None) == WholeWrite(b"other", None)
    assert len(book) == 0


@pytest.mark.parametrize("refused", range(2))
def test_what_is_refused_on_one_stream_is_refused(refused):
    book = WriteReassembly()
    reasons = ["closed" if number == refused else None for number in range(2)]
    assert book.stripe_over(stripe(0, 2), b"n", reasons[0]) is None
    assert book.stripe_over(stripe(0, 2), b"", reasons[1]) == WholeWrite(b"n", "closed")


@pytest.mark.parametrize(
    ("second", "notification"),
    [
        (stripe(0, 3), b""),
        (stripe(0, 1), b""),
        (stripe(0, 2, bytes(16)), b""),
        (stripe(0, 2), b"m"),
    ],
    ids=["more stripes", "one stripe", "another grant", "a second notification"],
)
def test_stripes_that_contradict_each_other_are_an_error(second, notification):
    book = WriteReassembly()
    book.stripe_over(stripe(0, 2), b"n", None)
    with pytest.raises(ProtocolError, match="contradict"):
        book.stripe_over(second, notification, None)


def test_what_one_stream_may_be_ahead_is_bounded(monkeypatch):
    book = WriteReassembly()
    for sequence in range(transport.MAX_UNFINISHED):
        book.stripe_over(stripe(sequence, 2), b"", None)
    with pytest.raises(ProtocolError, match="too far ahead"):
        book.stripe_over(stripe(transport.MAX_UNFINISHED, 2), b"", None)
    monkeypatch.setattr(transport, "MAX_NOTIFICATION_BYTES_HELD", 100)
    book = WriteReassembly()
    for round_ in range(50):  # what is whole counts no more
        book.stripe_over(stripe(round_, 2), bytes(60), None)
        book.stripe_over(stripe(round_, 2), b"", None)
    book.stripe_over(stripe(98, 2), bytes(60), None)
    with pytest.raises(ProtocolError, match="too far ahead"):
        book.stripe_over(stripe(99, 2), bytes(60), None)
