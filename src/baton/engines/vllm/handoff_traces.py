"""The traces of this rank's handoffs: one leg for each request, merged from its tickets' parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.telemetry.trace import RequestSpan, Stamp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.engines.vllm.step_orders import Prompt
    from baton.ids import Epoch, WorkerId

_LAST_OF_ALL = frozenset({Stamp.FIRST_LAYER_LANDED, Stamp.LAST_LAYER_LANDED})
"""What has happened only once it has for every part; of other instants the first counts."""


def open_trace(prompt: Prompt, leg: str, worker: WorkerId, epoch: Epoch) -> RequestSpan:
    """A trace of one leg: `prefill` or `decode`."""
    ticket = prompt.ticket
    peer = ticket.decode if leg == "prefill" else ticket.prefill
    trace = RequestSpan(
        request_id=ticket.request_id,
        worker=worker,
        epoch=epoch,
        role=leg,
        ticket=ticket.id.hex(),
        peer=peer.worker,
        mode=ticket.mode,
        num_prompt_tokens=prompt.num_tokens,
    )
    trace.stamp(Stamp.RECEIVED, prompt.received_at)
    return trace


def open_partial_trace(leg: RequestSpan) -> RequestSpan:
    """A trace for one of several tickets of a leg."""
    return RequestSpan(request_id=leg.request_id, worker=leg.worker, epoch=leg.epoch, role=leg.role)


def merge_traces(leg: RequestSpan, parts: Iterable[RequestSpan]) -> None:
    """Put together what each ticket's handoff recorded; the leg itself may be the only part."""
    for part in parts:
        if part is leg:
            continue
        for stamp, at in part.stamps.items():
            known = leg.stamps.get(stamp, at)
            leg.stamps[stamp] = max(known, at) if stamp in _LAST_OF_ALL else min(known, at)
        leg.peer_stamps = leg.peer_stamps or part.peer_stamps
        is_mismatch = part.transport != part.expected_transport
        if leg.transport is None or (is_mismatch and leg.transport == leg.expected_transport):
            leg.transport, leg.expected_transport = part.transport, part.expected_transport
        leg.reroutes += part.reroutes
        leg.num_bytes += part.num_bytes
        leg.num_pages += part.num_pages
