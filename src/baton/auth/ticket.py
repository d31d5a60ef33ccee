"""The ticket: what one handoff is authorised to touch, signed by the gateway.

On the wire a ticket is base64url text without padding of the ticket, an Ed25519 signature and the
gateway's certificate (docs/wire/ticket.md). It travels in the request body's
`kv_transfer_params.baton_ticket`; the gateway strips that field from whatever clients send.
Workers that know by the connection that a gateway sent it get one without a signature; another
worker's word for such a ticket counts for nothing but the same text (ADR 0025).

A ticket names workers by id and epoch, never memory: pages are granted by the decode worker to
the ticket's id, and block hashes are compared between the two workers (ADR 0004).
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.auth.certificates import IdentityRole
from baton.auth.sealed import SealedMessage, decode_sealed, encode_sealed
from baton.errors import UNDECODABLE, AuthenticationError, TicketError
from baton.ids import Epoch, TicketId, WorkerId, new_epoch

if TYPE_CHECKING:
    from baton.auth.credentials import Credentials
    from baton.clock import Clock

_PURPOSE: Final = b"baton/ticket/2|"
TICKET_ID_BYTES: Final = 16
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
    """One incarnation of a worker, and where its peers reach it (`host:port` of its handoff port).

    `rank_addresses` has one entry for each tensor-parallel rank, the first is `address`; it is
    empty for a worker of one rank.
    """

    worker: WorkerId
    epoch: Epoch
    address: str
    rank_addresses: tuple[str, ...] = ()


class TicketIssue(msgspec.Struct, frozen=True):
    """Which ticket of which gateway, and when: no clock is compared with another host's.

    `issuer` is one incarnation of a gateway, `number` counts its tickets and `at` are its monotonic
    seconds. `lifetime_s` is how long the request may take. See `baton.auth.replay`.
    """

    issuer: Annotated[Epoch, Meta(min_length=32, max_length=32)]
    number: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    at: Annotated[float, Meta(ge=-(2**53), le=2**53)]
    lifetime_s: Annotated[float, Meta(gt=0, le=MAX_LIFETIME_S)]


class TicketIssuer:
    """Numbers the tickets of one incarnation of a gateway. Owner: one thread."""

    def __init__(self, clock: Clock, epoch: Epoch | None = None) -> None:
        self._clock, self._epoch, self._numbers = clock, epoch or new_epoch(), itertools.count()

    def issue(self, lifetime_s: float) -> TicketIssue:
        """For the next ticket."""
        bounded_s = min(max(lifetime_s, MIN_LIFETIME_S), MAX_LIFETIME_S)
        return TicketIssue(self._epoch, next(self._numbers), self._clock.now(), bounded_s)


class Ticket(msgspec.Struct, frozen=True, tag="ticket", tag_field="t", dict=True):
    """Authorises one handoff between two incarnations of two workers.

    `tenant_salt` enters every block hash. `first_token_early`: the client gets it from the prefill
    worker, and the decode worker goes on from that token whatever happens. `num_prefix_tokens`: KV
    of the prompt's first tokens alone is handed over, and decode computes the others; 0: of all.
    `distance`: how far apart the two workers are, for their traces and metrics; empty: not known.
    """

    id: TicketId
    request_id: str
    prefill: WorkerRef
    decode: WorkerRef
    mode: HandoffMode
    issue: TicketIssue
    tenant_salt: str = ""
    first_token_early: bool = False
    num_prefix_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    distance: Annotated[str, Meta(max_length=32)] = ""

    def __post_init__(self) -> None:
        """Raise ValueError where an answer would begin with a token after a part of a prompt."""
        if self.first_token_early and self.num_prefix_tokens:
            raise ValueError("no first token follows a part of a prompt")

    def count_handed_over(self, num_prompt_tokens: int) -> int:
        """Of a prompt of so many tokens, how many of the first ones are handed over."""
        return min(self.num_prefix_tokens or num_prompt_tokens, num_prompt_tokens)

    def __reduce__(self) -> tuple[object, ...]:
        """For vLLM, which pickles it from its scheduler to its workers: with its text."""
        return _restore, (_encoder.encode(self), vars(self).get(_READ_FROM))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)
_READ_FROM: Final = "read_from"
"""In a ticket that was read: its text. No part of its value."""
UNSIGNED: Final = "unsigned."
"""Before the text of a ticket that has no signature: base64url has no dot."""
_RANKS: Final = re.compile(r"\.(\d{1,4})\.(\d{1,4})\Z", re.ASCII)
"""After the text of a server's ticket: that of one pair of its ranks."""


def _restore(body: bytes, text: str | None) -> Ticket:
    ticket = _decoder.decode(body)
    if text is not None:
        vars(ticket)[_READ_FROM] = text
    return ticket


def hash_tenant(cache_salt: str) -> str:
    """The tenant salt of a client's `cache_salt`, of bounded length; empty for none."""
    return hashlib.sha256(b"baton/tenant/1" + cache_salt.encode()).hexdigest() if cache_salt else ""


def bind_salt(client_tenant: str, cache_salt: str) -> str:
    """The `cache_salt` of a request whose API key is a tenant's, which may have one of its own."""
    return hash_tenant(f"{client_tenant}\0{cache_salt}")


def text_of(ticket: Ticket) -> str | None:
    """The text from which a ticket was read."""
    read: str | None = vars(ticket).get(_READ_FROM)
    return read


def seal(ticket: Ticket, credentials: Credentials) -> str:
    """Write a ticket as text: one that was read as it was read, else signed, as gateways may."""
    read = text_of(ticket)
    if read is not None:
        return read
    sealed = SealedMessage.sign(_PURPOSE, _encoder.encode(ticket), credentials)
    return _to_text(encode_sealed(sealed))


def write_unsigned(ticket: Ticket) -> str:
    """A ticket as text for workers that believe the connection over which it comes."""
    return UNSIGNED + _to_text(_encoder.encode(ticket))


def is_signed(text: str) -> bool:
    """Whether a ticket's text has a signature, good or not."""
    return not text.startswith(UNSIGNED)


def unseal(text: str, credentials: Credentials, *, is_from_gateway: bool = False) -> Ticket:
    """Read a ticket that a gateway signed, or sent.

    One that `is_from_gateway`, which came over a connection on which a gateway has proved what it
    is, needs no signature, and a signature is not checked: it would prove the same again, in
    0.1 ms. Nor is that of a text that was read before: a worker is shown a ticket twice, by the
    gateway and by its peer.

    Raises:
        TicketError: malformed, forged, or not signed.
    """
    signed = is_signed(text)
    if not signed and not is_from_gateway:
        raise TicketError("the ticket is not signed, and no gateway has proved that it sent it")
    if len(text) > MAX_TICKET_CHARS:
        raise TicketError(f"the ticket has {len(text)} characters, at most {MAX_TICKET_CHARS}")
    if (ranks := _RANKS.search(text)) is not None:
        rest = text[: ranks.start()]
        if _RANKS.search(rest):  # a thousand of them would be a thousand calls
            raise TicketError("the ticket names two pairs of ranks")
        whole = unseal(rest, credentials, is_from_gateway=is_from_gateway)
        return derive_rank_ticket(whole, int(ranks[1]), int(ranks[2]))
    if signed and (known := credentials.verified_tickets.find(text)) is not None:
        return known
    body = _read_body(text, credentials, is_from_gateway=is_from_gateway)
    try:
        ticket = _decoder.decode(body)
    except UNDECODABLE as exc:
        raise TicketError(f"the ticket does not decode: {exc}") from exc
    vars(ticket)[_READ_FROM] = text
    if signed:
        credentials.verified_tickets.add(text, ticket)
    return ticket


def _read_body(text: str, credentials: Credentials, *, is_from_gateway: bool) -> bytes:
    try:
        if not is_signed(text):
            return _from_text(text[len(UNSIGNED) :])
        sealed = decode_sealed(_from_text(text))
    except (ValueError, *UNDECODABLE) as exc:
        raise TicketError("the ticket is not base64url text of a ticket") from exc
    if not is_from_gateway:
        _check_signature(sealed, credentials)
    return sealed.body


def _to_text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _from_text(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


def _check_signature(sealed: SealedMessage, credentials: Credentials) -> None:
    try:
        sealed.verify(_PURPOSE, IdentityRole.GATEWAY, credentials)
    except AuthenticationError as exc:
        raise TicketError(f"the ticket was not signed by a gateway of this cluster: {exc}") from exc


def count_ranks(worker: WorkerRef) -> int:
    """The tensor-parallel ranks of a worker."""
    return max(1, len(worker.rank_addresses))


def derive_rank_ticket(ticket: Ticket, prefill: int, decode: int) -> Ticket:
    """The ticket of one rank of either side: every holder of the server's ticket derives the same.

    Raises:
        TicketError: there is no such rank.
    """
    if count_ranks(ticket.prefill) == count_ranks(ticket.decode) == 1 and prefill == decode == 0:
        return ticket
    message = b"baton/sub/1|" + ticket.id + bytes((prefill & 0xFF, decode & 0xFF))
    derived = msgspec.structs.replace(
        ticket,
        id=TicketId(hashlib.sha256(message).digest()[:TICKET_ID_BYTES]),
        prefill=_refer_to_rank(ticket.prefill, prefill),
        decode=_refer_to_rank(ticket.decode, decode),
    )
    if (read := text_of(ticket)) is not None:
        vars(derived)[_READ_FROM] = f"{read}.{prefill}.{decode}"
    return derived


def _refer_to_rank(worker: WorkerRef, rank: int) -> WorkerRef:
    num_ranks = count_ranks(worker)
    if rank >= num_ranks:
        raise TicketError(
            f"the ticket is for rank {rank} of {worker.worker}, which has {num_ranks}"
        )
    if num_ranks == 1:
        return worker
    return WorkerRef(
        worker=rank_name(worker.worker, rank, num_ranks),
        epoch=rank_epoch(worker.epoch, rank, num_ranks),
        address=worker.rank_addresses[rank],
    )


def rank_name(worker: WorkerId, rank: int, num_ranks: int) -> WorkerId:
    """One rank's name; that of a server of one rank is the server's own."""
    return worker if num_ranks == 1 else WorkerId(f"{worker}/{rank}")


def rank_epoch(epoch: Epoch, rank: int, num_ranks: int) -> Epoch:
    """One rank's epoch; that of a server of one rank is the server's own."""
    if num_ranks == 1:
        return epoch
    message = f"baton/rank-epoch/1|{epoch}|{rank}"
    return Epoch(hashlib.sha256(message.encode()).hexdigest()[: len(epoch)])
