"""`/debug/demand`: the traffic of each model, as an autoscaler reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.ids import new_epoch
from baton.protocol.demand import DemandReport
from baton.router.demand_report import report_demand

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.gateway.admission import Admission
    from baton.gateway.workers import Workers
    from baton.router.load import FleetLoad


class DemandPage:
    """Shows what is asked for now. Owner: the event loop's thread."""

    def __init__(
        self, workers: Workers, load: FleetLoad, admission: Admission, clock: Clock
    ) -> None:
        self._workers, self._load = workers, load
        self._admission, self._clock = admission, clock
        self._epoch = new_epoch()

    def show(self) -> DemandReport:
        """All models that some worker serves."""
        now = self._clock.now()
        waiting = tuple(self._admission.queue.show(now))
        return DemandReport(
            self._epoch,
            tuple(
                report_demand(
                    (*served.prefills, *served.decodes),
                    self._load,
                    sum(each.num_requests for each in waiting if each.model == model),
                    now,
                )
                for model, served in self._workers.fleet.models.items()
            ),
        )
