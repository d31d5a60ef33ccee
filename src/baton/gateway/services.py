"""What every part of a gateway shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.gateway.background_tasks import BackgroundTasks
    from baton.gateway.fallbacks import Fallbacks
    from baton.gateway.health_monitor import HealthMonitor
    from baton.gateway.metrics import GatewayMetrics
    from baton.gateway.options import GatewayOptions
    from baton.gateway.upstream import Upstream
    from baton.gateway.workers import Workers
    from baton.router.placement import PlacementPolicy


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one gateway. Owner: the event loop's thread."""

    options: GatewayOptions
    clock: Clock
    metrics: GatewayMetrics
    workers: Workers
    health_monitor: HealthMonitor
    upstream: Upstream
    placement: PlacementPolicy
    fallbacks: Fallbacks
    background_tasks: BackgroundTasks
