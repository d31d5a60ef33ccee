"""What two handoff agents say to each other over their link (docs/wire/handoff.md).

Every message is one msgpack map tagged by `t`, decoded into a frozen Struct and checked here:
nothing behind this seam meets a value that the wire format does not allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
import numpy as np

from baton.errors import ProtocolError
from baton.handoff.interface import SampledToken
from baton.ids import Epoch, TicketId, WorkerId
from baton.kv.layout import KVLayout
from baton.telemetry.trace import Stamp
from baton.transfer.interface import RegionDescriptor

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROTOCOL_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
MAX_TOKENS: Final = 16 * 1024 * 1024
DIGEST_BYTES: Final = 16

Text = Annotated[str, msgspec.Meta(max_length=2000)]
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
WireTicketId = Annotated[TicketId, msgspec.Meta(min_length=16, max_length=16)]


class _Message(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """A message on the link."""


class Hello(_Message, frozen=True, tag="hello"):
    """First from each side. `regions` is where the sender's own pages can be written.

    `clock_domain` names the clock of its stamps: where both have the same one, none is shifted.
    """

    version: int
    worker: WorkerId
    epoch: Epoch
    clock_domain: Text
    fingerprint: Text
    layout: KVLayout
    regions: Annotated[tuple[RegionDescriptor, ...], msgspec.Meta(max_length=16)]


class Refused(_Message, frozen=True, tag="refused"):
    """Instead of a Hello: the two cannot exchange KV; one readable line for each reason."""

    reasons: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)]


class Grant(_Message, frozen=True, tag="grant"):
    """Decode → prefill: write tokens `[start, num_tokens)` into these blocks of mine.

    `ticket` is the sealed text of the ticket `id`: the gateway's authority. `blocks` are
    little-endian int64, the first of which holds logical block `first_block`.
    """

    id: WireTicketId
    ticket: Annotated[str, msgspec.Meta(max_length=4096)]
    prompt_hash: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    start: TokenCount
    num_tokens: TokenCount
    first_block: TokenCount
    blocks: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES // 2)]


class Declined(_Message, frozen=True, tag="declined"):
    """Decode → prefill: nothing is wanted (all is cached here); stop computing.

    Carries the sealed ticket, as a Grant does: only its own decode worker may decline it.
    """

    ticket: Annotated[str, msgspec.Meta(max_length=4096)]
    reason: Text


class Finished(_Message, frozen=True, tag="finished"):
    """Prefill → decode: all writes of this ticket are submitted and none will follow.

    `stamps` are instants on the sender's clock.
    """

    ticket: WireTicketId
    first_token: SampledToken
    transport: Text
    expected_transport: Text
    stamps: dict[Stamp, float]


class Failed(_Message, frozen=True, tag="failed"):
    """Either way: this handoff is over, without its KV."""

    ticket: WireTicketId
    reason: Text


class Ping(_Message, frozen=True, tag="ping"):
    """Proof of life; answered by a Pong. `at` is the sender's clock."""

    at: float


class Pong(_Message, frozen=True, tag="pong"):
    """`echo` is the Ping's `at`; `at` the answering side's clock when it answered."""

    echo: float
    at: float


Message: TypeAlias = Hello | Refused | Grant | Declined | Finished | Failed | Ping | Pong


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """Rides on a write: KV of tokens `[start, stop)` of `layer` is in place.

    `digests` has 16 bytes for each piece, in the order of `kv.copies.compute_pieces`.
    """

    layer: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    start: TokenCount
    stop: TokenCount
    digests: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_notice_decoder = msgspec.msgpack.Decoder(Notice)


def encode(message: Message | Notice) -> bytes:
    """The message as msgpack."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview) -> Message:
    """One message.

    Raises:
        ProtocolError: not a message of this version.
    """
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"undecodable handoff message: {exc}") from exc


def decode_notice(notice: bytes) -> Notice:
    """One notice.

    Raises:
        ProtocolError: not a notice.
    """
    try:
        return _notice_decoder.decode(notice)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"undecodable notice: {exc}") from exc


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
    if blocks.size and int(blocks.min()) < 0:
        raise ProtocolError("a negative block id")
    return blocks
