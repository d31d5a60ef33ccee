"""The trace of one request: named instants and facts, merged from the processes it crossed.

Instants are seconds on the recording host's monotonic clock; instants that came from a peer were
shifted by the clock offset measured on the link to it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from enum import StrEnum

import msgspec


class Stamp(StrEnum):
    """The instants that are recorded, in the order in which they normally fall."""

    RECEIVED = "received"
    ADMITTED = "admitted"
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


class RequestSpan(msgspec.Struct, kw_only=True):
    """What one process recorded for one request: `role` is the part it played."""

    request_id: str
    worker: str
    epoch: str
    role: str  # "colocated", "prefill", "decode" or "gateway"
    stamps: dict[Stamp, float] = {}
    peer_stamps: dict[Stamp, float] = {}
    ticket: str | None = None
    peer: str | None = None
    mode: str | None = None
    transport: str | None = None
    expected_transport: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_received_tokens: int = 0
    num_pages: int = 0
    num_bytes: int = 0
    num_output_tokens: int = 0
    fallbacks: list[str] = []
    reroutes: list[str] = []  # "transport: why", for each that failed and was taken over
    verified_bytes: dict[str, int] = {}  # by transport: compared with their sender's digests
    digest_failures: dict[str, int] = {}  # by transport: notices whose bytes were others
    outcome: str | None = None

    def stamp(self, name: Stamp, at: float) -> None:
        """Record an instant; the first one of a name wins (a retry does not rewrite history)."""
        self.stamps.setdefault(name, at)

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
            verified_bytes=dict(self.verified_bytes),
            digest_failures=dict(self.digest_failures),
        )


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
