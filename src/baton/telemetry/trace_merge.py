"""One span of what several have recorded of one request. Pure.

Several are the tickets of one rank, whose handoffs are parts of one, and the tensor-parallel ranks
of one server, which all work on each request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.telemetry.trace import RequestSpan, Stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_LAST_OF_ALL: Final = frozenset({
    Stamp.PREFILL_DONE,
    Stamp.FIRST_LAYER_LANDED,
    Stamp.LAST_LAYER_LANDED,
    Stamp.KV_READY,
    Stamp.FINISHED,
})
"""What has happened only once it has for every part; of other instants the first counts."""


def merge_parts(span: RequestSpan, parts: Iterable[RequestSpan]) -> None:
    """Add to `span` what each part has recorded; `span` itself may be one of them.

    Bytes and pages are sums. Of transports one that was not expected prevails.
    """
    for part in parts:
        if part is span:
            continue
        _merge_stamps(span.stamps, part.stamps)
        _merge_stamps(span.peer_stamps, part.peer_stamps)
        is_mismatch = part.transport != part.expected_transport
        if span.transport is None or (is_mismatch and span.transport == span.expected_transport):
            span.transport, span.expected_transport = part.transport, part.expected_transport
        span.operation = span.operation or part.operation
        span.reroutes += part.reroutes
        for encoding in part.encodings:
            span.note_encoding(encoding)
        span.encoding_estimate = span.encoding_estimate or part.encoding_estimate
        span.verify_s += part.verify_s
        span.num_bytes += part.num_bytes
        span.num_pages += part.num_pages
        _add(span.verified_bytes, part.verified_bytes)
        _add(span.digest_failures, part.digest_failures)
        span.layers_ready = _merge_layers(span.layers_ready, part.layers_ready, min)
        span.layers_landed = _merge_layers(span.layers_landed, part.layers_landed, max)


def merge_ranks(worker: str, spans: Sequence[RequestSpan]) -> RequestSpan:
    """The span of a server, named `worker`, of its ranks' spans, which are changed.

    Ranks verify at the same time: `verify_s` is the longest.

    Raises:
        IndexError: there is none.
    """
    merged, *others = spans
    merged.worker, verify_s = worker, max(span.verify_s for span in spans)
    merge_parts(merged, others)
    merged.verify_s = verify_s
    all_fallbacks = (fallback for span in spans for fallback in span.fallbacks)
    merged.fallbacks = list(dict.fromkeys(all_fallbacks))
    return merged


def _merge_stamps(stamps: dict[Stamp, float], others: dict[Stamp, float]) -> None:
    for stamp, at in others.items():
        known = stamps.get(stamp, at)
        stamps[stamp] = max(known, at) if stamp in _LAST_OF_ALL else min(known, at)


def _add(numbers: dict[str, int], others: dict[str, int]) -> None:
    for name, number in others.items():
        numbers[name] = numbers.get(name, 0) + number


def _merge_layers(
    one: list[float], other: list[float], choose: Callable[[float, float], float]
) -> list[float]:
    if not one or len(one) != len(other):
        return one or other
    return [choose(a, b) if a and b else a or b for a, b in zip(one, other, strict=True)]
