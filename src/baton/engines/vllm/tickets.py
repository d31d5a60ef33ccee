"""Tickets: read from `kv_transfer_params`, refused, or split per pair of tensor-parallel ranks."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec

from baton.auth.replay import TicketUse, UsedTickets
from baton.auth.ticket import MAX_TICKET_CHARS, count_ranks, derive_rank_ticket, unseal
from baton.errors import TicketError
from baton.kv.layout import KVLayout, TensorParallelShard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.auth.credentials import Credentials
    from baton.auth.ticket import Ticket, WorkerRef
    from baton.engines.vllm.identity import Identity

logger = logging.getLogger(__name__)

RefusalCode: TypeAlias = Literal[
    "stale_ticket",
    "invalid_ticket",
    "replayed_ticket",
    "not_a_consumer",
    "unsupported_request",
    "handoff_failed",
    "overloaded",
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """No handoff for this request: it is computed here. `reason` is for people."""

    code: RefusalCode
    reason: str


NO_COUNTS: Final[Mapping[str, int]] = {}


class RefusalCounter:
    """Refusals since they were last taken. Owned by the scheduler's thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._logged: set[str] = set()

    def add(self, refusal: Refusal) -> None:
        """Count one, and log the first of its code."""
        self._counts[refusal.code] += 1
        if refusal.code not in self._logged:
            self._logged.add(refusal.code)
            logger.warning(
                "a request is computed here, without a handoff (%s): %s; further ones are counted "
                "in vllm:baton_refused_tickets_total",
                refusal.code,
                refusal.reason,
            )

    def take(self) -> Mapping[str, int]:
        """Counts by code, which start again at nothing."""
        if not self._counts:
            return NO_COUNTS
        counts, self._counts = dict(self._counts), Counter()
        return counts


@dataclass(frozen=True, slots=True)
class NoHandoff:
    """No part in a handoff."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Somebody asks who this server is."""


@dataclass(frozen=True, slots=True)
class Send:
    """Prefill for the decode worker that the ticket names."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Receive:
    """Decode what the ticket's prefill worker prefills."""

    ticket: Ticket


HandoffRole: TypeAlias = NoHandoff | Probe | Send | Receive | Refusal


class TransferParams(msgspec.Struct, frozen=True):
    """The fields that are ours; others belong to other connectors."""

    baton_ticket: Annotated[str, msgspec.Meta(max_length=MAX_TICKET_CHARS)] | None = None
    baton_info: bool = False
    do_remote_decode: bool = False
    do_remote_prefill: bool = False


NO_HANDOFF: Final = NoHandoff()


class TicketReader:
    """Reads tickets for this server and epoch. Owned by the scheduler's thread.

    `clients_are_gateways`: each client of this server's API has proved that it is one, so that the
    signature would prove the same again.
    """

    def __init__(
        self, identity: Identity, credentials: Credentials, *, clients_are_gateways: bool
    ) -> None:
        self._identity, self._credentials = identity, credentials
        self._clients_are_gateways = clients_are_gateways
        self._used = UsedTickets()

    def read(self, params: Mapping[str, object] | None) -> HandoffRole:
        """The part that a request's parameters authorise; a ticket is used up by reading it."""
        if not params:
            return NO_HANDOFF
        try:
            asked = msgspec.convert(dict(params), TransferParams)
            if asked.baton_info:
                return Probe()
            if asked.baton_ticket is None:
                return NO_HANDOFF
            ticket = unseal(
                asked.baton_ticket,
                self._credentials,
                is_from_gateway=self._clients_are_gateways,
            )
        except (msgspec.ValidationError, UnicodeEncodeError, TicketError) as exc:
            return Refusal("invalid_ticket", str(exc))
        return self._check_addressee(ticket, asked)

    def _check_addressee(self, ticket: Ticket, asked: TransferParams) -> HandoffRole:
        me = self._identity
        if asked.do_remote_decode == asked.do_remote_prefill:
            return Refusal(
                "invalid_ticket",
                "set one of do_remote_decode and do_remote_prefill beside a ticket",
            )
        sends = asked.do_remote_decode
        named = ticket.prefill if sends else ticket.decode
        if (named.worker, named.epoch) != (me.worker, me.epoch):
            return Refusal(
                "stale_ticket",
                f"the ticket is for {_name(named)}, this is {me.worker}@{me.epoch[:8]}",
            )
        if not (sends or me.receives):  # decode servers send, too: streams move from them
            return Refusal("not_a_consumer", f"this server's role is {me.role}")
        return self._use(ticket) or (Send(ticket) if sends else Receive(ticket))

    def _use(self, ticket: Ticket) -> Refusal | None:
        match self._used.use(ticket.issue):
            case TicketUse.FIRST:
                return None
            case TicketUse.REPEATED:
                return Refusal("replayed_ticket", "this ticket was used before")
            case TicketUse.EXPIRED:
                return Refusal("stale_ticket", "this ticket has expired")


def _name(ref: WorkerRef) -> str:
    return f"{ref.worker}@{ref.epoch[:8]}"


@dataclass(frozen=True, slots=True)
class RankPair:
    """KV moves from rank `prefill` of the one worker to rank `decode` of the other."""

    prefill: int
    decode: int


@lru_cache(maxsize=64)
def compute_pairs(
    layout: KVLayout, num_prefill_ranks: int, num_decode_ranks: int
) -> tuple[RankPair, ...]:
    """Which ranks send to which, in order of the decode ranks.

    Where several prefill ranks hold the same head (there are more ranks than heads), the first of
    them sends it. `layout` is that of any rank of either side.
    """
    return tuple(
        RankPair(prefill, decode)
        for decode in range(num_decode_ranks)
        for prefill in _senders(layout, num_prefill_ranks, decode, num_decode_ranks)
    )


def compute_subtickets(ticket: Ticket, layout: KVLayout, *, sender: int) -> tuple[Ticket, ...]:
    """The tickets under which prefill rank `sender` sends.

    In mode pool ranks do not meet: each works under the ticket itself.
    """
    if _is_for(sender, ticket):
        return (ticket,)
    return tuple(
        derive_rank_ticket(ticket, pair.prefill, pair.decode)
        for pair in _pairs_of(ticket, layout)
        if pair.prefill == sender
    )


def compute_receiving_subtickets(
    ticket: Ticket, layout: KVLayout, *, receiver: int
) -> tuple[Ticket, ...]:
    """The tickets under which decode rank `receiver` receives; at least one."""
    if _is_for(receiver, ticket):
        return (ticket,)
    return tuple(
        derive_rank_ticket(ticket, pair.prefill, pair.decode)
        for pair in _pairs_of(ticket, layout)
        if pair.decode == receiver
    )


def _is_for(rank: int, ticket: Ticket) -> bool:
    """Whether a rank works under a ticket itself: ranks do not meet, or each side has this one."""
    are_alone = not ticket.prefill.rank_addresses and not ticket.decode.rank_addresses
    return ticket.mode == "pool" or (are_alone and rank == 0)


def _pairs_of(ticket: Ticket, layout: KVLayout) -> tuple[RankPair, ...]:
    return compute_pairs(layout, count_ranks(ticket.prefill), count_ranks(ticket.decode))


def _senders(
    layout: KVLayout, num_prefill_ranks: int, decode: int, num_decode_ranks: int
) -> list[int]:
    missing = _held(layout, decode, num_decode_ranks)
    senders: list[int] = []
    for prefill in range(num_prefill_ranks):
        shared = missing & _held(layout, prefill, num_prefill_ranks)
        if shared:
            senders.append(prefill)
            missing -= shared
    return senders


def _held(layout: KVLayout, rank: int, num_ranks: int) -> set[tuple[str, int, int]]:
    """Heads that a rank holds: which kind of plane, of how many heads, which one."""
    sharded = msgspec.structs.replace(layout, shard=TensorParallelShard(rank, num_ranks))
    planes = {plane for layer in layout.layers for plane in layer.planes}
    return {
        (plane.name, plane.num_heads, head)
        for plane in planes
        for head in sharded.held_heads(plane)
    }
