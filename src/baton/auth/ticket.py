"""The ticket: what one handoff is authorised to touch, signed by the gateway.

On the wire a ticket is base64url text without padding of `msgpack(Ticket) + HMAC-SHA256`
(docs/wire/ticket.md). It travels in the request body's `kv_transfer_params.baton_ticket`; the
gateway strips that field from whatever clients send.

A ticket names workers by id and epoch, never memory: pages are granted by the decode worker to
the ticket's id, and block hashes are compared between the two workers (ADR 0004).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.auth.key import MAC_BYTES, ClusterKey
from baton.errors import UNDECODABLE, TicketError
from baton.ids import Epoch, TicketId, WorkerId, new_epoch

if TYPE_CHECKING:
    from baton.clock import Clock

PURPOSE: Final = "ticket"
MAX_TICKET_CHARS: Final = 4096
MIN_LIFETIME_S: Final = 0.001
MAX_LIFETIME_S: Final = 86_400.0

HandoffMode: TypeAlias = Literal["push", "pull", "pool", "reference"]
"""How KV gets to the decode worker.

`push`: decode reserves blocks first and each layer moves as it is computed. `pull`: prefill
finishes and holds its blocks under a lease until decode has room. `pool`: through the store; the
two never meet. `reference`: nothing is copied, decode attends over the prefill worker's blocks.
"""


class WorkerRef(msgspec.Struct, frozen=True):
    """One life of one worker, and where its peers reach it (`host:port` of its handoff port).

    `rank_addresses` has one entry for each tensor-parallel rank, the first is `address`; it is
    empty for a worker of one rank.
    """

    worker: WorkerId
    epoch: Epoch
    address: str
    rank_addresses: tuple[str, ...] = ()


class TicketIssue(msgspec.Struct, frozen=True):
    """Which ticket of which gateway, and when: no clock is compared with another host's.

    `issuer` is one life of a gateway, `number` counts its tickets and `at` are its monotonic
    seconds. `lifetime_s` is how long the request may take. See `baton.auth.replay`.
    """

    issuer: Annotated[Epoch, Meta(min_length=32, max_length=32)]
    number: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    at: Annotated[float, Meta(ge=-(2**53), le=2**53)]
    lifetime_s: Annotated[float, Meta(gt=0, le=MAX_LIFETIME_S)]


class TicketIssuer:
    """Numbers the tickets of one life of a gateway. Owner: one thread."""

    def __init__(self, clock: Clock, epoch: Epoch | None = None) -> None:
        self._clock, self._epoch, self._numbers = clock, epoch or new_epoch(), itertools.count()

    def issue(self, lifetime_s: float) -> TicketIssue:
        """For the next ticket."""
        bounded_s = min(max(lifetime_s, MIN_LIFETIME_S), MAX_LIFETIME_S)
        return TicketIssue(self._epoch, next(self._numbers), self._clock.now(), bounded_s)


class Ticket(msgspec.Struct, frozen=True, tag="ticket", tag_field="t", dict=True):
    """Authorises one handoff between two lives of two workers.

    `tenant_salt` enters every block hash. `first_token_early`: the client gets it from the prefill
    worker, and the decode worker goes on from that token whatever happens.
    """

    id: TicketId
    request_id: str
    prefill: WorkerRef
    decode: WorkerRef
    mode: HandoffMode
    issue: TicketIssue
    tenant_salt: str = ""
    first_token_early: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)
_READ_FROM: Final = "read_from"
"""In a ticket that was read: the key that signed it, and its text. No part of its value."""


def hash_tenant(cache_salt: str) -> str:
    """The tenant salt of a client's `cache_salt`, of bounded length; empty for none."""
    return hashlib.sha256(b"baton/tenant/1" + cache_salt.encode()).hexdigest() if cache_salt else ""


def seal(ticket: Ticket, key: ClusterKey) -> str:
    """Sign a ticket and write it as text; one that was read is the text that it was read from."""
    read = vars(ticket).get(_READ_FROM)
    if read is not None and read[0] == key:
        text: str = read[1]
        return text
    body = _encoder.encode(ticket)
    return base64.urlsafe_b64encode(body + key.sign(PURPOSE, body)).rstrip(b"=").decode()


def unseal(text: str, key: ClusterKey) -> Ticket:
    """Read a ticket, believing nothing before its signature is checked.

    Raises:
        TicketError: malformed or forged.
    """
    if len(text) > MAX_TICKET_CHARS:
        raise TicketError(f"the ticket has {len(text)} characters, at most {MAX_TICKET_CHARS}")
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as exc:
        raise TicketError("the ticket is not base64url text") from exc
    body, mac = raw[:-MAC_BYTES], raw[-MAC_BYTES:]
    if not key.verify(PURPOSE, body, mac):
        raise TicketError("the ticket was not signed with this cluster's key")
    try:
        ticket = _decoder.decode(body)
    except UNDECODABLE as exc:
        raise TicketError(f"the ticket does not decode: {exc}") from exc
    vars(ticket)[_READ_FROM] = key, text
    return ticket
