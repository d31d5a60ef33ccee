"""Reads, now and then, what workers have measured of their links, for the costs of handoffs.

Each worker is asked every `INTERVAL_S`; one that does not answer, or reports none, keeps what it
reported before until it is down.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Self

import msgspec

from baton.errors import UNDECODABLE, BatonError
from baton.gateway.workers import Up
from baton.ids import WorkerId
from baton.kv.layout import KVLayout
from baton.protocol.worker_http import LINKS_PATH, MeasuredLink, MeasuredLinks
from baton.router.handoff_costs import KVShape, LinkCost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from baton.clock import Clock
    from baton.gateway.upstream import Upstream
    from baton.gateway.workers import Worker, Workers
    from baton.protocol.worker_http import WorkerInfo
    from baton.router.fleet import WorkerView
    from baton.router.load import FleetLoad

INTERVAL_S: Final = 10.0
LOOK_S: Final = 1.0
ANSWER_TIMEOUT_S: Final = 2.0
MOST_AT_ONCE: Final = 8
FIRST_RANK: Final = "/0"
"""The end of the name by which peers know the first rank of several."""

log = logging.getLogger(__name__)
_decoder = msgspec.json.Decoder(MeasuredLinks)


class LinkFeed:
    """An asynchronous context manager: it reads within. Owner: the event loop's thread."""

    def __init__(self, workers: Workers, upstream: Upstream, load: FleetLoad, clock: Clock) -> None:
        self._workers, self._upstream = workers, upstream
        self._load, self._clock = load, clock
        self._reports: dict[Worker, tuple[MeasuredLink, ...]] = {}
        self._asked_at: dict[Worker, float] = {}
        self._at_once = asyncio.Semaphore(MOST_AT_ONCE)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to read."""
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Read no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def read_due(self) -> None:
        """Ask every worker whose turn it is, and note what has changed."""
        now = self._clock.now()
        lost = [each for each in self._reports if not isinstance(each.state, Up)]
        for worker in lost:
            del self._reports[worker], self._asked_at[worker]
        due = [
            worker
            for worker in self._workers.all
            if isinstance(worker.state, Up)
            and now - self._asked_at.get(worker, float("-inf")) >= INTERVAL_S
        ]
        for worker in due:
            self._asked_at[worker] = now
        if any(await asyncio.gather(*map(self._ask, due))) or lost:
            self._note()

    async def _run(self) -> None:
        while True:
            try:
                await self.read_due()
            except Exception:
                log.exception("reading the workers' links failed; trying again")
            await asyncio.sleep(LOOK_S)

    async def _ask(self, worker: Worker) -> bool:
        """Whether its links are others than before."""
        # Whose address it is was checked before the worker came up.
        url = worker.control_urls[0].with_path(LINKS_PATH)
        before = self._reports.setdefault(worker, ())
        try:
            async with self._at_once:
                status, body = await self._upstream.get(url, ANSWER_TIMEOUT_S)
            if status == HTTPStatus.OK and (links := _decoder.decode(body).links):
                self._reports[worker] = links
        except (BatonError, *UNDECODABLE) as exc:
            log.debug("no links from %s: %s", worker, exc)
        return self._reports[worker] != before

    def _note(self) -> None:
        by_model: dict[str, dict[tuple[WorkerView, WorkerView], LinkCost]] = {}
        shapes: dict[str, KVShape] = {}
        views = {
            view.id: view
            for served in self._workers.fleet.models.values()
            for view in (*served.prefills, *served.decodes)
        }
        for worker, links in self._reports.items():
            if worker.info is not None and worker.info.worker in views:
                view = views[worker.info.worker]
                found = by_model.setdefault(view.model, {})
                found.update(_of_pairs(view, links, views))
                if (shape := read_shape(worker.info)) is not None:
                    shapes[view.model] = shape
        for model, found in by_model.items():
            self._load.costs(model).handoffs.note_links(found, shapes.get(model))


def _of_pairs(
    view: WorkerView, links: Iterable[MeasuredLink], views: Mapping[WorkerId, WorkerView]
) -> dict[tuple[WorkerView, WorkerView], LinkCost]:
    found = {}
    for link in links:
        peer = views.get(WorkerId(link.peer)) or views.get(
            WorkerId(link.peer.removesuffix(FIRST_RANK))
        )
        if peer is not None and peer.model == view.model and peer.id != view.id:
            pair = (view, peer) if link.direction == "push" else (peer, view)
            found[pair] = LinkCost(
                link.latency_s, link.byte_s, link.transport, link.encoding, link.kv_byte_s
            )
    return found


def read_shape(info: WorkerInfo) -> KVShape | None:
    """What a token's KV takes at that worker (of vLLM: at a rank); None if it does not decode."""
    try:
        layout = msgspec.convert(info.layout, KVLayout)
    except UNDECODABLE:
        return None
    return KVShape(layout.bytes_per_token, layout.num_layers)
