"""What is known of each source of workers, as Prometheus reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

    from baton.gateway.members.membership import Membership


class MembersCollector(Collector):
    """Sources of `gateway.members` by their text; none are configured: no series."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        labels = ("source",)
        listed = GaugeMetricFamily(
            "baton_gateway_members", "Workers that a source lists.", labels=labels
        )
        ages = GaugeMetricFamily(
            "baton_gateway_members_age_seconds",
            "Since a source was read without an error; none before that.",
            labels=labels,
        )
        errors = CounterMetricFamily(
            "baton_gateway_members_errors",
            "Times at which a source could not be read, or listed what cannot be used.",
            labels=labels,
        )
        for source in self._membership.sources:
            name, status = (source.name,), source.status
            listed.add_metric(name, self._membership.num_listed(source.name))
            if status.age_s is not None:
                ages.add_metric(name, status.age_s)
            errors.add_metric(name, status.num_errors)
        yield from (listed, ages, errors)
