"""Orders for the tests of one handoff."""

from __future__ import annotations

import numpy as np

from baton.auth.ticket import HandoffMode, Ticket, WorkerRef
from baton.clock import Instant
from baton.handoff.interface import ReceiveOrder, SendOrder
from baton.ids import Epoch, WorkerId, new_ticket_id
from baton.kv.copies import BlockTable
from baton.telemetry.trace import RequestSpan
from tests.tickets import issue

PROMPT_HASH = b"h" * 32
FAR = Instant(1e9)


def make_ticket(
    prefill: WorkerRef | None = None, decode: WorkerRef | None = None, mode: HandoffMode = "push"
) -> Ticket:
    return Ticket(
        id=new_ticket_id(),
        request_id="req-1",
        prefill=prefill or WorkerRef(WorkerId("p"), Epoch("ep"), "127.0.0.1:1"),
        decode=decode or WorkerRef(WorkerId("d"), Epoch("ed"), "127.0.0.1:2"),
        mode=mode,
        issue=issue(600),
    )


def make_trace(leg: str) -> RequestSpan:
    return RequestSpan(request_id="req-1", worker="w", epoch="e", role=leg)


def receive_order(
    ticket: Ticket, *, start: int, num_tokens: int, blocks: BlockTable | None = None
) -> ReceiveOrder:
    return ReceiveOrder(
        ticket=ticket,
        prompt_hash=PROMPT_HASH,
        start=start,
        num_tokens=num_tokens,
        blocks=blocks or BlockTable(0, np.arange(8, dtype=np.int64)),
        deadline=FAR,
        trace=make_trace("decode"),
    )


def send_order(
    ticket: Ticket,
    *,
    num_tokens: int,
    num_ready_tokens: int = 0,
    num_cached_tokens: int = 0,
    blocks: BlockTable | None = None,
) -> SendOrder:
    return SendOrder(
        ticket=ticket,
        prompt_hash=PROMPT_HASH,
        num_tokens=num_tokens,
        num_ready_tokens=num_ready_tokens,
        blocks=blocks or BlockTable(0, np.arange(8, dtype=np.int64)),
        deadline=FAR,
        trace=make_trace("prefill"),
        num_cached_tokens=num_cached_tokens,
    )
