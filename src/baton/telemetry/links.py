"""Links as one worker measured and used them: what was predicted, chosen, and came of it.

Implements `transfer.links.choice.LinkObserver`; the agent's thread calls. `operation` is WRITE for
what this worker wrote to a peer, READ for what it read from one; the other side counts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.telemetry.transfers import (
    OPERATIONS,
    LinkLabels,
    Outcome,
    PeerSegments,
    TransferTable,
    TransferTime,
    name_distance,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.telemetry.handoff_metrics import ReceivePaths

UNKNOWN: Final = "other"
ERROR_EDGES: Final = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 4.0, 8.0)
MAX_LABEL_SETS: Final = 16
OTHER_LABELS: Final = LinkLabels(UNKNOWN, UNKNOWN, UNKNOWN)


class _Choice(Protocol):
    @property
    def expected(self) -> str: ...
    @property
    def used(self) -> str: ...
    @property
    def is_mismatch(self) -> bool: ...


class _Model(Protocol):
    @property
    def latency_s(self) -> float: ...
    @property
    def bandwidth(self) -> float: ...


@dataclass(frozen=True, slots=True)
class _Carried:
    """What is counted of transfers with one set of labels."""

    num_bytes: Counter
    predicted_s: Counter
    observed_s: Counter
    error: Histogram


class CarriedInstruments:
    """Transfers that succeeded, by distance, transport and operation.

    Sets of labels between workers that report where they are exist from the start, as far as half
    of `MAX_LABEL_SETS` allows, so that those that never occur leave room for those that do; what
    comes beyond `MAX_LABEL_SETS` counts as `other`.
    """

    def __init__(self, registry: CollectorRegistry, paths: ReceivePaths) -> None:
        labels = LinkLabels._fields

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._num_bytes = counter("baton_link_bytes", "Bytes of transfers that succeeded.")
        self._predicted_s = counter(
            "baton_link_predicted_seconds", "What transfers were predicted to take, in sum."
        )
        self._observed_s = counter("baton_link_observed_seconds", "What they took, in sum.")
        self._error = Histogram(
            "baton_link_model_relative_error",
            "|predicted - observed| / observed, of transfers that the link model learns from.",
            labels,
            buckets=ERROR_EDGES,
            registry=registry,
        )
        self._transports = frozenset(paths.transports)
        self._children: dict[LinkLabels, _Carried] = {}
        usual = (
            LinkLabels(distance, transport, operation)
            for transport in paths.transports
            for distance in paths.distances(transport)
            for operation in OPERATIONS.values()
        )
        for each in (OTHER_LABELS, *islice(usual, MAX_LABEL_SETS // 2 - 1)):
            self._add(each)

    def carried(self, outcome: Outcome, labels: LinkLabels) -> None:
        """Count a period in which a link was in use."""
        labels = self._find(labels) if outcome.transport in self._transports else OTHER_LABELS
        child = self._children[labels]
        child.num_bytes.inc(outcome.num_bytes)
        child.predicted_s.inc(outcome.predicted_s)
        child.observed_s.inc(outcome.observed_s)
        if outcome.refined and outcome.observed_s > 0:
            difference = abs(outcome.predicted_s - outcome.observed_s)
            child.error.observe(difference / outcome.observed_s)

    def _find(self, labels: LinkLabels) -> LinkLabels:
        """The set itself, made if there is room; `OTHER_LABELS` if not."""
        if labels in self._children:
            return labels
        if len(self._children) >= MAX_LABEL_SETS:
            return OTHER_LABELS
        self._add(labels)
        return labels

    def _add(self, labels: LinkLabels) -> None:
        self._children[labels] = _Carried(
            self._num_bytes.labels(*labels),
            self._predicted_s.labels(*labels),
            self._observed_s.labels(*labels),
            self._error.labels(*labels),
        )


class SegmentInstruments:
    """TCP segments that the kernel sent, by distance and transport.

    A transport's sets of labels exist, at 0, once its segments are counted: where the kernel does
    not count them there are none.
    """

    def __init__(self, registry: CollectorRegistry, paths: ReceivePaths) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ("distance", "transport"), registry=registry)

        self._paths = paths
        self._counters = (
            counter("baton_link_segments", "TCP segments with data that were sent."),
            counter("baton_link_retransmitted_segments", "Those of them that were sent again."),
            counter(
                "baton_link_duplicate_segments",
                "Those that were sent again though the receiver had them.",
            ),
        )
        self._children: dict[tuple[str, str], tuple[Counter, ...]] = {}

    def sent(self, transport: str, segments: Iterable[PeerSegments]) -> None:
        """Count them."""
        kind = transport if transport in self._paths.transports else UNKNOWN
        for distance in (*self._paths.distances(transport), name_distance(None)):
            self._find(distance, kind)
        for each in segments:
            counts = each.counts
            children = self._find(name_distance(each.distance), kind)
            values = counts.num, counts.num_retransmitted, counts.num_duplicates
            for child, value in zip(children, values, strict=True):
                child.inc(value)

    def _find(self, distance: str, kind: str) -> tuple[Counter, ...]:
        labels = distance, kind
        if labels not in self._children:
            self._children[labels] = tuple(each.labels(*labels) for each in self._counters)
        return self._children[labels]


class LinkInstruments:
    """By distance, transport and operation, not by peer: labels are bounded. `transfers`: by peer.

    Unknown transports count as `other`.
    """

    def __init__(
        self, registry: CollectorRegistry, paths: ReceivePaths, transfers: TransferTable
    ) -> None:
        self._transports = (*paths.transports, UNKNOWN)
        self._transfers = transfers
        self._carried = CarriedInstruments(registry, paths)
        self._segments = SegmentInstruments(registry, paths)
        labels = ["operation", "transport"]

        def count(name: str, text: str) -> dict[tuple[str, str], Counter]:
            counter = Counter(name, text, labels, registry=registry)
            return {pair: counter.labels(*pair) for pair in self._pairs()}

        self._chosen = count("baton_link_choices", "Transfers, by the transport chosen for them.")
        self._failures = count(
            "baton_link_failures", "Times that a transport failed and another one took over."
        )
        mismatches = Counter(
            "baton_link_mismatches",
            "Transfers over another transport than the best one that both workers have.",
            ["operation", "expected", "used"],
            registry=registry,
        )
        self._mismatches = {
            (operation, expected, used): mismatches.labels(operation, expected, used)
            for operation in OPERATIONS.values()
            for expected in self._transports
            for used in self._transports
            if expected != used
        }
        self._latency = Gauge(
            "baton_link_latency_seconds",
            "Of the link measured last.",
            labels,
            registry=registry,
        )
        self._bandwidth = Gauge(
            "baton_link_bandwidth_bytes_per_second",
            "Of the link measured last.",
            labels,
            registry=registry,
        )
        drifted = Gauge(
            "baton_link_drifted",
            "Links to peers that take longer than they did at first (telemetry/drift.py).",
            labels,
            registry=registry,
        )
        for operation, transport in self._pairs():
            count_drifted = partial(transfers.count_drifted, transport, operation)
            drifted.labels(operation, transport).set_function(count_drifted)

    def chosen(self, direction: str, choice: _Choice) -> None:
        """See `LinkObserver`."""
        expected, used = self._name(choice.expected), self._name(choice.used)
        self._chosen[OPERATIONS[direction], used].inc()
        if choice.is_mismatch and expected != used:
            self._mismatches[OPERATIONS[direction], expected, used].inc()

    def transferred(self, transfer: TransferTime) -> None:
        """See `LinkObserver`."""
        self._transfers.transfer(transfer, self._labels_of(transfer))

    def carried(self, outcome: Outcome) -> None:
        """See `LinkObserver`."""
        labels = self._labels_of(outcome)
        self._carried.carried(outcome, labels)
        self._transfers.link(outcome, labels)

    def failed(self, direction: str, transport: str) -> None:
        """See `LinkObserver`."""
        self._failures[OPERATIONS[direction], self._name(transport)].inc()

    def measured(self, direction: str, transport: str, model: _Model) -> None:
        """See `LinkObserver`."""
        labels = OPERATIONS[direction], self._name(transport)
        self._latency.labels(*labels).set(model.latency_s)
        self._bandwidth.labels(*labels).set(model.bandwidth)

    def sent(self, transport: str, segments: Sequence[PeerSegments]) -> None:
        """See `LinkObserver`."""
        self._segments.sent(transport, segments)
        for each in segments:
            distance = name_distance(each.distance)
            self._transfers.segments(each.peer, distance, self._name(transport), each.counts)

    def _labels_of(self, link: Outcome | TransferTime) -> LinkLabels:
        """Of the report, whose number of entries is bounded in another way than that of series."""
        distance, transport = name_distance(link.distance), self._name(link.transport)
        return LinkLabels(distance, transport, OPERATIONS[link.direction])

    def _name(self, transport: str) -> str:
        return transport if transport in self._transports else UNKNOWN

    def _pairs(self) -> Iterable[tuple[str, str]]:
        for operation in OPERATIONS.values():
            for name in self._transports:
                yield operation, name
