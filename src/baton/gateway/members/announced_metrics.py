"""Metrics of announcements, as one gateway counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.gateway.members.heartbeat_table import HeartbeatResult
from baton.gateway.members.lease_table import Outcome
from baton.protocol.announcements import RefusalReason

if TYPE_CHECKING:
    from collections.abc import Mapping


class AnnouncementMetrics:
    """Children are made once: a look-up by labels costs more than the count."""

    def __init__(self, registry: CollectorRegistry) -> None:
        answers = Counter(
            "baton_gateway_announcements",
            "Announcements of workers by what was answered, but for those that were refused.",
            ("result",),
            registry=registry,
        )
        refused = Counter(
            "baton_gateway_refused_announcements",
            "Announcements, of workers or relayed, that were not taken.",
            ("reason",),
            registry=registry,
        )
        relayed = Counter(
            "baton_gateway_relayed_announcements",
            "Announcements that other gateways relayed, by what became of them.",
            ("outcome",),
            registry=registry,
        )
        exchanges = Counter(
            "baton_gateway_exchanges",
            "Exchanges of announcements that this gateway began.",
            ("result",),
            registry=registry,
        )
        ended = Counter(
            "baton_gateway_ended_leases",
            "Leases that ended: not renewed, or its worker was found gone, or has taken leave.",
            ("cause",),
            registry=registry,
        )
        heartbeats = Counter(
            "baton_gateway_heartbeats",
            "Datagrams at the port of heartbeats, by what became of them.",
            ("result",),
            registry=registry,
        )
        self._heartbeats = {result: heartbeats.labels(result) for result in HeartbeatResult}
        self._held = Gauge(
            "baton_gateway_announced_workers", "Workers that hold a lease.", registry=registry
        )
        self._answers = {r: answers.labels(r) for r in ("accepted", "waiting", "superseded")}
        self._refused = {reason: refused.labels(reason) for reason in RefusalReason}
        self._relayed = {outcome: relayed.labels(outcome) for outcome in Outcome}
        self._exchanges = {ok: exchanges.labels("ok" if ok else "failed") for ok in (True, False)}
        self._ended = {cause: ended.labels(cause) for cause in ("lapsed", "gone", "farewell")}

    def answered(self, result: str) -> None:
        """A worker's announcement was answered so."""
        self._answers[result].inc()

    def refused(self, reason: RefusalReason) -> None:
        """An announcement was not taken."""
        self._refused[reason].inc()

    def relayed(self, outcome: Outcome) -> None:
        """What became of an announcement that another gateway relayed."""
        self._relayed[outcome].inc()

    def exchanged(self, *, is_ok: bool) -> None:
        """An exchange with another gateway ended."""
        self._exchanges[is_ok].inc()

    def heartbeats(self, results: Mapping[HeartbeatResult, int]) -> None:
        """So many datagrams were read."""
        for result, num in results.items():
            self._heartbeats[result].inc(num)

    def left(self, cause: str) -> None:
        """A lease ended."""
        self._ended[cause].inc()

    def held(self, num_leases: int) -> None:
        """So many workers hold a lease."""
        self._held.set(num_leases)
