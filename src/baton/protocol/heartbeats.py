"""Datagrams between a worker and each gateway: heartbeats, renewals, acknowledgements.

docs/wire/announcements.md. A gateway gives each epoch of a worker an id and a key, in its answer to
an announcement, over TLS. A datagram proves that key.

heartbeat        shows that the worker's process runs; it renews no lease
renewal          carries an announcement, as a post over TLS does
acknowledgement  a gateway's, of a renewal: the lease is renewed
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from baton.ids import Epoch, WorkerId

HEARTBEAT_INTERVAL_S: Final = 0.25
ID_BYTES: Final = 8
KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
HEARTBEAT_BYTES: Final = ID_BYTES + 8 + TAG_BYTES
"""Of an acknowledgement, too."""
MAX_RENEWAL_BYTES: Final = 1200
"""Every path carries so many without fragments. A renewal is longer than a heartbeat."""
_SEQUENCE: Final = struct.Struct("!Q")
_TAG_PURPOSE: Final = b"baton/beat/1"
_RENEWAL_PURPOSE: Final = b"baton/renewal/1"
_ACK_PURPOSE: Final = b"baton/renewed/1"
_ASKS_FOR_POST: Final = 1 << 63
"""No sequence of an announcement is so large."""
_ID_PURPOSE: Final = b"baton/beat-id/1"
_KEY_PURPOSE: Final = b"baton/beat-key/1"


class HeartbeatGrant(msgspec.Struct, frozen=True):
    """What one epoch of a worker needs to send heartbeats to one gateway.

    They go to the address and port, by UDP, at which that gateway took the announcement.
    """

    id: Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]

    @classmethod
    def derive(cls, secret: bytes, worker: WorkerId, epoch: Epoch) -> HeartbeatGrant:
        """By a gateway's own secret, the same one each time."""
        name = f"{epoch}|{worker}".encode()

        def hash_name(size: int, purpose: bytes) -> bytes:
            return hashlib.blake2b(name, digest_size=size, key=secret, person=purpose).digest()

        return cls(hash_name(ID_BYTES, _ID_PURPOSE), hash_name(KEY_BYTES, _KEY_PURPOSE))


def make_heartbeat(grant: HeartbeatGrant, sequence: int) -> bytes:
    """A datagram of `HEARTBEAT_BYTES`: id, sequence, and what proves the key."""
    return _make_numbered(_TAG_PURPOSE, grant, sequence)


def make_renewal(grant: HeartbeatGrant, sealed: bytes) -> bytes | None:
    """A datagram with a sealed announcement; None: it is too long for one."""
    if ID_BYTES + TAG_BYTES + len(sealed) > MAX_RENEWAL_BYTES:
        return None
    return grant.id + _tag(_RENEWAL_PURPOSE, grant.key, grant.id + sealed) + sealed


class Acknowledgement(NamedTuple):
    """Of the renewal with the announcement of that sequence: its lease is renewed.

    `asks_for_post`: the worker is to post the next one, whose answer has news for it.
    """

    sequence: int
    asks_for_post: bool


def make_acknowledgement(grant: HeartbeatGrant, acknowledgement: Acknowledgement) -> bytes:
    """A gateway's datagram of `HEARTBEAT_BYTES`."""
    flag = _ASKS_FOR_POST if acknowledgement.asks_for_post else 0
    return _make_numbered(_ACK_PURPOSE, grant, acknowledgement.sequence | flag)


def read_acknowledgement(datagram: bytes, grant: HeartbeatGrant) -> Acknowledgement | None:
    """None: it is none, by a gateway with this key."""
    if len(datagram) != HEARTBEAT_BYTES:
        return None
    body = datagram[:-TAG_BYTES]
    if not hmac.compare_digest(datagram[-TAG_BYTES:], _tag(_ACK_PURPOSE, grant.key, body)):
        return None
    number = int.from_bytes(body[ID_BYTES:])
    return Acknowledgement(number & ~_ASKS_FOR_POST, bool(number & _ASKS_FOR_POST))


class HeartbeatReader:
    """Verifies the datagrams of one grant. A hash that has the key already is copied for each."""

    __slots__ = ("_grant", "_keyed")

    def __init__(self, grant: HeartbeatGrant) -> None:
        self._grant, self._keyed = grant, _hash(_TAG_PURPOSE, grant.key)

    def read_heartbeat(self, datagram: bytes) -> int | None:
        """The sequence of a heartbeat, `HEARTBEAT_BYTES` long; None: it does not prove the key."""
        body, tag = datagram[:-TAG_BYTES], self._keyed.copy()
        tag.update(body)
        if not hmac.compare_digest(datagram[-TAG_BYTES:], tag.digest()):
            return None
        return int.from_bytes(body[ID_BYTES:])

    def read_renewal(self, datagram: bytes) -> bytes | None:
        """The sealed announcement of a renewal; None: it does not prove the key."""
        sealed = datagram[ID_BYTES + TAG_BYTES :]
        expected = _tag(_RENEWAL_PURPOSE, self._grant.key, datagram[:ID_BYTES] + sealed)
        given = datagram[ID_BYTES : ID_BYTES + TAG_BYTES]
        return sealed if hmac.compare_digest(given, expected) else None


def _make_numbered(purpose: bytes, grant: HeartbeatGrant, sequence: int) -> bytes:
    body = grant.id + _SEQUENCE.pack(sequence)
    return body + _tag(purpose, grant.key, body)


def _tag(purpose: bytes, key: bytes, body: bytes) -> bytes:
    tag = _hash(purpose, key)
    tag.update(body)
    return tag.digest()


def _hash(purpose: bytes, key: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=TAG_BYTES, key=key, person=purpose)
