"""Traces, metrics and records of one rank's handoffs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from baton.handoff.interface import DECLINED_STAGE
from baton.telemetry.metrics import HeldBlockSeconds, HeldBlockTime
from baton.telemetry.trace import RequestSpan, Stamp, TraceRing
from baton.telemetry.trace_merge import merge_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.auth.ticket import HandoffMode
    from baton.clock import Instant
    from baton.engines.vllm.in_flight import LoadInProgress
    from baton.engines.vllm.step_orders import Finished, Prompt, StepOrders, VllmRequestId
    from baton.errors import HandoffError
    from baton.ids import Epoch, TicketId, WorkerId
    from baton.telemetry.handoff_metrics import HandoffInstruments


def open_trace(prompt: Prompt, role: str, worker: WorkerId, epoch: Epoch) -> RequestSpan:
    """The trace of a request in role `prefill` or `decode`."""
    ticket = prompt.ticket
    peer = ticket.decode if role == "prefill" else ticket.prefill
    trace = RequestSpan(
        request_id=ticket.request_id,
        worker=worker,
        epoch=epoch,
        role=role,
        ticket=ticket.id.hex(),
        peer=peer.worker,
        mode=ticket.mode,
        distance=ticket.distance or None,
        num_prompt_tokens=prompt.num_tokens,
    )
    trace.stamp(Stamp.RECEIVED, prompt.received_at)
    return trace


def open_partial_trace(span: RequestSpan) -> RequestSpan:
    """A trace for one of several tickets of a request."""
    return RequestSpan(
        request_id=span.request_id, worker=span.worker, epoch=span.epoch, role=span.role
    )


NO_TRANSPORT: Final = "none"


class HandoffRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`wait_s` is how long its blocks were held; `transfer_s` from the first layer ready to landed.

    `failed_stage` is None where it ended well.
    """

    side: Literal["sent", "received"]
    transport: str
    expected_transport: str
    num_bytes: int
    num_pages: int
    wait_s: float
    transfer_s: float | None = None
    failed_stage: str | None = None


def record_sent(span: RequestSpan, error: HandoffError | None, ended_at: float) -> HandoffRecord:
    """A prefill request's handoff. One that was declined did not fail: nothing of it was wanted."""
    failed = error is not None and error.stage != DECLINED_STAGE
    return HandoffRecord(
        side="sent",
        transport=span.transport or NO_TRANSPORT,
        expected_transport=span.expected_transport or NO_TRANSPORT,
        num_bytes=span.num_bytes,
        num_pages=span.num_pages,
        wait_s=max(0.0, ended_at - span.stamps.get(Stamp.ADMITTED, ended_at)),
        failed_stage=error.stage if error is not None and failed else None,
    )


def record_received(
    span: RequestSpan, error: HandoffError | None, ended_at: float
) -> HandoffRecord:
    """A decode request's handoff."""
    landed = span.stamps.get(Stamp.LAST_LAYER_LANDED)
    ready = span.peer_stamps.get(Stamp.FIRST_LAYER_READY)
    done = error is None and landed is not None and ready is not None
    return HandoffRecord(
        side="received",
        transport=span.transport or NO_TRANSPORT,
        expected_transport=span.expected_transport or NO_TRANSPORT,
        num_bytes=span.num_bytes if error is None else 0,
        num_pages=span.num_pages if error is None else 0,
        wait_s=max(0.0, ended_at - span.stamps.get(Stamp.PAGES_RESERVED, ended_at)),
        transfer_s=landed - ready if done and landed is not None and ready is not None else None,
        failed_stage=None if error is None else error.stage,
    )


FALLBACK_CAUSE: Final = "computed locally"


@dataclass(frozen=True, slots=True)
class _Open:
    span: RequestSpan
    parts: tuple[RequestSpan, ...]


class RankObserver:
    """Owned by vLLM's worker thread; the control server reads the ring and the instruments."""

    def __init__(self, traces: TraceRing, instruments: HandoffInstruments) -> None:
        self._traces, self._instruments = traces, instruments
        self._open: dict[VllmRequestId, _Open] = {}
        self._starting: list[RequestSpan] = []
        self._records: list[HandoffRecord] = []
        self._held = HeldBlockTime()

    @property
    def held_block_s(self) -> HeldBlockSeconds:
        """Blocks times seconds for which offered prompts held them, until their handoffs ended."""
        return self._held.block_seconds

    def opened(
        self, request: VllmRequestId, span: RequestSpan, parts: Mapping[TicketId, RequestSpan]
    ) -> None:
        """A handoff begins; its trace can be asked for from now on."""
        self._open[request] = _Open(span, tuple(parts.values()))
        self._traces.add(span)

    def computes(self, span: RequestSpan) -> None:
        """This rank computes a prompt of which it sends nothing: its trace can be asked for."""
        self._traces.add(span)

    def stamp(self, request: VllmRequestId, stamp: Stamp, at: Instant) -> None:
        """Note an instant, in the trace of each ticket too: the agent sends it to its peer."""
        found = self._open.get(request)
        if found is not None:
            found.span.stamp(stamp, at)
            for part in found.parts:
                if part is not found.span:
                    part.stamp(stamp, at)
        if stamp is Stamp.PREFILL_DONE:
            self._held.prefill_done(request, at)

    def launched(self, request: VllmRequestId, at: Instant) -> None:
        """A GPU was given the rest of an offered prompt: its blocks wait for it and the handoff."""
        self._held.prefill_done(request, at)

    def offered(self, request: VllmRequestId, mode: HandoffMode, at: Instant) -> None:
        """A prompt is held for its decode worker from now on."""
        self._held.hold(request, mode, at)

    def grew(self, request: VllmRequestId, num_blocks: int, at: Instant) -> None:
        """An offered prompt has so many blocks from now on."""
        self._held.resize(request, num_blocks, at)

    def received(self, load: LoadInProgress, at: Instant) -> None:
        """A load is over."""
        request, error = load.expect.request, load.failure
        found = self._open.get(request)
        if found is None:
            return
        merge_parts(found.span, found.parts)
        if error is None:
            span = found.span
            num_landed = span.num_prompt_tokens if load.num_landed is None else load.num_landed
            span.num_received_tokens = max(0, num_landed - span.num_cached_tokens)
            span.stamp(Stamp.KV_READY, at)
            if Stamp.LAST_LAYER_LANDED in span.stamps:
                self._instruments.landed(span)
        else:
            found.span.fallbacks.append(f"{FALLBACK_CAUSE}: {error}")
        self._records.append(record_received(found.span, error, at))

    def sent(self, request: VllmRequestId, error: HandoffError | None, at: Instant) -> None:
        """An offer is over: with it this server's part in the request's trace."""
        self._held.release(request, at)
        found = self._open.pop(request, None)
        if found is None:
            return
        span = found.span
        merge_parts(span, found.parts)
        span.outcome = _outcome_of(error)
        span.stamp(Stamp.FINISHED, at)
        self._instruments.finished(span)
        self._records.append(record_sent(span, error, at))

    def step_begins(self, orders: StepOrders, at: Instant) -> None:
        """Apply a step's orders to requests whose handoffs have ended."""
        for request in orders.started:
            self.started(request, at)
        for finished in orders.finished:
            self.finished(finished, at)

    def started(self, request: VllmRequestId, at: Instant) -> None:
        """A received prompt is decoded for the first time in the step that begins."""
        found = self._open.get(request)
        if found is not None:
            found.span.stamp(Stamp.DECODE_SCHEDULED, at)
            self._starting.append(found.span)

    def step_ended(self, at: Instant) -> None:
        """The step's tokens are there."""
        for span in self._starting:
            span.stamp(Stamp.FIRST_TOKEN, at)
        self._starting.clear()

    def finished(self, finished: Finished, at: Instant) -> None:
        """A request is over. A prefill request's trace ends with its handoff instead."""
        found = self._open.get(finished.request)
        if found is None or found.span.role != "decode":
            return
        del self._open[finished.request]
        span = found.span
        span.outcome = finished.outcome
        span.num_output_tokens = finished.num_output_tokens
        span.stamp(Stamp.FINISHED, at)
        self._instruments.finished(span)

    def take_records(self) -> list[HandoffRecord]:
        """Handoffs that ended since the last call."""
        records, self._records = self._records, []
        return records


def _outcome_of(error: HandoffError | None) -> str:
    if error is None:
        return "prefilled"
    if error.stage == DECLINED_STAGE:
        return "declined"
    return "cancelled" if error.stage == "abort" else "failed"
