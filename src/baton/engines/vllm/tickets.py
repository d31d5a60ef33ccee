"""A request's `kv_transfer_params` → which part of a handoff this server plays in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec

from baton.auth.ticket import MAX_TICKET_CHARS, unseal
from baton.auth.used_tickets import TicketUse, UsedTickets
from baton.engines.vllm.refusals import Refusal
from baton.errors import TicketError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.auth.key import ClusterKey
    from baton.auth.ticket import Ticket, WorkerRef
    from baton.clock import Clock
    from baton.engines.vllm.identity import Identity
    from baton.engines.vllm.refusals import RefusalCode


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
    """Reads tickets that name this life of this server. Owned by the scheduler's thread."""

    def __init__(self, identity: Identity, key: ClusterKey, clock: Clock) -> None:
        self._identity, self._key, self._clock = identity, key, clock
        self._seen = UsedTickets()

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
            ticket = unseal(asked.baton_ticket, self._key, self._clock.unix_now())
        except (msgspec.ValidationError, TicketError) as exc:
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
        if not (me.sends if sends else me.receives):
            code: RefusalCode = "not_a_producer" if sends else "not_a_consumer"
            return Refusal(code, f"this server's role is {me.role}")
        return self._use(ticket) or (Send(ticket) if sends else Receive(ticket))

    def _use(self, ticket: Ticket) -> Refusal | None:
        match self._seen.use(ticket, self._clock.unix_now()):
            case TicketUse.FIRST:
                return None
            case TicketUse.REPEATED:
                return Refusal("replayed_ticket", "this ticket was used before")
            case TicketUse.FULL:
                return Refusal("replayed_ticket", "too many unexpired tickets are remembered")


def _name(ref: WorkerRef) -> str:
    return f"{ref.worker}@{ref.epoch[:8]}"
