"""From the spans of one request to what a person asks: where did the time go? Pure.

A duration is only taken between two instants on one clock: both recorded in one span, or one
by the peer and shifted to this span's clock (`RequestSpan.peer_stamps`). What was not recorded
is None, never 0.

    received ─queue─► prefill started ─prefill─► prefill done ─exposed transfer─► last layer landed
                                                       └─ transfer that hid behind compute is free
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from baton.telemetry.trace import RequestSpan, Stamp

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFILL_STAMPS: Final = (Stamp.PREFILL_STARTED, Stamp.FIRST_LAYER_READY, Stamp.PREFILL_DONE)


class SpanDurations(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between the stamps of one span; None where an instant is missing.

    `exposed_transfer_s` is what the handoff added to prefill. It is below 0 where all KV had landed
    before prefill sampled its token: the transfer hid behind compute altogether.
    """

    queue_s: float | None
    prefill_s: float | None
    transfer_s: float | None
    exposed_transfer_s: float | None
    decode_queue_s: float | None
    first_token_s: float | None
    total_s: float | None


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One request, over all its spans. Instants are seconds since the gateway received it.

    `first_layer_ready_s` and `last_layer_landed_s` are seconds since prefill started.
    """

    request_id: str
    queue_s: float | None
    prefill_s: float | None
    first_layer_ready_s: float | None
    last_layer_landed_s: float | None
    exposed_transfer_s: float | None
    decode_queue_s: float | None
    first_token_s: float | None
    total_s: float | None
    mode: str | None
    transport: str | None
    expected_transport: str | None
    num_pages: int
    num_bytes: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_received_tokens: int
    num_output_tokens: int
    fallbacks: tuple[str, ...]
    outcome: str | None


def compute_durations(span: RequestSpan) -> SpanDurations:
    """Durations in one span. The queue is before prefill, or before decode if it had none."""
    return SpanDurations(
        queue_s=_between(span, Stamp.RECEIVED, Stamp.PREFILL_STARTED),
        prefill_s=_between(span, Stamp.PREFILL_STARTED, Stamp.PREFILL_DONE),
        transfer_s=_between(span, Stamp.FIRST_LAYER_READY, Stamp.LAST_LAYER_LANDED),
        exposed_transfer_s=_between(span, Stamp.PREFILL_DONE, Stamp.LAST_LAYER_LANDED),
        decode_queue_s=_between(span, Stamp.KV_READY, Stamp.DECODE_SCHEDULED),
        first_token_s=_between(span, Stamp.RECEIVED, Stamp.FIRST_TOKEN),
        total_s=_between(span, Stamp.RECEIVED, Stamp.FINISHED),
    )


def summarize(
    gateway: RequestSpan | None, decode: RequestSpan, prefill: RequestSpan | None
) -> TraceSummary:
    """Merge the spans of one request. `decode` is of the worker that answered (colocated too)."""
    outermost = gateway or decode
    whole = compute_durations(outermost)
    answering = compute_durations(decode)
    prefilling = compute_durations(prefill or decode)
    return TraceSummary(
        request_id=outermost.request_id,
        queue_s=prefilling.queue_s,
        prefill_s=prefilling.prefill_s,
        first_layer_ready_s=_first_between(
            (prefill, decode), Stamp.PREFILL_STARTED, Stamp.FIRST_LAYER_READY
        ),
        last_layer_landed_s=_first_between(
            (decode, prefill), Stamp.PREFILL_STARTED, Stamp.LAST_LAYER_LANDED
        ),
        exposed_transfer_s=answering.exposed_transfer_s,
        decode_queue_s=answering.decode_queue_s,
        first_token_s=whole.first_token_s,
        total_s=whole.total_s,
        mode=decode.mode or outermost.mode,
        transport=decode.transport or (prefill.transport if prefill else None),
        expected_transport=decode.expected_transport or outermost.expected_transport,
        num_pages=decode.num_pages,
        num_bytes=decode.num_bytes,
        num_prompt_tokens=decode.num_prompt_tokens,
        num_cached_tokens=decode.num_cached_tokens,
        num_received_tokens=decode.num_received_tokens,
        num_output_tokens=decode.num_output_tokens,
        fallbacks=tuple(dict.fromkeys(_fallbacks(gateway, decode, prefill))),
        outcome=outermost.outcome or decode.outcome,
    )


def _between(span: RequestSpan, begin: Stamp, end: Stamp) -> float | None:
    start, stop = _instant(span, begin), _instant(span, end)
    return None if start is None or stop is None else stop - start


def _instant(span: RequestSpan, stamp: Stamp) -> float | None:
    """When it happened on this span's clock, where it happened: prefill's stamps are the peer's.

    A worker that received its KV stamps its own first decode step too; that was not prefill.
    """
    if stamp in _PREFILL_STAMPS and span.role == "decode" and Stamp.KV_READY in span.stamps:
        return span.peer_stamps.get(stamp)
    own = span.stamps.get(stamp)
    return span.peer_stamps.get(stamp) if own is None else own


def _first_between(spans: tuple[RequestSpan | None, ...], begin: Stamp, end: Stamp) -> float | None:
    seen = (_between(span, begin, end) for span in spans if span is not None)
    return next((seconds for seconds in seen if seconds is not None), None)


def _fallbacks(*spans: RequestSpan | None) -> Iterator[str]:
    for span in spans:
        if span is not None:
            yield from span.fallbacks
