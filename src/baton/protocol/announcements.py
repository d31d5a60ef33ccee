"""How workers announce themselves to gateways, and gateways to each other what they know.

docs/wire/announcements.md. An announcement is signed by its worker, so that gateways can relay it
and no other process can make or change one. No wall clock is in it: a lease is a length in seconds,
and whoever relays an announcement adds for how long it has had it.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from baton.auth.certificates import IdentityRole, PeerIdentity
from baton.auth.sealed import SealedMessage, decode_sealed, encode_sealed
from baton.errors import UNDECODABLE, AuthenticationError, ConfigError, ProtocolError
from baton.ids import Epoch, WorkerId
from baton.protocol.heartbeats import HeartbeatGrant
from baton.protocol.worker_http import EPOCH_CHARS, MAX_REASON_CHARS, Role, Topology

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.auth.credentials import Credentials

ANNOUNCEMENTS_PATH: Final = "/baton/v1/announcements"
EXCHANGES_PATH: Final = "/baton/v1/announcements/exchanges"
VERSION: Final = 1
MIN_LEASE_S: Final = 0.5
MAX_LEASE_S: Final = 3600.0
RENEWALS_PER_LEASE: Final = 3
MAX_ANNOUNCEMENT_BYTES: Final = 4096
"""With signature and certificate; one of ours has about 900."""
MAX_GATEWAYS: Final = 64
MAX_NAMES: Final = 10_000
"""Of workers that one gateway knows by announcements."""
MAX_RELAYED: Final = 512
"""Announcements in one message between gateways: what is left follows in the next one."""
MAX_EXCHANGE_BYTES: Final = 4 << 20
KEY_BYTES: Final = 8
T = TypeVar("T")

_PURPOSE: Final = b"baton/announcement/1|"

Url: TypeAlias = Annotated[str, Meta(min_length=8, max_length=300)]
Key: TypeAlias = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class RefusalReason(StrEnum):
    """Why an announcement is not taken; the label of a metric."""

    MALFORMED = "malformed"
    VERSION = "version"
    SIGNATURE = "signature"
    NAME = "name"
    ADDRESS = "address"
    REPEATED = "repeated"
    RATE = "rate"
    FULL = "full"


class AnnouncementError(ProtocolError):
    """An announcement is not one, or its sender may not make it."""

    def __init__(self, reason: RefusalReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """One worker lives, and is to be reached at `url`, for `lease_s` seconds from its sending on.

    `sequence` grows with each announcement of an epoch. With `is_farewell` the worker has ended,
    and nothing more comes of this epoch.
    """

    version: int = VERSION
    worker: Annotated[WorkerId, Meta(min_length=1, max_length=256)]
    epoch: Annotated[Epoch, Meta(min_length=EPOCH_CHARS, max_length=EPOCH_CHARS)]
    url: Url
    role: Role
    lease_s: Annotated[float, Meta(ge=MIN_LEASE_S, le=MAX_LEASE_S)]
    sequence: Annotated[int, Meta(ge=1, le=2**53)]
    topology: Topology = ""
    is_farewell: bool = False


class AnnouncementReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway makes of an announcement.

    `accepted`: the lease is renewed. `waiting`: another epoch holds the name, for at most `wait_s`
    seconds unless it renews. `superseded`: this epoch has lost its name to `owner` and must end.
    `refused`: not taken, for `reason`. `gateways` are all that this one knows. With `heartbeat`
    the worker sends heartbeats here.
    """

    result: Literal["accepted", "waiting", "superseded", "refused"]
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)] = ""
    owner: Annotated[Epoch, Meta(max_length=EPOCH_CHARS)] = Epoch("")
    wait_s: Annotated[float, Meta(ge=0)] = 0.0
    gateways: Annotated[tuple[Url, ...], Meta(max_length=MAX_GATEWAYS)] = ()
    heartbeat: HeartbeatGrant | None = None


class Known(msgspec.Struct, frozen=True, array_like=True):
    """Of one worker's lease: names and epochs by their hashes, and its latest announcement."""

    worker: Key
    epoch: Key
    sequence: Annotated[int, Meta(ge=1, le=2**53)]


class Relayed(msgspec.Struct, frozen=True, array_like=True):
    """An announcement as its worker sealed it, `age_s` seconds after a gateway received it."""

    sealed: Annotated[bytes, Meta(max_length=MAX_ANNOUNCEMENT_BYTES)]
    age_s: Annotated[float, Meta(ge=0, le=MAX_LEASE_S)]


Announcements: TypeAlias = Annotated[tuple[Relayed, ...], Meta(max_length=MAX_RELAYED)]


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """`POST EXCHANGES_PATH`, of one gateway to another: what it knows, and what was asked for.

    `gateway` is where the sender takes announcements. Without `known`, `relayed` answers the last
    reply's `wanted`.
    """

    gateway: Url | None = None
    known: Annotated[tuple[Known, ...], Meta(max_length=MAX_NAMES)] | None = None
    relayed: Announcements = ()


class ExchangeReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the sender lacks, and (by worker) what the receiver lacks."""

    relayed: Announcements = ()
    wanted: Annotated[tuple[Key, ...], Meta(max_length=MAX_RELAYED)] = ()


class _Versioned(msgspec.Struct, frozen=True):
    version: int = 0


_decoder = msgspec.msgpack.Decoder(Announcement)
_reply_decoder = msgspec.msgpack.Decoder(AnnouncementReply)
_exchange_decoder = msgspec.msgpack.Decoder(Exchange)
_exchange_reply_decoder = msgspec.msgpack.Decoder(ExchangeReply)
_version_decoder = msgspec.msgpack.Decoder(_Versioned)
_encode = msgspec.msgpack.Encoder().encode


def seal_announcement(announcement: Announcement, credentials: Credentials) -> bytes:
    """Sign an announcement as the worker that it is about."""
    return encode_sealed(SealedMessage.sign(_PURPOSE, _encode(announcement), credentials))


def read_announcement(
    sealed: bytes, credentials: Credentials, sender: bytes | None = None
) -> Announcement:
    """Decode, bounds-check and verify.

    `sender`: the certificate (DER) that the connection's other end has proved to be its own, if the
    worker itself sends this: then that is the proof, and the signature is not checked (0.1 ms).

    Raises:
        AnnouncementError: malformed, of another version, or not by a worker of that name.
    """
    message = _read_sealed(sealed)
    author = _find_author(message, credentials, sender)
    announcement = _decode(message.body)
    if author.name not in {None, announcement.worker}:  # not its ranks: one lease for each worker
        raise AnnouncementError(
            RefusalReason.NAME,
            f"{author} announces itself as {announcement.worker!r}, which its certificate does not "
            f"allow; issue one with: baton key issue --role worker --name {announcement.worker}",
        )
    if not _is_origin(announcement.url):
        raise AnnouncementError(
            RefusalReason.ADDRESS,
            f"{announcement.worker} announces the address {announcement.url!r}, which is not "
            "https://host:port",
        )
    return announcement


def read_reply(body: bytes) -> AnnouncementReply:
    """Raises ProtocolError: it does not decode."""
    return _read(_reply_decoder, body)


def read_exchange(body: bytes) -> Exchange:
    """Raises ProtocolError: it does not decode."""
    return _read(_exchange_decoder, body)


def read_exchange_reply(body: bytes) -> ExchangeReply:
    """Raises ProtocolError: it does not decode."""
    return _read(_exchange_reply_decoder, body)


def _read(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except UNDECODABLE as exc:
        raise ProtocolError(f"not what gateways and workers send here: {exc}") from exc


def decode_unverified(sealed: bytes) -> Announcement:
    """Decode and bounds-check alone: whether it is worth the time to verify it.

    Raises:
        AnnouncementError: malformed, or of another version.
    """
    return _decode(_read_sealed(sealed).body)


def _read_sealed(sealed: bytes) -> SealedMessage:
    if len(sealed) > MAX_ANNOUNCEMENT_BYTES:
        raise AnnouncementError(
            RefusalReason.MALFORMED,
            f"an announcement of {len(sealed)} bytes, at most {MAX_ANNOUNCEMENT_BYTES} are read",
        )
    try:
        return decode_sealed(sealed)
    except UNDECODABLE as exc:
        raise AnnouncementError(RefusalReason.MALFORMED, f"no announcement: {exc}") from exc


def _find_author(
    message: SealedMessage, credentials: Credentials, sender: bytes | None
) -> PeerIdentity:
    try:
        if sender is None:
            return message.verify(_PURPOSE, IdentityRole.WORKER, credentials)
        author = credentials.find_peer(sender)
    except AuthenticationError as exc:
        raise AnnouncementError(
            RefusalReason.SIGNATURE, f"an announcement by no worker of this cluster: {exc}"
        ) from exc
    if message.certificate != sender or IdentityRole.WORKER not in author.roles:
        raise AnnouncementError(
            RefusalReason.SIGNATURE, f"{author} sends an announcement that is not its own"
        )
    return author


def _decode(body: bytes) -> Announcement:
    try:
        version = _version_decoder.decode(body).version
        if version == VERSION:
            return _decoder.decode(body)
    except UNDECODABLE as exc:
        raise AnnouncementError(RefusalReason.MALFORMED, f"no announcement: {exc}") from exc
    raise AnnouncementError(
        RefusalReason.VERSION,
        f"an announcement of version {version}, this gateway reads version {VERSION}: update the "
        "older one of the two",
    )


def _is_origin(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_port = parts.port is not None
    except ValueError:
        return False
    is_origin = parts.path in {"", "/"} and not (parts.query or parts.fragment or parts.username)
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and has_port and is_origin


def require_https(setting: str, urls: Iterable[str]) -> None:
    """Pass, or raise.

    Raises:
        ConfigError: one is not https://host:port.
    """
    for url in urls:
        if not (url.startswith("https:") and _is_origin(url)):
            raise ConfigError(
                f"{setting}: {url!r} is not where a gateway takes announcements; write it as "
                "https://host:port, with that gateway's gateway.announce_port"
            )


def key_of(text: str) -> bytes:
    """By what gateways compare names and epochs: 8 bytes of BLAKE2b."""
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()
