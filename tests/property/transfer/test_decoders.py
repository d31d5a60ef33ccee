"""Arbitrary bytes give a frame, a wish for more, or a ProtocolError, in bounded memory."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.errors import AuthenticationError, ProtocolError
from baton.net.framing import (
    PREFIX_BYTES,
    DialerHandshake,
    FrameDecoder,
    ListenerHandshake,
    encode,
    encode_frame,
)
from baton.transfer.interface import PageArray
from baton.transfer.onesided import wire as onesided_wire
from baton.transfer.scatter_gather import unpack_geometry, unpack_target
from baton.transfer.transports.file import wire as file_wire
from baton.transfer.transports.shared import wire as shared_wire
from baton.transfer.transports.tcp import wire as tcp_wire

MAX_BODY_BYTES = 64
KEY = Credentials.of(ClusterKey(bytes(range(32))))
DECODERS = [
    shared_wire.decode_attach,
    shared_wire.decode_from_writer,
    shared_wire.decode_first_from_receiver,
    shared_wire.decode_from_receiver,
    onesided_wire.decode_attach,
    onesided_wire.decode_from_peer,
    onesided_wire.decode_first_from_owner,
    onesided_wire.decode_from_owner,
    file_wire.decode_attach,
    file_wire.decode_from_writer,
    file_wire.decode_from_receiver,
    tcp_wire.decode_attach,
    tcp_wire.decode_from_dialer,
    tcp_wire.decode_from_listener,
]
ids = st.binary(min_size=16, max_size=16)
data_parts = st.builds(
    tcp_wire.Data,
    sequence=st.integers(0, 1 << 40),
    grant=ids,
    array=st.integers(0, 3),
    dst_pages=st.lists(st.integers(0, 12)).map(lambda pages: np.array(pages, "<u4").tobytes())
    | st.binary(max_size=32),
    spans=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 600)), max_size=4).map(
        lambda spans: np.array(spans, "<u4").tobytes()
    )
    | st.binary(max_size=32),
    notification=st.none() | st.binary(max_size=40),
)


@given(st.lists(st.binary(max_size=MAX_BODY_BYTES)), st.data())
def test_frames_survive_any_cutting(bodies, data):
    stream = b"".join(encode_frame(body) for body in bodies)
    decoder, found = FrameDecoder(MAX_BODY_BYTES), []
    while stream:
        num_bytes = data.draw(st.integers(1, len(stream)))
        decoder.feed(stream[:num_bytes])
        stream = stream[num_bytes:]
        while (body := decoder.take()) is not None:
            found.append(body)
    assert found == bodies


@given(st.lists(st.binary(max_size=MAX_BODY_BYTES), min_size=1))
def test_reading_what_is_missing_stops_at_each_frames_end(bodies):
    stream = b"".join(encode_frame(body) for body in bodies)
    decoder, found = FrameDecoder(MAX_BODY_BYTES), []
    while len(found) < len(bodies):
        if decoder.num_missing_bytes == 0:
            found.append(decoder.take())
            continue
        num_bytes = decoder.num_missing_bytes
        assert num_bytes <= MAX_BODY_BYTES + PREFIX_BYTES
        decoder.feed(stream[:num_bytes])
        stream = stream[num_bytes:]
    assert (found, stream) == (bodies, b"")


@given(st.lists(st.binary(max_size=MAX_BODY_BYTES)), st.data())
def test_whole_frames_may_be_cut_from_what_is_there_between_others(bodies, data):
    stream = memoryview(b"".join(encode_frame(body) for body in bodies))
    decoder, found = FrameDecoder(MAX_BODY_BYTES), []
    while stream:
        there = stream[: data.draw(st.integers(1, len(stream)))]
        body = decoder.cut(there)
        if body is not None:
            num_bytes = PREFIX_BYTES + len(body)
        else:
            num_bytes = min(len(there), decoder.num_missing_bytes)
            decoder.feed(there[:num_bytes])
            body = decoder.take()
        stream = stream[num_bytes:]
        if body is not None:
            found.append(body)
    assert found == bodies


def test_a_frame_that_is_too_large_is_not_cut():
    with pytest.raises(ProtocolError, match="65 bytes"):
        FrameDecoder(MAX_BODY_BYTES).cut(memoryview(encode_frame(bytes(65))))


@given(st.binary(max_size=400))
def test_any_bytes_make_frames_or_wishes_or_an_error(stream):
    decoder, num_taken = FrameDecoder(MAX_BODY_BYTES), 0
    decoder.feed(stream)
    try:
        while (body := decoder.take()) is not None:
            assert len(body) <= MAX_BODY_BYTES
            num_taken += PREFIX_BYTES + len(body)
    except ProtocolError:
        announced = stream[num_taken : num_taken + PREFIX_BYTES]
        assert int.from_bytes(announced, "little") > MAX_BODY_BYTES
    assert num_taken <= len(stream)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_no_bytes_pass_for_a_proof(hello, answer):
    for read in (ListenerHandshake(KEY, "tcp").reply, DialerHandshake(KEY, "tcp").reply):
        with pytest.raises((ProtocolError, AuthenticationError)):
            list(map(read, (hello, answer)))


@pytest.mark.parametrize("decoder", DECODERS)
@given(body=st.binary(max_size=300))
def test_any_body_is_a_message_or_an_error(decoder, body):
    try:
        message = decoder(body)
    except ProtocolError:
        return
    assert decoder(encode(message)) == message


@pytest.mark.parametrize("decoder", DECODERS)
@given(part=data_parts, flips=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255))))
def test_a_damaged_message_is_a_message_or_an_error(decoder, part, flips):
    body = bytearray(encode(part))
    for at, value in flips:
        body[at % len(body)] = value
    try:
        decoder(bytes(body))
    except ProtocolError:
        return


@given(data_parts)
def test_a_geometry_lies_inside_its_array_or_is_an_error(part):
    array = PageArray(4096, 512, 8)
    try:
        geometry = unpack_target(part.dst_pages, part.spans, array)
    except ProtocolError:
        return
    touched = np.zeros((8, 512), np.uint8)
    for page in geometry.pages:
        for start, length in zip(geometry.starts, geometry.lengths, strict=True):
            piece = touched[page, start : start + length]
            assert len(piece) == length > 0
    assert geometry.num_bytes == len(geometry.pages) * sum(geometry.lengths.tolist())


@pytest.mark.parametrize("decoder", DECODERS)
def test_deep_nesting_is_an_error(decoder):
    with pytest.raises(ProtocolError):
        decoder(b"\x81\xa1x" * 100_000 + b"\xc0")
    with pytest.raises(ProtocolError):
        decoder(msgspec.msgpack.encode([]))


@given(st.integers(0, 5), st.integers(0, 600), st.integers(0, 600))
def test_one_page_is_read_as_many_are(page, start, length):
    """One span of one page is unpacked in a way of its own."""
    array, span = PageArray(0, 512, 4), np.array([start, length], "<u4").tobytes()

    def read(num_pages):
        try:
            found = unpack_geometry(np.array([page] * num_pages, "<u4").tobytes(), span, array)
        except ProtocolError as exc:
            return str(exc)
        fields = (found.pages[:1], found.starts, found.lengths)
        return [(each.dtype, each.tolist()) for each in fields]

    assert read(1) == read(2)
