"""Golden bytes: a change to what crosses the wire is a change of version."""

import json
from pathlib import Path

import numpy as np
import pytest

from baton.errors import ProtocolError
from baton.net.framing import FrameDecoder, encode, encode_frame
from baton.transfer import grant_messages, messages
from baton.transfer.interface import PageArray
from baton.transfer.onesided import wire as onesided
from baton.transfer.scatter_gather import unpack_target
from baton.transfer.transports.file import wire as file
from baton.transfer.transports.shared import wire as shared
from baton.transfer.transports.tcp import wire as tcp

VECTORS = Path(__file__).parents[2] / "vectors" / "transfer" / "frames.json"
GOLDEN = json.loads(VECTORS.read_text(encoding="utf-8"))
HOLDER = b"holder of a page"
GRANT, REGION, EPOCH = bytes(range(16)), bytes(range(16, 32)), "0123456789abcdef" * 2
ARRAYS = (PageArray(0, 512, 4),)
PAGES = np.array([3, 1]).astype("<u4").tobytes()

TCP = {
    "attach": (tcp.decode_attach, tcp.Attach(EPOCH, REGION, GRANT)),
    "attached": (tcp.decode_from_listener, tcp.Attached(ARRAYS)),
    "not_attached": (tcp.decode_from_listener, tcp.NotAttached("no such region")),
    "data": (
        tcp.decode_from_dialer,
        tcp.Data(7, GRANT, 1, PAGES, np.array([0, 16, 64, 8]).astype("<u4").tobytes(), b"n"),
    ),
    "data_not_last": (
        tcp.decode_from_dialer,
        tcp.Data(7, GRANT, 1, b"\2\0\0\0", b"\0\0\0\0\0\2\0\0", None),
    ),
    "data_striped": (
        tcp.decode_from_dialer,
        tcp.Data(7, GRANT, 1, b"\2\0\0\0", b"\0\0\0\0\0\2\0\0", b"", 2),
    ),
    "fetch": (tcp.decode_from_dialer, tcp.Fetch(7, 1, PAGES, b"\0\0\0\0\0\2\0\0", GRANT)),
    "fetch_public": (tcp.decode_from_dialer, tcp.Fetch(7, 1, PAGES, b"\0\0\0\0\0\2\0\0")),
    "fetch_refused": (tcp.decode_from_listener, tcp.FetchRefused(7, "no grant for it is open")),
    "fetch_served": (tcp.decode_from_listener, tcp.FetchServed(7)),
    "write_landed": (tcp.decode_from_listener, tcp.WriteLanded(7)),
    "write_refused": (tcp.decode_from_listener, tcp.WriteRefused(7, "the grant is not open")),
}
FILE = {
    "attach": (file.decode_attach, file.Attach(EPOCH, REGION, GRANT)),
    "attached": (
        file.decode_from_receiver,
        file.Attached(ARRAYS, f"baton-{EPOCH}-0123456789abcdef", GRANT),
    ),
    "not_attached": (file.decode_from_receiver, file.NotAttached("no such region")),
    "part_file": (
        file.decode_from_writer,
        file.PartFile(7, GRANT, 1, PAGES, b"\0\0\0\0\0\2\0\0", b"n"),
    ),
    "part_file_not_last": (
        file.decode_from_writer,
        file.PartFile(7, GRANT, 1, PAGES, b"\0\0\0\0\0\2\0\0", None),
    ),
    "write_abandoned": (file.decode_from_writer, file.WriteAbandoned()),
    "part_landed": (file.decode_from_receiver, file.PartLanded(7)),
    "part_refused": (file.decode_from_receiver, file.PartRefused(7, "the grant is not open")),
}
SHARED = {
    "attach": (shared.decode_attach, shared.Attach(EPOCH, REGION, HOLDER, is_only=True)),
    "attached": (shared.decode_first_from_receiver, shared.Attached(ARRAYS)),
    "attached_extent": (shared.decode_first_from_receiver, shared.Attached(ARRAYS, HOLDER)),
    "not_attached": (
        shared.decode_first_from_receiver,
        messages.NotAttached("no such region"),
    ),
    "grant_opened": (shared.decode_from_receiver, grant_messages.GrantOpened(GRANT, PAGES)),
    "close_grant": (shared.decode_from_receiver, grant_messages.CloseGrant(GRANT)),
    "grant_not_open": (shared.decode_from_receiver, grant_messages.GrantNotOpen(GRANT)),
    "write_notification": (shared.decode_from_writer, shared.WriteNotification(GRANT, b"n")),
    "write_notification_of_a_layer": (
        shared.decode_from_writer,
        shared.WriteNotification(GRANT, b"n", 3),
    ),
    "query_grant": (shared.decode_from_writer, grant_messages.QueryGrant(GRANT)),
    "grant_closed": (shared.decode_from_writer, grant_messages.GrantClosed(GRANT)),
    "memory_released": (shared.decode_from_writer, grant_messages.MemoryReleased()),
}
ONE_SIDED = {
    "attach": (onesided.decode_attach, onesided.Attach(EPOCH, REGION)),
    "attached": (onesided.decode_first_from_owner, onesided.Attached(ARRAYS, b"the library")),
    "not_attached": (
        onesided.decode_first_from_owner,
        messages.NotAttached("no such region"),
    ),
    "grant_opened": (onesided.decode_from_owner, grant_messages.GrantOpened(GRANT, PAGES)),
    "close_grant": (onesided.decode_from_owner, grant_messages.CloseGrant(GRANT)),
    "grant_not_open": (onesided.decode_from_owner, grant_messages.GrantNotOpen(GRANT)),
    "write_notification": (onesided.decode_from_peer, onesided.WriteNotification(GRANT, b"n")),
    "query_grant": (onesided.decode_from_peer, grant_messages.QueryGrant(GRANT)),
    "grant_closed": (onesided.decode_from_peer, grant_messages.GrantClosed(GRANT)),
    "transfers_active": (onesided.decode_from_peer, onesided.TransfersActive()),
    "transfers_idle": (onesided.decode_from_peer, onesided.TransfersIdle()),
    "memory_released": (onesided.decode_from_peer, grant_messages.MemoryReleased()),
}
CASES = [
    pytest.param(GOLDEN[kind][name], *case, id=f"{kind} {name}")
    for kind, cases in (("tcp", TCP), ("file", FILE), ("shared", SHARED), ("onesided", ONE_SIDED))
    for name, case in cases.items()
]


@pytest.mark.parametrize(("golden", "decode", "message"), CASES)
def test_messages_are_these_bytes(golden, decode, message):
    assert encode_frame(encode(message)).hex() == golden
    decoder = FrameDecoder(1 << 20)
    decoder.feed(bytes.fromhex(golden))
    assert decode(decoder.take()) == message


def test_every_golden_frame_is_checked():
    cases = {"tcp": TCP, "file": FILE, "shared": SHARED, "onesided": ONE_SIDED}
    assert {kind: of.keys() for kind, of in GOLDEN.items()} == {
        kind: of.keys() for kind, of in cases.items()
    }


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
    assert unpack_target(part.dst_pages, part.spans, ARRAYS[0]).num_bytes == 512
    fields = {name: getattr(part, name) for name in part.__struct_fields__}
    damaged = tcp.Data(**{**fields, **damage})
    with pytest.raises(ProtocolError):
        unpack_target(damaged.dst_pages, damaged.spans, ARRAYS[0])


def test_a_part_that_is_too_large_is_an_error():
    large = PageArray(0, 1 << 30, 8)
    part = tcp.Data(0, GRANT, 0, PAGES, np.array([0, 1 << 30]).astype("<u4").tobytes(), None)
    with pytest.raises(ProtocolError, match="at most"):
        unpack_target(part.dst_pages, part.spans, large)


def test_the_largest_grant_fits_into_a_frame():
    pages = grant_messages.pack_pages(np.arange(grant_messages.MAX_GRANT_PAGES))
    opened = grant_messages.GrantOpened(GRANT, pages, is_announced=True)
    assert len(encode(opened)) <= messages.MAX_BODY_BYTES
