"""Golden bytes: a change to what crosses the wire is a change of version."""

import json
from pathlib import Path

import numpy as np
import pytest

from baton.errors import ProtocolError
from baton.transfer.framing import FrameDecoder, encode_frame
from baton.transfer.interface import PageArray
from baton.transfer.messages import encode
from baton.transfer.transports.shared import wire as shared
from baton.transfer.transports.tcp import wire as tcp

VECTORS = Path(__file__).parents[2] / "vectors" / "transfer" / "frames.json"
GOLDEN = json.loads(VECTORS.read_text(encoding="utf-8"))
WINDOW, REGION, EPOCH = bytes(range(16)), bytes(range(16, 32)), "0123456789abcdef" * 2
ARRAYS = (PageArray(0, 512, 4),)
PAGES = np.array([3, 1]).astype("<u4").tobytes()

TCP = {
    "attach": (tcp.decode_attach, tcp.Attach(EPOCH, REGION)),
    "attached": (tcp.decode_from_receiver, tcp.Attached(ARRAYS)),
    "not_attached": (tcp.decode_from_receiver, tcp.NotAttached("no such region")),
    "data": (
        tcp.decode_data,
        tcp.Data(7, WINDOW, 1, PAGES, np.array([0, 16, 64, 8]).astype("<u4").tobytes(), b"n"),
    ),
    "data_not_last": (
        tcp.decode_data,
        tcp.Data(7, WINDOW, 1, b"\2\0\0\0", b"\0\0\0\0\0\2\0\0", None),
    ),
    "landed": (tcp.decode_from_receiver, tcp.Landed(7)),
    "refused": (tcp.decode_from_receiver, tcp.Refused(7, "the window is not open")),
}
SHARED = {
    "attach": (shared.decode_attach, shared.Attach(EPOCH, REGION)),
    "attached": (shared.decode_first_from_receiver, shared.Attached(ARRAYS)),
    "not_attached": (
        shared.decode_first_from_receiver,
        shared.NotAttached("no such region"),
    ),
    "opened": (shared.decode_from_receiver, shared.Opened(WINDOW, PAGES)),
    "close": (shared.decode_from_receiver, shared.Close(WINDOW)),
    "not_open": (shared.decode_from_receiver, shared.NotOpen(WINDOW)),
    "notice": (shared.decode_from_writer, shared.Notice(WINDOW, b"n")),
    "ask": (shared.decode_from_writer, shared.Ask(WINDOW)),
    "closed": (shared.decode_from_writer, shared.Closed(WINDOW)),
    "released": (shared.decode_from_writer, shared.Released()),
}
CASES = [
    pytest.param(GOLDEN[kind][name], *case, id=f"{kind} {name}")
    for kind, cases in (("tcp", TCP), ("shared", SHARED))
    for name, case in cases.items()
]


@pytest.mark.parametrize(("golden", "decode", "message"), CASES)
def test_messages_are_these_bytes(golden, decode, message):
    assert encode_frame(encode(message)).hex() == golden
    decoder = FrameDecoder(1 << 20)
    decoder.feed(bytes.fromhex(golden))
    assert decode(decoder.take()) == message


def test_every_golden_frame_is_checked():
    assert (GOLDEN["tcp"].keys(), GOLDEN["shared"].keys()) == (TCP.keys(), SHARED.keys())


@pytest.mark.parametrize(
    "damage",
    [
        {"dst_pages": b"123"},
        {"spans": b"1234"},
        {"dst_pages": b"\4\0\0\0"},
        {"spans": b"\0\0\0\0\0\0\0\0"},
        {"spans": b"\1\0\0\0\0\2\0\0"},
        {"spans": b"\0\0\0\0\0\2\0\0" * 2},
        {"spans": b"\xff\xff\xff\xff" * 2},
    ],
)
def test_a_part_that_leaves_its_array_is_an_error(damage):
    _, part = TCP["data_not_last"]
    assert tcp.unpack_geometry(part, ARRAYS[0]).num_bytes == 512
    fields = {name: getattr(part, name) for name in part.__struct_fields__}
    with pytest.raises(ProtocolError):
        tcp.unpack_geometry(tcp.Data(**{**fields, **damage}), ARRAYS[0])


def test_a_part_that_is_too_large_is_an_error():
    large = PageArray(0, 1 << 30, 8)
    part = tcp.Data(0, WINDOW, 0, PAGES, np.array([0, 1 << 30]).astype("<u4").tobytes(), None)
    with pytest.raises(ProtocolError, match="at most"):
        tcp.unpack_geometry(part, large)
