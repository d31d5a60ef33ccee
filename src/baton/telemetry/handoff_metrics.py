"""Handoffs as one side saw them: results, fallbacks, and what those that landed took.

    baton_handoff_transfer_seconds           first layer computed to last one landed
    baton_handoff_transfer_seconds_per_mib   the same for each MiB: 1 over it is the bandwidth
    baton_handoff_exposed_share              the part of it after prefill's end

These have the labels `distance`, `transport`, `mode` and `operation`. Sets of labels that occur
without a failure exist from the start, as far as half of `MAX_LABEL_SETS` allows; others from their
first handoff on, `MAX_LABEL_SETS` in all, and what comes beyond that counts as `other`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from baton.telemetry.trace import RequestSpan, Stamp
from baton.telemetry.transfer_report import DISTANCES
from baton.telemetry.transfers import HandoffLabels, LandedHandoff, TransferTable, name_distance

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.auth.ticket import HandoffMode

RESULTS: Final = ("completed", "declined", "failed", "aborted")
UNKNOWN: Final = "other"
REFERENCE: Final = "reference"
"""In place of a transport where nothing moved."""
STORE: Final = "store"
"""In place of a transport in mode pool, which has no distance either."""
LOCAL_DISTANCES: Final = DISTANCES[:2]
MAX_LABEL_SETS: Final = 20
OTHER_LABELS: Final = HandoffLabels(UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
POOL_LABELS: Final = HandoffLabels("unknown", STORE, "pool", "READ")

TRANSFER_EDGES_S: Final = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0,
)  # fmt: skip
PER_MIB_EDGES_S: Final = (
    0.000002, 0.000005, 0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005,
    0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
)  # fmt: skip
"""From 500 GB/s to 1 MB/s."""
SHARE_EDGES: Final = (0.0, 0.1, 0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class ReceivePaths:
    """By what ways KV comes to this worker; `local` are transports within a host."""

    transports: tuple[str, ...] = ()
    local: frozenset[str] = frozenset()
    modes: tuple[HandoffMode, ...] = ()
    preferred_op: str = "WRITE"

    def distances(self, transport: str) -> tuple[str, ...]:
        """Over which a transport can carry KV."""
        return LOCAL_DISTANCES if transport in self.local else DISTANCES

    def label_sets(self) -> Iterator[HandoffLabels]:
        """Those of handoffs in which nothing fails, between workers that report where they are."""
        for mode in self.modes:
            if mode == "pool":
                yield POOL_LABELS
            elif mode == "reference":
                for distance in LOCAL_DISTANCES:
                    yield HandoffLabels(distance, REFERENCE, mode, "NONE")
            else:
                operation = "READ" if mode == "pull" else self.preferred_op
                for transport in self.transports:
                    for distance in self.distances(transport):
                        yield HandoffLabels(distance, transport, mode, operation)


@dataclass(frozen=True, slots=True)
class _Landed:
    """What is counted of handoffs with one set of labels."""

    num_bytes: Counter
    exposed_s: Counter
    transfer_s: Histogram
    s_per_mib: Histogram
    exposed_share: Histogram

    def count(self, num_bytes: int, landed: LandedHandoff) -> None:
        self.num_bytes.inc(num_bytes)
        if landed.exposed_s is not None:
            self.exposed_s.inc(landed.exposed_s)
        for histogram, value in (
            (self.transfer_s, landed.transfer_s),
            (self.s_per_mib, landed.s_per_mib),
            (self.exposed_share, landed.exposed_share),
        ):
            if value is not None:
                histogram.observe(value)


class LandedInstruments:
    """Handoffs whose KV is here, by distance, transport, mode and operation."""

    def __init__(self, registry: CollectorRegistry, paths: ReceivePaths) -> None:
        labels = HandoffLabels._fields

        def histogram(name: str, text: str, edges: Sequence[float]) -> Histogram:
            return Histogram(name, text, labels, buckets=edges, registry=registry)

        self._num_bytes = Counter(
            "baton_handoff_received_bytes", "KV received.", labels, registry=registry
        )
        self._exposed_s = Counter(
            "baton_handoff_exposed_seconds",
            "Time that handoffs added to prefill, in sum.",
            labels,
            registry=registry,
        )
        self._transfer_s = histogram(
            "baton_handoff_transfer_seconds",
            "Time from the first layer computed to the last one landed.",
            TRANSFER_EDGES_S,
        )
        self._s_per_mib = histogram(
            "baton_handoff_transfer_seconds_per_mib",
            "The same time, for each MiB of KV: the inverse of the effective bandwidth.",
            PER_MIB_EDGES_S,
        )
        self._exposed_share = histogram(
            "baton_handoff_exposed_share",
            "The part of that time that was after prefill; 0 where it hid behind compute.",
            SHARE_EDGES,
        )
        self._transports = frozenset((*paths.transports, REFERENCE))
        self._children: dict[HandoffLabels, _Landed] = {}
        # No more than half: those that never occur leave room for those that do.
        for each in (OTHER_LABELS, *islice(paths.label_sets(), MAX_LABEL_SETS // 2 - 1)):
            self._add(each)

    def landed(self, trace: RequestSpan, landed: LandedHandoff) -> HandoffLabels:
        """Count a handoff; its labels for the report, which is bounded in another way."""
        labels = self._labels_of(trace)
        if labels not in self._children and len(self._children) < MAX_LABEL_SETS:
            self._add(labels)
        self._children.get(labels, self._children[OTHER_LABELS]).count(trace.num_bytes, landed)
        return labels

    def _labels_of(self, trace: RequestSpan) -> HandoffLabels:
        if trace.mode == "pool":
            return POOL_LABELS
        if trace.transport not in self._transports or not trace.mode or not trace.operation:
            return OTHER_LABELS
        distance = name_distance(trace.distance)
        return HandoffLabels(distance, str(trace.transport), trace.mode, trace.operation)

    def _add(self, labels: HandoffLabels) -> None:
        self._children[labels] = _Landed(
            self._num_bytes.labels(*labels),
            self._exposed_s.labels(*labels),
            self._transfer_s.labels(*labels),
            self._s_per_mib.labels(*labels),
            self._exposed_share.labels(*labels),
        )


class HandoffInstruments:
    """Handoffs as one side saw them, by result and transport."""

    def __init__(
        self,
        registry: CollectorRegistry,
        paths: ReceivePaths,
        fallback_causes: Sequence[str],
        transfers: TransferTable,
    ) -> None:
        self._transfers = transfers
        self._landed = LandedInstruments(registry, paths)
        used = (*paths.transports, UNKNOWN)
        self._used = frozenset(used)
        handoffs = Counter(
            "baton_handoffs",
            "Handoffs that have ended; transport is 'other' where none was chosen.",
            ["role", "transport", "result"],
            registry=registry,
        )
        self._handoffs = {
            (role, transport, result): handoffs.labels(role, transport, result)
            for role in ("prefill", "decode")
            for transport in used
            for result in RESULTS
        }
        verified = Counter(
            "baton_handoff_verified_bytes",
            "KV that was compared with its sender's digests.",
            ["transport"],
            registry=registry,
        )
        self._verified = {transport: verified.labels(transport) for transport in used}
        failures = Counter(
            "baton_handoff_digest_failures",
            "Arrivals of KV that was not what its sender had.",
            ["transport"],
            registry=registry,
        )
        self._digest_failures = {transport: failures.labels(transport) for transport in used}
        mismatches = Counter(
            "baton_handoff_transport_mismatch",
            "Handoffs that used another transport than the one expected between the two workers.",
            ["expected", "used"],
            registry=registry,
        )
        self._mismatches = {
            (expected, actual): mismatches.labels(expected, actual)
            for expected in used
            for actual in used
            if expected != actual
        }
        fallbacks = Counter(
            "baton_handoff_fallbacks",
            "Handoffs replaced by something slower, by cause.",
            ["cause"],
            registry=registry,
        )
        self._fallbacks = {cause: fallbacks.labels(cause) for cause in (*fallback_causes, UNKNOWN)}
        self._encoded = Counter(
            "baton_handoff_encoded",
            "Handoffs whose KV came encoded, by the encoding and where it was used.",
            ["encoding"],
            registry=registry,
        )

    def landed(self, trace: RequestSpan) -> None:
        """Count what a handoff into this worker took, once, where its KV is here."""
        landed = LandedHandoff.of(trace)
        if landed is None:
            return
        self._transfers.handoff(trace, self._landed.landed(trace, landed), landed)
        transport = trace.transport if trace.transport in self._used else UNKNOWN
        if trace.expected_transport in self._used and trace.expected_transport != transport:
            self._mismatches[trace.expected_transport, str(transport)].inc()

    def finished(self, trace: RequestSpan) -> None:
        """Count one role's part of a request that has ended; `landed` counts the rest."""
        transport = trace.transport if trace.transport in self._used else UNKNOWN
        self._handoffs[trace.role, str(transport), _result(trace)].inc()
        if trace.role != "decode":
            return
        _add(self._verified, trace.verified_bytes)
        if trace.digest_failures:
            _add(self._digest_failures, trace.digest_failures)
            self._transfers.digest_failures(sum(trace.digest_failures.values()))
        for encoding in trace.encodings:
            self._encoded.labels(encoding).inc()
        for fallback in trace.fallbacks:
            cause = fallback.partition(": ")[0]
            self._fallbacks.get(cause, self._fallbacks[UNKNOWN]).inc()


def _add(counters: dict[str, Counter], by_transport: dict[str, int]) -> None:
    for transport, number in by_transport.items():
        counters.get(transport, counters[UNKNOWN]).inc(number)


def _result(trace: RequestSpan) -> str:
    """How a handoff ended; `declined` where decode had cached nearly all of the prompt."""
    if trace.outcome == "prefilled" or Stamp.KV_READY in trace.stamps:
        return "completed"
    if trace.outcome == "cancelled":
        return "aborted"
    answered = trace.role == "decode" and trace.outcome in {"stop", "length"}
    if trace.outcome == "declined" or (answered and Stamp.PAGES_RESERVED not in trace.stamps):
        return "declined"
    return "failed"
