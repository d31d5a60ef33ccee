"""One client's request while it is served: what its parts note about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.gateway.metrics import NO_MODE, NO_MODEL, Phase

if TYPE_CHECKING:
    from baton.clock import Instant
    from baton.gateway.metrics import ModelMetrics
    from baton.gateway.workers import Worker
    from baton.ids import RequestId
    from baton.telemetry.trace import LegTrace


@dataclass(slots=True)
class Call:
    """One request: where it stands. Owner: the task that serves it.

    `status` is what was sent to the client, None before. `tail` holds the last bytes of a stream.
    """

    id: RequestId
    path: str
    received_at: Instant
    trace: LegTrace
    metrics: ModelMetrics
    phase: Phase = Phase.QUEUED
    model: str = NO_MODEL
    mode: str = NO_MODE
    status: int | None = None
    tail: bytes = b""
    workers: tuple[Worker, ...] = field(default=())
