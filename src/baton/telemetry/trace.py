"""The trace of one request: named instants and facts, merged from the processes it crossed.

Instants are seconds on the recording host's monotonic clock; instants that came from a peer were
shifted by the clock offset measured on the link to it.

`summarize` answers what a person asks: where did the time go? A duration is only taken between two
instants on one clock: both recorded in one span, or one by the peer and shifted to this span's
clock (`RequestSpan.peer_stamps`). What was not recorded is None, never 0.

    received ─queue─► prefill started ─prefill─► prefill done ─exposed transfer─► last layer landed
                                                       └─ transfer that hid behind compute is free
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stamp(StrEnum):
    """The instants that are recorded, in the order in which they normally fall."""

    RECEIVED = "received"
    ADMITTED = "admitted"
    TOKENIZED = "tokenized"  # this and the next two: by the gateway alone
    DEQUEUED = "dequeued"
    PLACED = "placed"
    PREFILL_STARTED = "prefill_started"
    FIRST_LAYER_READY = "first_layer_ready"
    PREFILL_DONE = "prefill_done"
    PAGES_RESERVED = "pages_reserved"
    GRANTED = "granted"
    FIRST_LAYER_LANDED = "first_layer_landed"
    LAST_LAYER_LANDED = "last_layer_landed"
    KV_READY = "kv_ready"
    DECODE_SCHEDULED = "decode_scheduled"
    FIRST_TOKEN = "first_token"  # noqa: S105
    FINISHED = "finished"


class EncodingEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a handoff was predicted to take raw, and in `encoding`; which of the two was chosen.

    `encoding` is the quickest one by the prediction, or that of the handoff before.

    From the grant until all KV is there. `prefill_s` of both is what the prompt was predicted to
    need to be computed: 0 where that was not counted. `took_s` is what it took.
    """

    chosen: str
    encoding: str
    raw_s: float
    encoded_s: float
    prefill_s: float = 0.0
    took_s: float | None = None


class PredictedTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What the router's models predict of a request when it is placed.

    `decode_queue_s`: after a handoff, until an answer that ends leaves a place.
    """

    queue_s: float
    load_s: float
    prefill_s: float
    handoff_s: float
    decode_queue_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """From placement until the first token."""
        before_s = self.queue_s + self.load_s + self.prefill_s
        return before_s + self.handoff_s + self.decode_queue_s


class PrefillChunk(msgspec.Struct, frozen=True, array_like=True):
    """One step's part of a prompt."""

    started_at: float
    ended_at: float
    num_tokens: int


MOST_CHUNKS: Final = 64
"""Of one prompt; the last one then covers all further steps."""
MOST_TOKEN_GAPS: Final = 1024
"""Of one answer: the first ones are recorded."""


class RequestSpan(msgspec.Struct, kw_only=True):
    """What one process recorded for one request: `role` is the part it played.

    `trace_id`, `span_id` and `parent_id` are W3C Trace Context's, "" where none are known.
    `token_gaps` are little-endian float32: seconds between the parts of a streamed answer, which
    are tokens unless several arrived together; `MOST_TOKEN_GAPS` of them at most.
    `layers_ready`, by the worker that sends, and `layers_landed`, by the one that receives: for
    each layer when the last of its KV was computed (on a GPU: had left the engine's pages), or had
    landed; 0 where that is not known. Empty where KV is not handed over layer by layer.
    """

    request_id: str
    worker: str
    epoch: str
    role: str  # "colocated", "prefill", "decode" or "gateway"
    stamps: dict[Stamp, float] = {}
    peer_stamps: dict[Stamp, float] = {}
    ticket: str | None = None
    peer: str | None = None
    mode: str | None = None
    operation: str | None = None  # who moved the bytes: "WRITE", "READ", or "NONE"
    distance: str | None = None  # between the two workers, as the gateway knows it
    transport: str | None = None
    expected_transport: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_received_tokens: int = 0
    num_loaded_tokens: int = 0  # of those that count as cached: from the store
    num_pages: int = 0
    num_bytes: int = 0
    num_output_tokens: int = 0
    fallbacks: list[str] = []
    reroutes: list[str] = []  # "transport: why", for each that failed and was taken over
    encodings: list[str] = []  # "use=name/version", for each that wrote KV other than raw
    encoding_estimate: EncodingEstimate | None = None
    verified_bytes: dict[str, int] = {}  # by transport: compared with their sender's digests
    digest_failures: dict[str, int] = {}  # by transport: notices whose bytes were others
    waited_s: float = 0.0  # in the gateway's queue
    held_s: float = 0.0  # until the store had answered, by an engine that could have computed it
    moves: list[str] = []  # of the stream, from one worker to another
    trace_id: str = ""
    span_id: str = ""
    parent_id: str = ""
    is_sampled: bool = False
    tokenize_s: float | None = None  # by this worker, of the time before it was admitted
    verify_s: float = 0.0  # within the transfer
    chunks: list[PrefillChunk] = []
    layers_ready: list[float] = []
    layers_landed: list[float] = []
    token_gaps: bytes = b""
    predicted: PredictedTimes | None = None
    outcome: str | None = None

    @property
    def name(self) -> str:
        """For logs: the request, and its trace."""
        return f"{self.request_id} (trace {self.trace_id})" if self.trace_id else self.request_id

    def stamp(self, name: Stamp, at: float) -> None:
        """Record an instant; the first one of a name wins (a retry does not rewrite history)."""
        self.stamps.setdefault(name, at)

    def note_encoding(self, name: str) -> None:
        """Record that KV of this request was encoded, once for each encoding."""
        if name not in self.encodings:
            self.encodings.append(name)

    def note_chunk(self, started_at: float, ended_at: float, num_tokens: int) -> None:
        """Record a step that computed a part of the prompt."""
        chunks = self.chunks
        if len(chunks) < MOST_CHUNKS:
            chunks.append(PrefillChunk(started_at, ended_at, num_tokens))
        else:
            last = chunks[-1]
            chunks[-1] = PrefillChunk(last.started_at, ended_at, last.num_tokens + num_tokens)

    def verified(self, transport: str, num_bytes: int, *, is_intact: bool) -> None:
        """Record that bytes which a transport brought were compared with their digests."""
        self.verified_bytes[transport] = self.verified_bytes.get(transport, 0) + num_bytes
        if not is_intact:
            self.digest_failures[transport] = self.digest_failures.get(transport, 0) + 1

    def snapshot(self) -> RequestSpan:
        """A copy that later stamps of other threads do not change."""
        return msgspec.structs.replace(
            self,
            stamps=dict(self.stamps),
            peer_stamps=dict(self.peer_stamps),
            fallbacks=list(self.fallbacks),
            reroutes=list(self.reroutes),
            encodings=list(self.encodings),
            moves=list(self.moves),
            chunks=list(self.chunks),
            layers_ready=list(self.layers_ready),
            layers_landed=list(self.layers_landed),
            verified_bytes=dict(self.verified_bytes),
            digest_failures=dict(self.digest_failures),
        )


def new_token_gaps() -> array[float]:
    """For the gaps of an answer that is streamed, in seconds."""
    return array("f")


def pack_token_gaps(gaps: array[float]) -> bytes:
    """What `new_token_gaps` made, as `RequestSpan.token_gaps`."""
    return _little_endian(gaps).tobytes()


def read_token_gaps(span: RequestSpan) -> array[float]:
    """Seconds between the parts of a streamed answer, the first `MOST_TOKEN_GAPS` of them.

    Raises:
        ValueError: `span` was not packed by `pack_token_gaps`.
    """
    gaps = new_token_gaps()
    gaps.frombytes(span.token_gaps)
    return _little_endian(gaps)


def _little_endian(gaps: array[float]) -> array[float]:
    if sys.byteorder == "big":
        gaps = gaps[:]
        gaps.byteswap()
    return gaps


class TraceRing:
    """The last `capacity` traces of this process, found by request id. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a trace ring of {capacity} traces remembers nothing")
        self._capacity = capacity
        self._traces: OrderedDict[str, RequestSpan] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, trace: RequestSpan) -> None:
        """Remember a trace, which may go on changing; the newest of a request id wins."""
        with self._lock:
            self._traces.pop(trace.request_id, None)
            self._traces[trace.request_id] = trace
            if len(self._traces) > self._capacity:
                self._traces.popitem(last=False)

    def find(self, request_id: str) -> RequestSpan | None:
        """A snapshot of the trace of a request; None if it is unknown or forgotten."""
        with self._lock:
            trace = self._traces.get(request_id)
        return None if trace is None else trace.snapshot()

    def __len__(self) -> int:
        with self._lock:
            return len(self._traces)


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
    operation: str | None
    distance: str | None
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
        operation=decode.operation,
        distance=decode.distance or outermost.distance,
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
