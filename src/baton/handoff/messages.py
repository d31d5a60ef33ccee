"""The messages between two handoff agents over their link (docs/wire/handoff.md).

Every message is one msgpack map tagged by `t`, decoded into a frozen Struct and checked here:
nothing behind this seam meets a value that the wire format does not allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np

from baton.encodings.interface import RAW
from baton.errors import UNDECODABLE, ProtocolError
from baton.handoff.interface import SampledToken
from baton.ids import Epoch, TicketId, WorkerId
from baton.kv.device_digest import DigestKind
from baton.kv.layout import KVLayout
from baton.telemetry.trace import Stamp
from baton.transfer.interface import RegionDescriptor

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROTOCOL_VERSION: Final = 14
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
MAX_TOKENS: Final = 16 * 1024 * 1024
DIGEST_BYTES: Final = 16
MAX_BATCH: Final = 1024
"""Tickets in one message."""

MAX_REASON_CHARS: Final = 2000

Text = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
WireTicketId = Annotated[TicketId, msgspec.Meta(min_length=16, max_length=16)]
PackedBlocks = Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES // 2)]
LayerNumber = Annotated[int, msgspec.Meta(ge=0, le=4096)]
LayerCount = Annotated[int, msgspec.Meta(ge=1, le=4096)]
TransportName = Annotated[str, msgspec.Meta(max_length=64)]
EncodingName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
MAX_BYTE_S: Final = 1.0
SecondsPerByte = Annotated[float, msgspec.Meta(gt=0, le=MAX_BYTE_S)]
MAX_PREDICTED_S: Final = 1e9
PredictedSeconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_PREDICTED_S)]
TraitName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
MAX_TRAIT_CHARS: Final = 256
TraitValue = Annotated[str, msgspec.Meta(max_length=MAX_TRAIT_CHARS)]

LeaseSeconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
IdleSeconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
MAX_INSTANT_S: Final = 1e12
InstantS = Annotated[float, msgspec.Meta(ge=-MAX_INSTANT_S, le=MAX_INSTANT_S)]
"""Seconds on a peer's clock: finite, since sums and reports are made of them."""
Tickets = Annotated[tuple[WireTicketId, ...], msgspec.Meta(max_length=MAX_BATCH)]

TransferOp = Literal["WRITE", "READ"]
"""Prefill WRITEs into decode's pages, or decode READs prefill's."""
GrantOp = Literal["WRITE", "READ", "NONE"]
"""What a grant may ask for; "NONE": nothing is copied (mode "reference")."""


class _Message(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """A message on the link. Its subclasses are for one part of an agent each."""


class ReceiverMessage(_Message, frozen=True):
    """Prefill → decode, for the `DecodeReceiver`."""


class SenderMessage(_Message, frozen=True):
    """Decode → prefill, for the `PrefillSender`."""


class ImporterMessage(_Message, frozen=True):
    """Prefill → decode, for the `SharedBlockImporter`: about blocks that are read in place."""


class ProberMessage(_Message, frozen=True):
    """For the `LinkProber` of the side that probes."""


class ProbeTargetMessage(_Message, frozen=True):
    """For the `ProbeTarget` of the side that is probed."""


class KVViewDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One KV view of a worker: pages of `layout`, and where each of its transports reaches them.

    `digest` is how both ends digest its pages: "sum128" where they are in a device's memory.
    """

    layout: KVLayout
    regions: Annotated[tuple[RegionDescriptor, ...], msgspec.Meta(max_length=16)]
    digest: DigestKind = "xxh3"


class Hello(_Message, frozen=True, tag="hello"):
    """First from each side. `views` are the sender's, best first.

    `clock_domain` names the clock of its stamps: where both have the same one, none is shifted, and
    both are on one host.
    `traits` are readable properties of the worker, which only explain a refusal. `preferred_op`:
    whether the sender would receive by WRITE or READ, if it can be chosen. `probe_buffers` are
    where probes may be written (`transfer.links.scratch`), empty where the sender wants none.
    `lease_s` is how long the sender holds a computed prompt without a renewal.
    """

    version: int
    worker: WorkerId
    epoch: Epoch
    clock_domain: Text
    fingerprint: Text
    views: Annotated[tuple[KVViewDescriptor, ...], msgspec.Meta(min_length=1, max_length=8)]
    traits: Annotated[dict[TraitName, TraitValue], msgspec.Meta(max_length=32)]
    preferred_op: TransferOp
    probe_buffers: Annotated[tuple[RegionDescriptor, ...], msgspec.Meta(max_length=16)]
    lease_s: LeaseSeconds


class UnsupportedHello(_Message, frozen=True, tag="unsupported_hello"):
    """What `decode` makes of a Hello of another version: no worker sends it."""

    version: int
    worker: str


class HelloRefused(_Message, frozen=True, tag="refused"):
    """Instead of a Hello: the two cannot exchange KV; one readable line for each reason."""

    reasons: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)]


class ReceivingCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By what decode has chosen an encoding: seconds for a byte, as it knows them.

    On the link, and to decode a byte of raw KV, by encoding: of all in which it has room for this
    handoff's KV.
    """

    link_byte_s: SecondsPerByte
    decode_byte_s: Annotated[
        dict[EncodingName, SecondsPerByte], msgspec.Meta(min_length=1, max_length=16)
    ]


class Grant(SenderMessage, frozen=True, tag="grant"):
    """Decode → prefill: I want KV of tokens `[start, num_tokens)`.

    With op "WRITE" it is to be written into `blocks` of my view: little-endian int64, the
    first of which holds logical block `first_block`. With op "READ" I read it as it becomes
    `Available`, and `blocks` is empty. With op "NONE" it is to be `BlocksExported`, and `blocks` is
    empty. `ticket` is the sealed text of the ticket `id`: the gateway's authority.
    What is written over a transport that `no_digest_transports` names needs no digests: its
    receiver compares none. With `plain_digests` both are on one host: no digest needs a key.
    The KV is to come in `encoding`, through the views of both sides for that one. Where that is
    not raw, and `costs` are there, the sender may answer with `EncodingRefused`.
    """

    id: WireTicketId
    ticket: Annotated[str, msgspec.Meta(max_length=4096)]
    prompt_hash: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    start: TokenCount
    num_tokens: TokenCount
    first_block: TokenCount
    blocks: PackedBlocks
    op: GrantOp
    no_digest_transports: Annotated[tuple[TransportName, ...], msgspec.Meta(max_length=16)] = ()
    plain_digests: bool = False
    encoding: EncodingName = RAW
    costs: ReceivingCosts | None = None


class Declined(SenderMessage, frozen=True, tag="declined"):
    """Decode → prefill: nothing is granted (all is cached here, or it ended early); stop computing.

    Carries the sealed ticket, as a Grant does: only its own decode worker may decline it.
    """

    ticket: Annotated[str, msgspec.Meta(max_length=4096)]
    reason: Text


class Available(ReceiverMessage, frozen=True, tag="available"):
    """Prefill → decode, op "READ": KV of tokens `[start, stop)` can be read.

    Of `num_layers` layers from `layer` on, it lies in `blocks` of the sender's view, the first of
    which holds logical block `first_block`, and holds still until the ticket is `TransferAck` or
    has failed. `digests` as in a `Notification`, layer after layer.
    """

    ticket: WireTicketId
    layer: LayerNumber
    start: TokenCount
    stop: TokenCount
    first_block: TokenCount
    blocks: PackedBlocks
    digests: bytes
    num_layers: LayerCount = 1

    def __post_init__(self) -> None:
        if len(self.digests) % self.num_layers:
            raise ValueError(f"{len(self.digests)} bytes of digests for {self.num_layers} layers")

    @property
    def layers(self) -> range:
        """The layers' numbers."""
        return range(self.layer, self.layer + self.num_layers)

    def part(self, layers: range) -> Available:
        """The same, of some of its layers."""
        size = len(self.digests) // self.num_layers
        first, stop = (layer - self.layer for layer in (layers.start, layers.stop))
        digests = self.digests[size * first : size * stop]
        return msgspec.structs.replace(
            self, layer=layers.start, num_layers=len(layers), digests=digests
        )


class TransferAck(SenderMessage, frozen=True, tag="transfer_ack"):
    """Decode → prefill: all landed, or was read, and was verified; the source may change.

    `transport` is what carried it (most of it), `expected_transport` what should have.
    `closes_grant`: every write arrived by itself, so I close the write grant without asking over
    transports whose writes are over when they are reported (`CloseGrant`, docs/wire/transfer.md).
    """

    ticket: WireTicketId
    transport: TransportName
    expected_transport: TransportName
    closes_grant: bool = False


class TransportFailed(ReceiverMessage, frozen=True, tag="transport_failed"):
    """Prefill → decode: `transport` failed; no hand of mine is in your pages through it any more.

    Nothing of this ticket will be submitted over it. Answered by `RetransmitRequest`, once the
    decode worker's own end of that transport is closed for this ticket too.
    """

    ticket: WireTicketId
    transport: TransportName


class RetransmitRequest(SenderMessage, frozen=True, tag="retransmit_request"):
    """Decode → prefill: `transport` is closed for this ticket; these ranges have not landed.

    `ranges` are little-endian int32 `[n][3]`: layer, start, stop.
    """

    ticket: WireTicketId
    transport: TransportName
    ranges: PackedBlocks


class ExcludeTransport(SenderMessage, frozen=True, tag="exclude_transport"):
    """Decode → prefill: what came over `transport` was wrong. `TransportFailed` follows."""

    ticket: WireTicketId
    transport: TransportName
    reason: Text


class FallbackToWrite(SenderMessage, frozen=True, tag="fallback_to_write"):
    """Decode → prefill, op "READ": I can read no more; from now on the op is "WRITE".

    `transports` are those that I read with, which failed: take another. Write what is not in place
    (`ranges` as in `RetransmitRequest`), and all that you have not announced, into `blocks` (as in
    a `Grant`). Announcements that cross this message are void.
    """

    ticket: WireTicketId
    transports: Annotated[tuple[TransportName, ...], msgspec.Meta(max_length=16)]
    first_block: TokenCount
    blocks: PackedBlocks
    ranges: PackedBlocks


class BlocksExported(ReceiverMessage, frozen=True, tag="blocks_exported"):
    """Prefill → decode, op "NONE": the granted tokens' KV lies in `blocks` of my view.

    In all layers; `first_block` as in a `Grant`. They are the decode worker's to read, and change
    no more, until it sends `Release` or its process has ended.
    """

    ticket: WireTicketId
    first_block: TokenCount
    blocks: PackedBlocks


class ExportRefused(ReceiverMessage, frozen=True, tag="export_refused"):
    """Prefill → decode, op "NONE": I cannot export; let me write. `FallbackToWrite` follows."""

    ticket: WireTicketId
    reason: Text


class Release(SenderMessage, frozen=True, tag="release"):
    """Decode → prefill: I will not read what was, or may have been, exported for these tickets."""

    tickets: Tickets


class ReleaseAck(ImporterMessage, frozen=True, tag="release_ack"):
    """Prefill → decode: answer to `Release`; nothing is pending for these tickets any more."""

    tickets: Tickets


class Revoke(ImporterMessage, frozen=True, tag="revoke"):
    """Prefill → decode: return these as soon as you have room for a copy of your own."""

    tickets: Tickets


class Finished(ReceiverMessage, frozen=True, tag="finished"):
    """Prefill → decode: every write of this ticket is submitted, or all of it announced.

    None will follow. `stamps` are instants on the sender's clock. Where `first_token` is None the
    decode worker samples it itself.
    """

    ticket: WireTicketId
    first_token: SampledToken | None
    transport: Text
    expected_transport: Text
    stamps: dict[Stamp, InstantS]


class Failed(_Message, frozen=True, tag="failed"):
    """Either way: this handoff is over, without its KV."""

    ticket: WireTicketId
    reason: Text


class RenewLease(SenderMessage, frozen=True, tag="renew_lease"):
    """Decode → prefill: these are queued or being read here; hold them. `at` is my clock.

    Answered by a `LeaseRenewed`, and a `Failed` for each ticket whose lease ran out before.
    """

    at: InstantS
    tickets: Tickets


class LeaseRenewed(ReceiverMessage, frozen=True, tag="lease_renewed"):
    """Answer: these are held. `at` is the `RenewLease`'s."""

    at: InstantS
    tickets: Tickets


class Keepalive(ReceiverMessage, frozen=True, tag="keepalive"):
    """Prefill → decode: these prompts are queued in my engine, or being computed.

    `idle_s`: for how long the engine has been silent (the engine, not the sender of this message).
    """

    idle_s: IdleSeconds
    tickets: Tickets


class EncodingCosts(ReceiverMessage, frozen=True, tag="encoding_costs"):
    """Prefill → decode: what KV in `encoding` costs on my side, so that you can choose.

    `encode_byte_s` are seconds to encode a byte of raw KV; `write_byte_s` seconds for each byte
    that I write to you, as measured; None where that link was not.
    """

    encoding: EncodingName
    encode_byte_s: SecondsPerByte
    write_byte_s: SecondsPerByte | None


class EncodingRefused(ReceiverMessage, frozen=True, tag="encoding_refused"):
    """Prefill → decode: KV in `encoding` would be there sooner; send me a grant of such pages.

    `encoding` is raw, or another one for which the grant has costs. Nothing was sent into the
    granted pages, and nothing will be. Predicted, from the grant until all KV is there: `raw_s`,
    and `encoded_s` in `encoding` (in the granted one, where that is raw); for `prefill_s` of these
    the prompt is still being computed.
    """

    ticket: WireTicketId
    encoding: EncodingName
    raw_s: PredictedSeconds
    encoded_s: PredictedSeconds
    prefill_s: PredictedSeconds


class ProbeRequest(ProbeTargetMessage, frozen=True, tag="probe_request"):
    """The side that writes: let me write probes over `transport` into your scratch landing pages.

    `id` names the write grant.
    """

    id: WireTicketId
    transport: TransportName


class ProbeReady(ProberMessage, frozen=True, tag="probe_ready"):
    """Answer: the write grant is open, for this peer alone."""

    id: WireTicketId


class ProbeResult(ProberMessage, frozen=True, tag="probe_result"):
    """Answer to the notification of one probe: whether its bytes were right."""

    id: WireTicketId
    is_intact: bool


class ProbeEnd(ProbeTargetMessage, frozen=True, tag="probe_end"):
    """The side that writes: close the write grant."""

    id: WireTicketId


class Ping(_Message, frozen=True, tag="ping"):
    """Proof of life; answered by a Pong. `at` is the sender's clock."""

    at: InstantS


class Pong(_Message, frozen=True, tag="pong"):
    """`echo` is the Ping's `at`; `at` the answering side's clock when it answered."""

    echo: InstantS
    at: InstantS


ToReceiver: TypeAlias = (
    Available
    | TransportFailed
    | BlocksExported
    | ExportRefused
    | Finished
    | Failed
    | LeaseRenewed
    | Keepalive
    | EncodingCosts
    | EncodingRefused
)
"""From a prefill worker, about what this worker receives."""

ToSender: TypeAlias = (
    Grant
    | Declined
    | TransferAck
    | RetransmitRequest
    | ExcludeTransport
    | FallbackToWrite
    | Failed
    | RenewLease
    | Release
)
"""From a decode worker, about what this worker sends.

`Failed` goes either way: from a peer that was dialed here it is for the receiver, from one that
dialed it is for the sender, as KV goes to the side that dials.
"""

ToImporter: TypeAlias = ReleaseAck | Revoke
ToProber: TypeAlias = ProbeReady | ProbeResult
ToProbeTarget: TypeAlias = ProbeRequest | ProbeEnd
AddressedMessage: TypeAlias = ToReceiver | ToSender | ToImporter | ToProber | ToProbeTarget
"""What peers that are linked send each other."""

LinkMessage: TypeAlias = Hello | UnsupportedHello | HelloRefused | Ping | Pong
"""About the link itself."""

Message: TypeAlias = LinkMessage | AddressedMessage


class ProbeNotification(msgspec.Struct, frozen=True, array_like=True):
    """Rides on a probe: the first `num_pages` landing pages have this digest (xxh3_128)."""

    num_pages: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Notification(msgspec.Struct, frozen=True, array_like=True):
    """Rides on a write: KV of tokens `[start, stop)` of `num_layers` from `layer` on is in place.

    `digests` has 16 bytes for each piece, in the order of `kv.copies.compute_pieces`, layer after
    layer; or none at all, where the grant excludes digests. `finished`: it was the last write of
    its ticket; then no `Finished` follows over the link, unless the transport fails.
    """

    layer: LayerNumber
    start: TokenCount
    stop: TokenCount
    digests: bytes
    num_layers: LayerCount = 1
    finished: Finished | None = None

    def split(self) -> tuple[Notification, ...]:
        """The same, layer by layer.

        Raises:
            ProtocolError: not as many digests for one layer as for another.
        """
        if self.num_layers == 1:
            return (self,)
        size, rest = divmod(len(self.digests), self.num_layers)
        if rest:
            raise ProtocolError(f"{len(self.digests)} bytes of digests, {self.num_layers} layers")
        return tuple(
            Notification(
                self.layer + i, self.start, self.stop, self.digests[i * size : (i + 1) * size]
            )
            for i in range(self.num_layers)
        )


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_notice_decoder = msgspec.msgpack.Decoder(Notification)
_probe_notice_decoder = msgspec.msgpack.Decoder(ProbeNotification)


class _AnyHello(msgspec.Struct, frozen=True, tag_field="t", tag="hello"):
    """As much of a Hello as every version has."""

    version: int
    worker: Annotated[str, msgspec.Meta(max_length=256)] = "a peer"


_any_hello_decoder = msgspec.msgpack.Decoder(_AnyHello)


def encode(message: Message | Notification | ProbeNotification) -> bytes:
    """The message as msgpack."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview) -> Message:
    """One message; a Hello of another version, whatever is in it, as an `UnsupportedHello`.

    Raises:
        ProtocolError: not a message of this version.
    """
    try:
        message = _decoder.decode(frame)
    except UNDECODABLE as exc:
        other = _try_other_hello(frame)
        if other is None:
            raise ProtocolError(f"undecodable handoff message: {exc}") from exc
        return other
    if isinstance(message, UnsupportedHello):
        raise ProtocolError("a message that no worker sends")
    return message


def _try_other_hello(frame: bytes | memoryview) -> UnsupportedHello | None:
    try:
        hello = _any_hello_decoder.decode(frame)
    except UNDECODABLE:
        return None
    if hello.version == PROTOCOL_VERSION:
        return None
    return UnsupportedHello(hello.version, hello.worker)


def decode_notification(notification: bytes) -> Notification:
    """One notification.

    Raises:
        ProtocolError: not a notification.
    """
    try:
        return _notice_decoder.decode(notification)
    except UNDECODABLE as exc:
        raise ProtocolError(f"undecodable notification: {exc}") from exc


def decode_probe_notification(notification: bytes) -> ProbeNotification:
    """The notification of a probe.

    Raises:
        ProtocolError: not one.
    """
    try:
        return _probe_notice_decoder.decode(notification)
    except UNDECODABLE as exc:
        raise ProtocolError(f"undecodable notification of a probe: {exc}") from exc


def pack_blocks(blocks: NDArray[np.int64]) -> bytes:
    """Block ids as little-endian int64."""
    return blocks.astype("<i8").tobytes()


def unpack_blocks(packed: bytes) -> NDArray[np.int64]:
    """The inverse of `pack_blocks`.

    Raises:
        ProtocolError: not a whole number of ids, or a negative one.
    """
    if len(packed) % 8:
        raise ProtocolError(f"{len(packed)} bytes are not a list of block ids")
    blocks = np.frombuffer(packed, dtype="<i8").astype(np.int64)
    if blocks.size and int(np.minimum.reduce(blocks)) < 0:
        raise ProtocolError("a negative block id")
    return blocks
