"""Finds workers that have become silent: no heartbeat, and nothing else from them either.

    received ──half of `silent_after_s`──► suspected ──`silent_after_s`──► silent
        ▲        nothing new is placed there   │   its requests go on elsewhere   │
        └──────────── anything is received from it ◄──────────────────────────────┘

A process that a busy machine does not run for two seconds is suspected, and loses nothing. Its name
stays its own until its lease is over. Only workers whose heartbeats have arrived are watched:
others are found by probes (`health_monitor`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.gateway.health_monitor import has_substitute
from baton.gateway.members.heartbeat_table import Heartbeats, HeartbeatTable, Silence, judge_silence

if TYPE_CHECKING:
    from yarl import URL

    from baton.clock import Instant
    from baton.gateway.request_context import Services
    from baton.gateway.workers import Worker
    from baton.ids import Epoch

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Watched:
    """A worker of which a heartbeat is missing. `received_at`: when HTTP last came from it."""

    worker: Worker
    num_reads: int
    received_at: float
    is_silent: bool = False


class SilenceMonitor:
    """Implements `Liveness`. Owner: the event loop's thread. All times are by the leases' clock."""

    def __init__(self, services: Services) -> None:
        self._workers, self._upstream = services.workers, services.upstream
        self._health_monitor, self._metrics = services.health_monitor, services.metrics
        self._silent_after_s = services.options.silent_after_s
        self._watched: dict[Heartbeats, _Watched] = {}
        self._indexed: tuple[Worker, ...] = ()
        self._by_url: dict[URL, Worker] = {}

    def look(self, heartbeats: HeartbeatTable, now: Instant) -> None:
        """See `Liveness`."""
        self._index()
        missing = set(heartbeats.missing(now))
        changed = [
            watched.worker
            for each, watched in tuple(self._watched.items())
            if self._ends(each, watched, is_missing=each in missing)
        ]
        for each in missing:
            watched = self._watch(each, now)
            if watched is not None and self._judge(each, watched, now):
                changed.append(watched.worker)
        self._workers.note_health(*changed)

    def lost(self, origin: URL, epoch: Epoch, reason: str) -> None:
        """See `Liveness`. Requests at another epoch, which is there already, stay."""
        self._index()
        worker = self._by_url.get(origin)
        if worker is not None and (worker.info is None or worker.info.epoch == epoch):
            self._abandon(worker, reason)

    def _index(self) -> None:
        if self._indexed is not self._workers.all:
            self._indexed = self._workers.all
            self._by_url = {worker.url: worker for worker in self._indexed}

    def _ends(self, heartbeats: Heartbeats, watched: _Watched, *, is_missing: bool) -> bool:
        """Whether nothing is missing of it any more, and it was suspected."""
        if is_missing and not watched.worker.is_gone:
            return False
        del self._watched[heartbeats]
        return self._clear(heartbeats, watched)

    def _clear(self, heartbeats: Heartbeats, watched: _Watched) -> bool:
        health = watched.worker.health
        if not health.is_suspected:
            return False
        if watched.is_silent and heartbeats.received_at is not None:
            log.info("%s is received again", watched.worker)
        health.is_suspected = watched.is_silent = False
        return True

    def _watch(self, heartbeats: Heartbeats, now: Instant) -> _Watched | None:
        watched = self._watched.get(heartbeats)
        if watched is None:
            worker = self._by_url.get(heartbeats.origin)
            if worker is None or heartbeats.received_at is None:
                return None
            num_reads = self._upstream.num_reads(worker.url)
            watched = _Watched(worker, num_reads, heartbeats.received_at)
            self._watched[heartbeats] = watched
        num_reads = self._upstream.num_reads(watched.worker.url)
        if num_reads != watched.num_reads:
            watched.num_reads, watched.received_at = num_reads, now
        return watched

    def _judge(self, heartbeats: Heartbeats, watched: _Watched, now: Instant) -> bool:
        """Whether what is thought of it has changed."""
        worker, health = watched.worker, watched.worker.health
        silent_s = now - max(heartbeats.received_at or 0.0, watched.received_at)
        silence = judge_silence(silent_s, self._silent_after_s)
        if silence is Silence.NONE:
            return self._clear(heartbeats, watched)
        if silence is Silence.SILENT and has_substitute(worker, self._workers):
            reason = f"nothing was received from it for {silent_s:.1f} s"
            if not watched.is_silent:
                watched.is_silent = True
                self._metrics.silent_workers.inc()
                log.warning("%s is silent: %s; its requests go on elsewhere", worker, reason)
            self._abandon(worker, reason)
        if health.is_suspected:
            return False
        health.is_suspected, health.reason = True, f"silent for {silent_s:.1f} s"
        self._health_monitor.ask_now(worker)
        return True

    def _abandon(self, worker: Worker, reason: str) -> None:
        if worker.is_waited_for:
            worker.abandon(reason)
