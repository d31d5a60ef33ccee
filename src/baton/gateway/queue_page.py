"""`/debug/queue`: what waits in the gateway, and how much room the workers have."""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING

import msgspec

from baton.router.fair_queue import Priority
from baton.router.room import FleetRoom, count_given

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.gateway.admission import Admission
    from baton.gateway.workers import Workers
    from baton.ids import WorkerId
    from baton.router.load import FleetLoad


class WaitingShown(msgspec.Struct, frozen=True):
    """Requests of one tenant in one class; `tenant` is empty where there are no API keys."""

    model: str
    priority: Priority
    tenant: str
    num_requests: int
    num_tokens: int
    oldest_s: float


class RunningShown(msgspec.Struct, frozen=True):
    """A model's requests at workers; tokens that left its queue in a second, null if not known."""

    model: str
    num_running: int
    tokens_per_s: float | None


class RoomShown(msgspec.Struct, frozen=True):
    """Requests that a worker has of this gateway, and may have; `limit` null: any number."""

    worker: str
    model: str
    num_given: int
    limit: int | None


class QueueReply(msgspec.Struct, frozen=True):
    """The answer to `/debug/queue`."""

    num_requests: int
    max_requests: int
    num_tokens: int
    max_tokens: int
    waiting: tuple[WaitingShown, ...]
    models: tuple[RunningShown, ...]
    workers: tuple[RoomShown, ...]


class QueuePage:
    """Shows the queue as it is now. Owner: the event loop's thread."""

    def __init__(
        self,
        admission: Admission,
        room: FleetRoom,
        load: FleetLoad,
        *,
        workers: Workers,
        clock: Clock,
    ) -> None:
        self._admission, self._room, self._load = admission, room, load
        self._workers, self._clock = workers, clock

    def show(self, most: int | None = None) -> QueueReply:
        """All of it, or only the first `most` classes that wait, and as many workers."""
        now, queue = self._clock.now(), self._admission.queue
        models = self._workers.fleet.models
        running = self._admission.num_running
        return QueueReply(
            queue.num_requests,
            queue.limits.max_requests,
            queue.num_tokens,
            queue.limits.max_tokens,
            tuple(
                WaitingShown(
                    each.model,
                    each.priority,
                    each.tenant,
                    each.num_requests,
                    each.num_tokens,
                    each.oldest_s,
                )
                for each in islice(queue.show(now), most)
            ),
            tuple(RunningShown(name, running[name], queue.rate(name, now)) for name in models),
            tuple(
                self._show_room(info.worker, info.served_model_name)
                for info in (worker.info for worker in islice(self._workers.all, most))
                if info is not None
            ),
        )

    def _show_room(self, worker: WorkerId, model: str) -> RoomShown:
        activity, limit = self._load.find(worker, model), self._room.limit(worker)
        given = 0 if activity is None else count_given(activity)
        return RoomShown(worker, model, given, int(limit) if limit < inf else None)
