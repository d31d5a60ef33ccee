"""What a gateway knows of its fleet now, as alerts need it: `Observations`."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from baton.gateway.alerts.observations import (
    EndedByTarget,
    HandoffPath,
    LinkClass,
    LinkSegments,
    LinkTimes,
    Observations,
    StoreCost,
)
from baton.protocol.alerts import AlertName
from baton.telemetry.transfer_report import MAX_IDLE_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from baton.gateway.options import GatewayOptions
    from baton.gateway.prefixes import Prefixes
    from baton.gateway.target_metrics import TargetMetrics
    from baton.gateway.transfer_feed import TransferFeed
    from baton.gateway.workers import Workers
    from baton.protocol.worker_http import WorkerInfo
    from baton.router.load import FleetLoad
    from baton.router.topology import Distance
    from baton.telemetry.transfer_report import TransferReport

TYPICAL_BYTES: Final = 4 << 20
"""Of the transfer by which distances are compared."""
TYPICAL_TOKENS: Final = 1024
"""Of the prefix that is loaded or computed."""
DRIFTED: Final = "drifted"
LEAST_SEEN: Final = 8
"""Loads, and prompts, before a worker's costs are compared."""


@dataclass(slots=True)
class AlertSources:
    """Owner: the event loop's thread. `prefixes` None: the policy does not look at prefixes."""

    options: GatewayOptions
    workers: Workers
    load: FleetLoad
    transfers: TransferFeed
    prefixes: Prefixes | None
    targets: TargetMetrics

    def observe(self) -> Observations:
        """All of it."""
        reports = self._reports()
        infos = {str(info.worker): info for info in self._infos()}
        return Observations(
            links=tuple(_list_links(reports)),
            segments=tuple(_list_segments(reports)),
            paths=tuple(_list_paths(reports, infos)),
            classes=tuple(self._list_classes()),
            num_digest_failures={
                f"{name} {each.epoch}": each.num_digest_failures for name, each in reports.items()
            },
            num_lapsed_leases={
                f"{name} {each.epoch}": each.num_lapsed_leases for name, each in reports.items()
            },
            predicted_tokens=0 if self.prefixes is None else self.prefixes.num_predicted_tokens,
            found_tokens=0 if self.prefixes is None else self.prefixes.num_found_tokens,
            stores=tuple(self._list_stores()),
            ended=tuple(
                EndedByTarget(model, objective, each.target_s, each.num, each.num_missed)
                for (model, objective), each in self.targets.totals.items()
            ),
        )

    def explain_missing(self) -> dict[str, str]:
        """Alerts whose conditions cannot be known now, and why."""
        missing: dict[AlertName, str] = {}
        links = [*_list_links(self._reports())]
        if all(link.ratio is None for link in links):
            why = (
                f"no link between workers that was used within the last {MAX_IDLE_S / 60:.0f} min "
                "has carried enough transfers yet to know its usual time"
            )
            missing |= dict.fromkeys((AlertName.LINK_DRIFT, AlertName.DISTANCE_DRIFT), why)
        if not self._reports():
            why = "no worker has reported its transfers yet"
            for name in (
                AlertName.TRANSPORT_MISMATCH,
                AlertName.DIGEST_FAILURES,
                AlertName.LEASES_LAPSED,
            ):
                missing[name] = why
        if not any(report.segments for report in self._reports().values()):
            missing[AlertName.LINK_LOSS] = (
                "no worker has counted TCP segments that it sent: the transport tcp was not used "
                "yet, or the workers' kernel does not count them; of other transports lost packets "
                "are not known here"
            )
        if len({each.distance for each in self._list_classes()}) <= 1:
            missing[AlertName.INVERTED_DISTANCE] = "links of fewer than two distances are measured"
        if self.prefixes is None:
            missing[AlertName.PREFIX_PREDICTION] = (
                f"the policy {self.options.policy_name} does not look at cached prefixes"
            )
        if not any(True for _ in self._list_stores()):
            missing[AlertName.STORE_SLOWER] = (
                f"no worker has both loaded from a store and computed {LEAST_SEEN} prompts yet"
            )
        if not any(map(self._has_targets, self.workers.fleet.models)):
            why = "no model that is served has targets in [router.targets]"
            missing |= dict.fromkeys((AlertName.BURN_RATE_FAST, AlertName.BURN_RATE_SLOW), why)
        return {str(name): why for name, why in missing.items()}

    def _infos(self) -> Iterator[WorkerInfo]:
        return (each.info for each in self.workers.all if each.info is not None)

    def _reports(self) -> dict[str, TransferReport]:
        """By the worker's name."""
        return {
            str(worker.info.worker): report
            for worker, report in self.transfers.reports.items()
            if worker.info is not None
        }

    def _list_classes(self) -> Iterator[LinkClass]:
        for model, served in self.workers.fleet.models.items():
            costs = self.load.costs(model).handoffs
            views = {view.id: view for view in (*served.prefills, *served.decodes)}
            times: dict[Distance, list[float]] = {}
            for (one, other), link in costs.links.items():
                if one in views and other in views:
                    taken_s = link.latency_s + TYPICAL_BYTES * link.byte_s
                    distance = costs.distance(views[one], views[other])
                    times.setdefault(distance, []).append(taken_s)
            for distance, found in times.items():
                yield LinkClass(model, distance, median(found))

    def _list_stores(self) -> Iterator[StoreCost]:
        for info in self._infos():
            activity = self.load.find(info.worker, info.served_model_name)
            if activity is None:
                continue
            load, prefill = activity.load_cost, activity.prefill_cost
            if min(load.num_seen, prefill.num_seen) >= LEAST_SEEN:
                yield StoreCost(
                    info.served_model_name,
                    info.worker,
                    TYPICAL_TOKENS,
                    load.predict(TYPICAL_TOKENS),
                    prefill.predict(TYPICAL_TOKENS),
                )

    def _has_targets(self, model: str) -> bool:
        targets = self.options.targets_of(model)
        return {targets.ttft_s, targets.tpot_s, targets.itl_s} != {None}


def _list_links(reports: Mapping[str, TransferReport]) -> Iterator[LinkTimes]:
    for worker, report in reports.items():
        for link in report.links:
            if link.drift is None:
                continue
            is_write = link.operation == "WRITE"
            source, target = (worker, link.peer) if is_write else (link.peer, worker)
            yield LinkTimes(
                source,
                target,
                link.transport,
                link.distance,
                link.drift.ratio,
                link.drift.state == DRIFTED,
            )


def _list_segments(reports: Mapping[str, TransferReport]) -> Iterator[LinkSegments]:
    for worker, report in reports.items():
        for each in report.segments:
            yield LinkSegments(worker, each.peer, each.transport, each.distance, each.sent)


def _list_paths(
    reports: Mapping[str, TransferReport], infos: Mapping[str, WorkerInfo]
) -> Iterator[HandoffPath]:
    for worker, report in reports.items():
        for each in report.handoffs:
            peer, last = each.peer, each.last_mismatch
            both = [infos[name].transports for name in (worker, peer) if name in infos]
            yield HandoffPath(
                peer,
                worker,
                each.distance,
                each.transport,
                each.num,
                "" if last is None else last.expected,
                None if last is None else last.s_ago,
                frozenset(both[0]).intersection(*both[1:]) if both else frozenset(),
            )
