"""Follows the sources of workers, and forgets the workers that have left.

listed by a source ──► pending, probed ──► used
listed by none ──► draining: nothing new, its streams move ──► no request left ──► forgotten
        └ listed again meanwhile: used again          └ after `gateway.drain_timeout_s`: requests
                                                        that are left go on elsewhere, or fail
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from baton.clock import Instant
from baton.gateway.members.member_set import CONFIGURED, MemberSet
from baton.gateway.members.metrics import MembersCollector
from baton.protocol.members import MAX_MEMBERS
from baton.router.placement import RemembersWorkers

if TYPE_CHECKING:
    from baton.gateway.kv_events import KVEvents
    from baton.gateway.members.interface import NamedSource
    from baton.gateway.options import WorkerAddress
    from baton.gateway.request_context import Services
    from baton.gateway.workers import Worker
    from baton.ids import WorkerId
    from baton.router.room import FleetRoom

LOOK_S: Final = 0.5
RETRY_AFTER_S: Final = 5.0
"""After a source has failed with an error that it should have handled."""

Name: TypeAlias = "tuple[str, WorkerId]"
"""A model, and a worker that serves it, or did."""

log = logging.getLogger(__name__)


class Membership:
    """An asynchronous context manager: it follows within. Owner: the event loop's thread.

    `sources` are in the order in which they decide on roles, after the configuration's own lists.
    """

    def __init__(
        self,
        services: Services,
        events: KVEvents,
        room: FleetRoom,
        sources: tuple[NamedSource, ...],
    ) -> None:
        self._services, self._events, self._room = services, events, room
        self.sources = sources
        self._members = MemberSet((CONFIGURED, *(source.name for source in sources)))
        self._members.update(CONFIGURED, services.options.addresses)
        self._leaving: dict[Worker, Instant] = {}
        self._names: frozenset[Name] = frozenset()
        self._tasks: list[asyncio.Task[None]] = []
        services.workers.explain_sources = self._explain
        services.metrics.registry.register(MembersCollector(self))

    async def __aenter__(self) -> Self:
        """Begin to probe workers and to follow sources."""
        self._services.health_monitor.update()
        follow = [asyncio.create_task(self._follow(source)) for source in self.sources]
        self._tasks = [*follow, asyncio.create_task(self._run())]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Follow no more, probe no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._services.health_monitor.stop()

    def num_listed(self, source: str) -> int:
        """How many workers a source lists."""
        return self._members.num_listed(source)

    def apply(self, source: NamedSource, addresses: frozenset[WorkerAddress]) -> None:
        """A source lists these workers now, and no others; what cannot be used is left out."""
        usable = self._find_usable(source, addresses)
        if usable is None:
            return
        for conflict in self._members.update(source.name, usable):
            log.warning("%s", conflict)
        self._services.workers.set_members(self._members.listings)
        self.look()

    def look(self) -> None:
        """Forget workers that have left and have no request; give up those that take too long."""
        services = self._services
        workers, now = services.workers, services.clock.now()
        self._names |= self._current_names()
        for worker in workers.all:
            if worker.sources:
                self._leaving.pop(worker, None)
            elif worker not in self._leaving:
                self._leaving[worker] = Instant(now + services.options.drain_timeout_s)
        ended = [worker for worker in self._leaving if not self._is_used(worker)]
        for worker in ended:
            del self._leaving[worker]
        for worker, until in self._leaving.items():
            if now >= until and worker.is_waited_for:
                log.warning("%s left, and has requests still: they are given up", worker)
                worker.abandon(f"it left, and has had {services.options.drain_timeout_s:g} s")
        if ended:
            workers.remove(ended)
        services.health_monitor.update()
        self._forget_names()
        urls = {url for worker in workers.all for url in (worker.url, *worker.control_urls)}
        services.upstream.forget_unused(urls)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception:
                log.exception("workers that left could not be looked at; trying again")

    async def _follow(self, source: NamedSource) -> None:
        while True:
            try:
                async for addresses in source.source.watch():
                    source.status.note_read()
                    self.apply(source, addresses)
                source.status.note_error("it ended")
            except Exception:
                log.exception("%s failed; the workers that it listed before stay", source.name)
                source.status.note_error("it failed; the log has the error")
            await asyncio.sleep(RETRY_AFTER_S)

    def _find_usable(
        self, source: NamedSource, addresses: frozenset[WorkerAddress]
    ) -> frozenset[WorkerAddress] | None:
        """The workers that may be asked; None where the list before is to stay."""
        if len(addresses) > MAX_MEMBERS:
            source.status.note_list(
                f"{len(addresses)} workers are too many, at most {MAX_MEMBERS} are followed; those "
                "that it listed before stay"
            )
            return None
        is_tls = self._services.options.tls != "off"
        plain = frozenset(each for each in addresses if is_tls and each.is_plain)
        refused: str | None = None
        if plain:
            refused = (
                f"{min(each.url for each in plain)} is not used: it does not prove who answers "
                "there; workers speak TLS, write https://"
            )
        source.status.note_list(refused)
        return addresses - plain

    def _is_used(self, worker: Worker) -> bool:
        """Whether some request is at a worker still."""
        if worker.is_waited_for:
            return True
        info = worker.info
        return not (worker.is_gone or info is None) and self._has_requests((
            info.served_model_name,
            info.worker,
        ))

    def _has_requests(self, name: Name) -> bool:
        model, worker = name
        activity = self._services.load.find(worker, model)
        return activity is not None and activity.num_requests > 0

    def _current_names(self) -> frozenset[Name]:
        infos = [worker.info for worker in self._services.workers.all]
        return frozenset((info.served_model_name, info.worker) for info in infos if info)

    def _forget_names(self) -> None:
        """Forget what was learned of names that no worker has any more.

        A worker may have got another name, too: it was started again as another one.
        """
        gone = frozenset(
            name
            for name in self._names - self._current_names()
            if not (self._has_requests(name) or self._events.follows(name[1]))
        )
        self._names -= gone
        if gone:
            self._forget(gone, frozenset(worker for _, worker in self._names))

    def _forget(self, gone: frozenset[Name], known: frozenset[WorkerId]) -> None:
        services, policy = self._services, self._services.placement
        for model in {model for model, _ in gone}:
            services.load.forget(model, frozenset(id_ for of, id_ in gone if of == model))
        if services.prefixes is not None:
            for model, worker in gone:
                services.prefixes.forget(model, worker)
        unknown = {worker for _, worker in gone} - known
        self._room.forget(unknown)
        if isinstance(policy, RemembersWorkers):
            policy.forget(unknown)

    def _explain(self) -> list[str]:
        """A line for each source that lists no worker, or cannot be read now."""
        lines = []
        for source in self.sources:
            status = source.status
            if (reason := status.problem or status.refused) is not None:
                lines.append(f"{source.name} ({reason})")
            elif not self.num_listed(source.name):
                why = "it lists no worker" if status.read_at is not None else "not read yet"
                lines.append(f"{source.name} ({why})")
        return lines
