from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ProtocolError
from baton.handoff import messages
from baton.handoff.interface import SampledToken, TokenLogprob
from baton.handoff.messages import (
    PROTOCOL_VERSION,
    Available,
    BlocksExported,
    Declined,
    EncodingCosts,
    EncodingRefused,
    ExcludeTransport,
    ExportRefused,
    Failed,
    FallbackToWrite,
    Finished,
    Grant,
    Hello,
    HelloRefused,
    Keepalive,
    KVViewDescriptor,
    LeaseRenewed,
    Message,
    Notification,
    Ping,
    Pong,
    ProbeEnd,
    ProbeNotification,
    ProbeReady,
    ProbeRequest,
    ProbeResult,
    ReceivingCosts,
    Release,
    ReleaseAck,
    RenewLease,
    RetransmitRequest,
    Revoke,
    TransferAck,
    TransportFailed,
    UnsupportedHello,
    decode,
    decode_notification,
    decode_probe_notification,
    encode,
    pack_blocks,
    unpack_blocks,
)
from baton.handoff.token_ranges import LayerTokenRange, pack_ranges, unpack_ranges
from baton.ids import Epoch, RegionHandle, TicketId, WorkerId
from baton.kv.layout import KVLayout
from baton.telemetry.trace import Stamp
from baton.transfer.interface import PageArray, RegionDescriptor

if TYPE_CHECKING:
    from types import UnionType

ID = TicketId(b"0123456789abcdef")
GOLDEN = Path(__file__).parents[2] / "vectors" / "handoff" / "messages.json"

MESSAGES: dict[str, Message] = {
    "hello": Hello(
        version=4,
        worker=WorkerId("decode-0"),
        epoch=Epoch("e" * 32),
        clock_domain="boot",
        fingerprint="f" * 64,
        views=(
            KVViewDescriptor(
                KVLayout.gqa(2, 2, 8, block_size=16, dtype="float32"),
                (
                    RegionDescriptor(
                        "tcp",
                        RegionHandle(b"r" * 16),
                        Epoch("e" * 32),
                        (PageArray(0, 2048, 4),),
                        "h:1",
                    ),
                ),
            ),
        ),
        traits={"engine": "transformers"},
        preferred_op="WRITE",
        probe_buffers=(),
        lease_s=10.0,
    ),
    "refused": HelloRefused(("another model",)),
    "grant": Grant(ID, "sealed", b"p" * 32, 16, 40, 1, pack_blocks(np.array([7, 3])), "WRITE"),
    "grant_to_read": Grant(ID, "sealed", b"p" * 32, 16, 40, 1, b"", "READ", ("shared",)),
    "grant_to_import": Grant(ID, "sealed", b"p" * 32, 16, 40, 1, b"", "NONE"),
    "grant_encoded": Grant(
        ID, "sealed", b"p" * 32, 16, 40, 1, pack_blocks(np.array([7, 3])), "WRITE",
        encoding="int8/1", costs=ReceivingCosts(8e-9, {"int8/1": 4e-10, "fp8/1": 5e-10}),
    ),
    "encoding_refused": EncodingRefused(ID, "raw", 0.5, 0.625, 0.375),
    "encoding_costs": EncodingCosts("int8/1", 5e-10, 8e-9),
    "encoding_costs_of_a_new_link": EncodingCosts("int8/1", 5e-10, None),
    "blocks_exported": BlocksExported(ID, 1, pack_blocks(np.array([7, 3]))),
    "export_refused": ExportRefused(ID, "128 blocks are lent, at most 128 may be"),
    "release": Release((ID, TicketId(b"f" * 16))),
    "release_ack": ReleaseAck((ID,)),
    "revoke": Revoke((ID,)),
    "available": Available(ID, 3, 16, 40, 1, pack_blocks(np.array([7, 3])), b"d" * 32),
    "available_layers": Available(
        ID, 3, 16, 40, 1, pack_blocks(np.array([7, 3])), b"d" * 64, num_layers=2
    ),
    "transfer_ack": TransferAck(ID, "shared", "tcp"),
    "transport_failed": TransportFailed(ID, "shared"),
    "retransmit_request": RetransmitRequest(ID, "shared",
        pack_ranges([LayerTokenRange(0, 16, 40), LayerTokenRange(3, 32, 40)])
    ),
    "exclude_transport": ExcludeTransport(ID, "shared", "digest mismatch"),
    "fallback_to_write": FallbackToWrite(
        ID, ("shared",), 1, pack_blocks(np.array([7, 3])), pack_ranges([LayerTokenRange(0, 16, 40)])
    ),
    "probe_request": ProbeRequest(ID, "tcp"),
    "probe_ready": ProbeReady(ID),
    "probe_result": ProbeResult(ID, is_intact=True),
    "probe_end": ProbeEnd(ID),
    "declined": Declined("sealed", "all is cached"),
    "finished": Finished(
        ID, SampledToken(5, -0.25, (TokenLogprob(5, -0.25),)), "tcp", "shared",
        {Stamp.PREFILL_DONE: 1.5},
    ),
    "finished_without_token": Finished(ID, None, "", "", {}),
    "failed": Failed(ID, "the client left"),
    "renew_lease": RenewLease(1.25, (ID,)),
    "lease_renewed": LeaseRenewed(1.25, (ID,)),
    "keepalive": Keepalive(0.25, (ID,)),
    "ping": Ping(1.25),
    "pong": Pong(1.25, 2.5),
}  # fmt: skip


def test_golden_bytes() -> None:
    """The wire format changes only together with `PROTOCOL_VERSION` and the golden file."""
    golden = json.loads(GOLDEN.read_text())
    assert {name: encode(message).hex() for name, message in MESSAGES.items()} == golden


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_come_back(name: str) -> None:
    assert decode(encode(MESSAGES[name])) == MESSAGES[name]


@given(st.binary(max_size=300))
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    for read in (decode, decode_notification, decode_probe_notification):
        with pytest.raises(ProtocolError):
            read(data)


@given(st.sampled_from(sorted(MESSAGES)), st.integers(0, 500), st.integers(0, 255))
def test_one_wrong_byte_never_gives_another_kind_of_error(name: str, at: int, byte: int) -> None:
    raw = bytearray(encode(MESSAGES[name]))
    raw[at % len(raw)] = byte
    try:
        decode(bytes(raw))
    except ProtocolError:
        return


@pytest.mark.parametrize("name", MESSAGES)
def test_every_truncation_is_refused(name: str) -> None:
    raw = encode(MESSAGES[name])
    for length in range(len(raw)):
        with pytest.raises(ProtocolError):
            decode(raw[:length])


def test_absurd_counts_are_refused() -> None:
    wrong = (
        Notification(-1, 0, 1, b""),
        Notification(0, -5, 1, b""),
        Notification(0, 0, 1 << 60, b""),
    )
    for notification in (
        *wrong,
        Notification(0, 0, 1, b"", 0),
        Notification(0, 0, 1, b"", 1 << 60),
    ):
        with pytest.raises(ProtocolError):
            decode_notification(encode(notification))


@pytest.mark.parametrize("at", [math.nan, math.inf, -math.inf, 1e300])
def test_instants_are_finite(at: float) -> None:
    """Others would stay in the sums of this worker's reports, and JSON has none of them."""
    finished = Finished(ID, None, "", "", {Stamp.PREFILL_DONE: at})
    for message in (finished, Ping(at), Pong(1.0, at), Pong(at, 1.0), RenewLease(at, ())):
        with pytest.raises(ProtocolError):
            decode(encode(message))
    with pytest.raises(ProtocolError):
        decode_notification(encode(Notification(0, 0, 1, b"", 1, finished)))


def test_a_notice_of_several_layers_is_one_for_each() -> None:
    assert Notification(3, 5, 9, b"aabbcc", 3).split() == (
        Notification(3, 5, 9, b"aa"),
        Notification(4, 5, 9, b"bb"),
        Notification(5, 5, 9, b"cc"),
    )
    assert Notification(3, 5, 9, b"", 2).split() == (
        Notification(3, 5, 9, b""),
        Notification(4, 5, 9, b""),
    )
    with pytest.raises(ProtocolError, match="5 bytes of digests, 3 layers"):
        Notification(3, 5, 9, b"aabbc", 3).split()


def test_block_ids_are_checked() -> None:
    assert unpack_blocks(pack_blocks(np.array([3, 1, 2]))).tolist() == [3, 1, 2]
    with pytest.raises(ProtocolError, match="list of block ids"):
        unpack_blocks(b"123")
    with pytest.raises(ProtocolError, match="negative"):
        unpack_blocks(pack_blocks(np.array([-1])))


@pytest.mark.parametrize("version", [1, 2, 3, 5, 6, PROTOCOL_VERSION + 1])
def test_a_hello_of_another_version_is_known_as_one(version: int) -> None:
    """Whatever fields it has: version 1 had `layout` and `regions`, 2 no `op`, 3 no lease."""
    raw = msgspec.msgpack.encode({
        "t": "hello",
        "version": version,
        "worker": "old",
        "layout": {},
        "regions": [],
        "new": 1,
    })
    assert decode(raw) == UnsupportedHello(version, "old")


def test_a_hello_of_this_version_is_taken_strictly() -> None:
    raw = msgspec.msgpack.encode({
        "t": "hello",
        "version": PROTOCOL_VERSION,
        "worker": "p",
        "new": 1,
    })
    with pytest.raises(ProtocolError):
        decode(raw)
    with pytest.raises(ProtocolError, match="no worker sends"):
        decode(encode(UnsupportedHello(2, "x")))


def test_a_probes_notice_comes_back() -> None:
    notification = ProbeNotification(64, b"d" * 16)
    assert decode_probe_notification(encode(notification)) == notification


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 4, 4)],
        [(0, 5, 4)],
        [(-1, 0, 4)],
        [(0, -1, 4)],
        [(0, 0, 4), (0, 0, 4)],
        [(0, 0, 4), (0, 3, 9)],
        [(0, 4, 9), (0, 0, 4)],
        [(1, 0, 4), (0, 4, 9)],
    ],
)
def test_ranges_that_are_none_are_refused(rows: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ProtocolError):
        unpack_ranges(np.array(rows, dtype="<i4").tobytes())
    with pytest.raises(ProtocolError):
        unpack_ranges(b"12345")


@pytest.mark.parametrize(
    ("base", "union"),
    [
        (messages.ReceiverMessage, messages.ToReceiver),
        (messages.SenderMessage, messages.ToSender),
        (messages.ImporterMessage, messages.ToImporter),
        (messages.ProberMessage, messages.ToProber),
        (messages.ProbeTargetMessage, messages.ToProbeTarget),
    ],
)
def test_a_message_is_in_the_union_of_its_addressee(base: type, union: UnionType) -> None:
    assert set(get_args(union)) - {Failed} == set(base.__subclasses__())


def test_digests_of_several_layers_are_as_many_for_each():
    whole = Available(ID, 3, 16, 40, 1, b"", b"a" * 16 + b"b" * 16 + b"c" * 16, num_layers=3)
    part = whole.part(range(4, 6))
    assert (part.layer, part.num_layers, part.digests) == (4, 2, b"b" * 16 + b"c" * 16)
    uneven = encode(whole).replace(b"\xc4\x30" + whole.digests, b"\xc4\x2f" + whole.digests[1:])
    assert uneven != encode(whole)
    with pytest.raises(ProtocolError, match="47 bytes of digests for 3 layers"):
        decode(uneven)
