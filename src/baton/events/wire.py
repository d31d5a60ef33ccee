"""vLLM's messages, as bytes from a socket: checked here, plain types afterwards.

A message is three frames: topic, sequence number (8 bytes, big-endian), and a msgpack array
`[published_at, [event, …], data_parallel_rank]`. An event is a map with a `type`; fields that are
not read here are ignored, events of another type counted. docs/wire/kv-events.md.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias, TypeVar, assert_never

import msgspec
import numpy as np
import xxhash

from baton.auth.ticket import hash_tenant
from baton.clock import UnixTime
from baton.errors import UNDECODABLE, ProtocolError
from baton.events.blocks import (
    DEFAULT_MEDIUM,
    ENTRY_NAME_BYTES,
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlocksExpected,
    BlockStored,
    EntriesRemoved,
    EntriesStored,
    EventBatch,
    EventDomain,
    NumberedBatch,
    TiersListed,
    pack_ids,
)
from baton.events.journal import JournalEvent, JournalPage
from baton.ids import StoreId
from baton.kv.layout import MAX_BLOCK_SIZE
from baton.kv.prefix_names import salt_of_adapter

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""Set as the sockets' limit too, so that no larger message is ever held in memory."""

SEQ_BYTES: Final = 8
END_OF_REPLAY: Final = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
MAX_SEQ: Final = 2**63 - 1

T = TypeVar("T")
HashBytes: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
Hashes: TypeAlias = Annotated[tuple[int | HashBytes, ...], msgspec.Meta(max_length=262_144)]
MAX_TOKENS: Final = 4_194_304
TokenIds: TypeAlias = (
    Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...],
        msgspec.Meta(max_length=MAX_TOKENS),
    ]
    | Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)]
)
"""vLLM's are numbers, those of Baton's workers packed (`pack_ids`)."""
Medium: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
MAX_TIERS: Final = 64
MAX_ENTRIES: Final = 262_144
NAMING_BYTES: Final = 16
TierId: TypeAlias = Annotated[StoreId, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Naming: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=NAMING_BYTES, max_length=NAMING_BYTES)]
EntryNames: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=ENTRY_NAME_BYTES * MAX_ENTRIES)]
_NIL: Final = msgspec.Raw(b"\xc0")
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=65_536)]


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    published_at: Annotated[float, msgspec.Meta(ge=0)]
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=262_144)]
    data_parallel_rank: Index | None = None


class _Stored(msgspec.Struct, frozen=True, tag="BlockStored"):
    block_hashes: Hashes
    parent_block_hash: int | HashBytes | None
    token_ids: TokenIds
    block_size: Annotated[int, msgspec.Meta(ge=0, lt=2**20)]
    medium: Medium | None = None
    group_idx: Index | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = _NIL
    salt: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    """The tenant's, hashed: Baton's workers alone send it."""


class _Removed(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    block_hashes: Hashes
    medium: Medium | None = None
    group_idx: Index | None = None


class _Cleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    pass


class _Expected(msgspec.Struct, frozen=True, tag="BlocksExpected"):
    parent_block_hash: int | HashBytes | None
    token_ids: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_SIZE)]
    salt: Annotated[str, msgspec.Meta(max_length=128)] = ""


class _EntriesStored(msgspec.Struct, frozen=True, tag="EntriesStored"):
    tier: TierId
    naming: Naming
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_SIZE)]
    names: EntryNames


class _EntriesRemoved(_EntriesStored, frozen=True, tag="EntriesRemoved"):
    pass


class _Tiers(msgspec.Struct, frozen=True, tag="TiersListed"):
    tiers: Annotated[tuple[TierId, ...], msgspec.Meta(max_length=MAX_TIERS)]


class _Typed(msgspec.Struct, frozen=True):
    type: str


class _Page(msgspec.Struct, frozen=True, array_like=True):
    last: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQ)]
    is_whole: bool
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=1 << 22)]
    is_incomplete: bool = False


_WireEvent: TypeAlias = (
    _Stored | _Removed | _Cleared | _Expected | _EntriesStored | _EntriesRemoved | _Tiers
)
EVENT_TYPES: Final = (
    "BlockStored",
    "BlockRemoved",
    "AllBlocksCleared",
    "BlocksExpected",
    "EntriesStored",
    "EntriesRemoved",
    "TiersListed",
)
"""Of events that workers publish; others are skipped."""
_batches = msgspec.msgpack.Decoder(_Batch)
_events = msgspec.msgpack.Decoder(_WireEvent)
_pages = msgspec.msgpack.Decoder(_Page)
_encoder = msgspec.msgpack.Encoder()
_Keys: TypeAlias = Annotated[list[str], msgspec.Meta(max_length=8)] | None
_PER_BLOCK: Final = msgspec.Meta(max_length=262_144)
_extra_keys = msgspec.msgpack.Decoder(Annotated[list[_Keys], _PER_BLOCK] | None)
_raw_keys = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], _PER_BLOCK])
_keys_of_block = msgspec.msgpack.Decoder(_Keys)
_types = msgspec.msgpack.Decoder(_Typed)


def encode_replay_request(start_seq: int) -> list[bytes]:
    """Ask for everything from `start_seq` on: frames for a DEALER socket."""
    return [b"", start_seq.to_bytes(SEQ_BYTES, "big")]


def is_end_of_replay(frames: list[bytes]) -> bool:
    """Whether these frames, from a DEALER socket, close an answer."""
    return len(frames) == 4 and frames[2] == END_OF_REPLAY  # noqa: PLR2004


def encode_page(page: JournalPage) -> bytes:
    """The answer to who asks for a journal's events: `[last, is_whole, [event, …]]`.

    `true` follows if it is incomplete.
    """
    events = [_for_wire(event) for event in page.events]
    incomplete = (True,) if page.is_incomplete else ()
    return _encoder.encode((page.last, page.is_whole, events, *incomplete))


def _for_wire(event: JournalEvent) -> _WireEvent:
    match event:
        case BlockStored():
            return _Stored(
                event.hashes,
                event.parent,
                event.packed_ids,
                event.block_size,
                event.medium,
                event.group,
                salt=event.salt,
            )
        case BlockRemoved():
            return _Removed(event.hashes, event.medium, event.group)
        case BlocksExpected():
            return _Expected(event.parent, event.packed_ids, event.block_size, event.salt)
        case EntriesStored():
            return _EntriesStored(event.tier, event.naming, event.block_size, event.names)
        case EntriesRemoved():
            return _EntriesRemoved(event.tier, event.naming, event.block_size, event.names)
        case TiersListed():
            return _Tiers(event.tiers)
        case _ as never:
            assert_never(never)


def decode_page(body: bytes, domain: EventDomain) -> JournalPage:
    """Read such an answer.

    Raises:
        ProtocolError: it is none, or out of bounds.
    """
    page = _decode(_pages, body)
    events = [_decode_event(raw, domain) for raw in page.events]
    known = tuple([
        each for each in events if each is not None and not isinstance(each, AllBlocksCleared)
    ])
    return JournalPage(page.last, page.is_whole, known, page.is_incomplete)


def decode_message(frames: list[bytes], domain: EventDomain) -> NumberedBatch:
    """Read the three frames of a live message.

    Raises:
        ProtocolError: they are no message of this format, or out of bounds.
    """
    match frames:
        case [_, seq, payload] if len(seq) == SEQ_BYTES and len(payload) <= MAX_MESSAGE_BYTES:
            number = int.from_bytes(seq, "big")
        case _:
            raise ProtocolError(f"no KV event message: {len(frames)} frames")
    if number > MAX_SEQ:
        raise ProtocolError(f"sequence number {number} is out of range")
    digest = xxhash.xxh3_64_intdigest(payload)
    return NumberedBatch(number, digest, _decode_batch(payload, domain))


def decode_replayed(frames: list[bytes], domain: EventDomain) -> NumberedBatch:
    """Read one message of an answer: an empty frame, then those of the live message.

    Raises:
        ProtocolError: they are no message of this format, or out of bounds.
    """
    match frames:
        case [b"", *rest]:
            return decode_message(rest, domain)
        case _:
            raise ProtocolError("an answer does not start with an empty frame")


def _decode_batch(payload: bytes, domain: EventDomain) -> EventBatch:
    batch = _decode(_batches, payload)
    events = [_decode_event(raw, domain) for raw in batch.events]
    known = tuple(event for event in events if event is not None)
    return EventBatch(
        UnixTime(batch.published_at),
        known,
        num_unknown=len(events) - len(known),
        data_parallel_rank=batch.data_parallel_rank or 0,
    )


def _decode_event(raw: msgspec.Raw, domain: EventDomain) -> BlockEvent | None:
    """An event in plain types; None if it is of a type unknown here."""
    try:
        event = _decode(_events, raw)
    except ProtocolError:
        if _decode(_types, raw).type in EVENT_TYPES:
            raise
        return None
    match event:
        case _Stored():
            salt, num_plain = _read_salt(event)
            return BlockStored(
                domain,
                event.block_hashes,
                event.parent_block_hash,
                _pack(event.token_ids),
                event.block_size,
                event.medium or DEFAULT_MEDIUM,
                event.group_idx or 0,
                salt,
                num_plain,
            )
        case _Removed():
            return BlockRemoved(
                domain, event.block_hashes, event.medium or DEFAULT_MEDIUM, event.group_idx or 0
            )
        case _Cleared():
            return AllBlocksCleared()
        case _Expected():
            return BlocksExpected(
                event.parent_block_hash,
                _pack(event.token_ids),
                event.block_size,
                event.salt,
            )
        case _EntriesRemoved():
            _check_names(event.names)
            return EntriesRemoved(event.tier, event.naming, event.block_size, event.names)
        case _EntriesStored():
            _check_names(event.names)
            return EntriesStored(event.tier, event.naming, event.block_size, event.names)
        case _Tiers():
            return TiersListed(event.tiers)
        case _ as never:
            assert_never(never)


def _check_names(names: bytes) -> None:
    if len(names) % ENTRY_NAME_BYTES:
        raise ProtocolError(f"{len(names)} bytes are no names of entries")


def _pack(token_ids: TokenIds) -> bytes:
    if not isinstance(token_ids, bytes):
        return pack_ids(token_ids)
    if len(token_ids) % 4:
        raise ProtocolError(f"{len(token_ids)} bytes are no packed token ids")
    ids = np.frombuffer(token_ids, "<i4")
    if len(ids) and ids.min() < 0:
        raise ProtocolError(f"a KV event has token id {ids.min()}")
    return token_ids


def _read_salt(event: _Stored) -> tuple[str, int | None]:
    """The salt of a sequence's tenant and adapter, and `num_plain` as in `BlockStored`."""
    if event.salt is not None:
        return event.salt, None
    own = [] if event.lora_name is None else [event.lora_name]  # the first key of each block
    blocks, is_beginning = _read_extra_keys(event.extra_keys), event.parent_block_hash is None
    tenant_salt, num_plain = "", 0
    for keys in blocks:
        if keys != own:
            is_salted = keys is not None and keys[:-1] == own
            if num_plain or not (is_beginning and keys and is_salted):
                break
            tenant_salt = hash_tenant(keys[-1])
        num_plain += 1
    are_all = num_plain == len(blocks) and (blocks or not own)
    salt = salt_of_adapter(tenant_salt, event.lora_name or "") if is_beginning else ""
    return salt, None if are_all else num_plain


def _read_extra_keys(raw: msgspec.Raw) -> list[list[str] | None]:
    """Of each block, up to the first one with what is no text, of an image for instance: None."""
    try:
        return [each or [] for each in _extra_keys.decode(raw) or ()]
    except UNDECODABLE:
        pass
    blocks: list[list[str] | None] = []
    try:
        for each in _raw_keys.decode(raw):
            keys = _keys_of_block.decode(each)
            blocks.append(keys or [])
    except UNDECODABLE:
        blocks.append(None)
    return blocks


def _decode(decoder: msgspec.msgpack.Decoder[T], raw: bytes | msgspec.Raw) -> T:
    try:
        return decoder.decode(raw)
    except UNDECODABLE as exc:
        raise ProtocolError(f"a KV event message does not decode: {exc}") from exc
