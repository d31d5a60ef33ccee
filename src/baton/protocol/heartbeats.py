"""Heartbeats: datagrams by which a worker shows each gateway that its process runs.

docs/wire/announcements.md. A gateway gives each epoch of a worker an id and a key, in its answer to
an announcement, over TLS. A datagram proves that key, and is taken once. It renews no lease: it
only shows a gateway sooner than the lease that a worker is silent.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from baton.ids import Epoch, WorkerId

HEARTBEAT_INTERVAL_S: Final = 0.25
ID_BYTES: Final = 8
KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
HEARTBEAT_BYTES: Final = ID_BYTES + 8 + TAG_BYTES
_SEQUENCE: Final = struct.Struct("!Q")
_TAG_PURPOSE: Final = b"baton/beat/1"
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
    body = grant.id + _SEQUENCE.pack(sequence)
    return body + _tag(grant.key, body)


def find_id(datagram: bytes) -> bytes | None:
    """Whose heartbeat it claims to be; None: it is none."""
    return datagram[:ID_BYTES] if len(datagram) == HEARTBEAT_BYTES else None


def read_sequence(datagram: bytes, grant: HeartbeatGrant) -> int | None:
    """The sequence of a heartbeat of `grant`; None: its sender does not have the key."""
    body = datagram[:-TAG_BYTES]
    if not hmac.compare_digest(datagram[-TAG_BYTES:], _tag(grant.key, body)):
        return None
    return int(_SEQUENCE.unpack_from(body, ID_BYTES)[0])


def _tag(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=TAG_BYTES, key=key, person=_TAG_PURPOSE).digest()
