"""Links as one worker measured and used them: what was predicted, chosen, and came of it.

Implements `transfer.links.outcome.LinkObserver`; the agent's thread calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client import CollectorRegistry

DIRECTIONS: Final = ("push", "pull")
UNKNOWN: Final = "other"
ERROR_EDGES: Final = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 4.0, 8.0)


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


class _Outcome(Protocol):
    @property
    def transport(self) -> str: ...
    @property
    def direction(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def predicted_s(self) -> float: ...
    @property
    def observed_s(self) -> float: ...
    @property
    def refined(self) -> bool: ...


class LinkInstruments:
    """By transport and direction, not by peer: labels are bounded. Unknown transports: `other`."""

    def __init__(self, registry: CollectorRegistry, transports: Sequence[str]) -> None:
        self._transports = (*transports, UNKNOWN)
        labels = ["direction", "transport"]

        def count(name: str, text: str) -> dict[tuple[str, str], Counter]:
            counter = Counter(name, text, labels, registry=registry)
            return {pair: counter.labels(*pair) for pair in self._pairs()}

        self._chosen = count("baton_link_choices", "Transfers, by the transport chosen for them.")
        self._bytes = count("baton_link_bytes", "Bytes of transfers that succeeded.")
        self._predicted = count(
            "baton_link_predicted_seconds", "What transfers were predicted to take, in sum."
        )
        self._observed = count("baton_link_observed_seconds", "What they took, in sum.")
        self._failures = count(
            "baton_link_failures", "Times that a transport failed and another one took over."
        )
        error = Histogram(
            "baton_link_model_relative_error",
            "|predicted - observed| / observed, of transfers that the link model learns from.",
            labels,
            buckets=ERROR_EDGES,
            registry=registry,
        )
        self._error = {pair: error.labels(*pair) for pair in self._pairs()}
        mismatches = Counter(
            "baton_link_mismatches",
            "Transfers over another transport than the best one that both workers have.",
            ["direction", "expected", "used"],
            registry=registry,
        )
        self._mismatches = {
            (direction, expected, used): mismatches.labels(direction, expected, used)
            for direction in DIRECTIONS
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

    def chosen(self, direction: str, choice: _Choice) -> None:
        """See `LinkObserver`."""
        self._chosen[direction, self._name(choice.used)].inc()
        pair = self._name(choice.expected), self._name(choice.used)
        if choice.is_mismatch and pair[0] != pair[1]:
            self._mismatches[direction, *pair].inc()

    def carried(self, outcome: _Outcome) -> None:
        """See `LinkObserver`."""
        key = outcome.direction, self._name(outcome.transport)
        self._bytes[key].inc(outcome.num_bytes)
        self._predicted[key].inc(outcome.predicted_s)
        self._observed[key].inc(outcome.observed_s)
        if outcome.refined and outcome.observed_s > 0:
            difference = abs(outcome.predicted_s - outcome.observed_s)
            self._error[key].observe(difference / outcome.observed_s)

    def failed(self, direction: str, transport: str) -> None:
        """See `LinkObserver`."""
        self._failures[direction, self._name(transport)].inc()

    def measured(self, direction: str, transport: str, model: _Model) -> None:
        """See `LinkObserver`."""
        name = self._name(transport)
        self._latency.labels(direction, name).set(model.latency_s)
        self._bandwidth.labels(direction, name).set(model.bandwidth)

    def _name(self, transport: str) -> str:
        return transport if transport in self._transports else UNKNOWN

    def _pairs(self) -> list[tuple[str, str]]:
        return [(direction, name) for direction in DIRECTIONS for name in self._transports]
