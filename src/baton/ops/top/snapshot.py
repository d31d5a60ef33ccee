"""One look at a gateway's pages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from baton import __version__
from baton.errors import UNDECODABLE
from baton.ops.gateway_pages import Gateway, PageError
from baton.ops.top.pages import (
    AlertsPage,
    LinksPage,
    QueuePage,
    RequestsPage,
    TransfersPage,
    WorkersPage,
)
from baton.ops.top.window import Traffic, TrafficWindow, read_metrics
from baton.protocol.gateway_http import (
    ALERTS_PATH,
    LINKS_PATH,
    QUEUE_PATH,
    READY_PATH,
    REQUESTS_PATH,
    TRANSFERS_PATH,
    WORKERS_PATH,
)
from baton.protocol.worker_http import METRICS_PATH

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.ops.page_reader import PageReader

SCHEMA_VERSION: Final = 1
PAGE_TIMEOUT_S: Final = 3.0
READY: Final = "ready"
NUM_REQUESTS: Final = 50

T = TypeVar("T", bound=msgspec.Struct)


class FleetSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway showed; `--json` prints it. `at` is Unix seconds.

    A page that could not be read is None, and `missing` has its path and why. `state` is "ready",
    or why the gateway is not.
    """

    schema: int = SCHEMA_VERSION
    baton: str = __version__
    gateway: str
    at: float
    state: str
    traffic: Traffic | None
    workers: WorkersPage | None
    queue: QueuePage | None
    transfers: TransfersPage | None
    links: LinksPage | None
    alerts: AlertsPage | None
    requests: RequestsPage | None
    missing: dict[str, str]

    @property
    def is_answered(self) -> bool:
        """Whether the gateway showed anything."""
        return self.traffic is not None or self.workers is not None


class FleetReader:
    """Takes snapshots; keeps a minute of readings. Owner: the event loop's thread."""

    def __init__(self, gateway: Gateway, pages: PageReader, clock: Clock) -> None:
        self._gateway, self._pages, self._clock = gateway, pages, clock
        self._window = TrafficWindow()

    async def take(self) -> FleetSnapshot:
        """Ask for all pages at once; takes at most `PAGE_TIMEOUT_S`."""
        missing: dict[str, str] = {}
        async with asyncio.TaskGroup() as group:
            state = group.create_task(self._find_state())
            traffic = group.create_task(self._read_traffic(missing))
            workers = group.create_task(self._read(WORKERS_PATH, WorkersPage, missing))
            queue = group.create_task(self._read(QUEUE_PATH, QueuePage, missing))
            transfers = group.create_task(self._read(TRANSFERS_PATH, TransfersPage, missing))
            links = group.create_task(self._read(LINKS_PATH, LinksPage, missing))
            alerts = group.create_task(self._read(ALERTS_PATH, AlertsPage, missing))
            requests = group.create_task(self._read(REQUESTS_PATH, RequestsPage, missing))
        listed = requests.result()
        return FleetSnapshot(
            gateway=self._gateway.url,
            at=round(self._clock.unix_now(), 3),
            state=state.result(),
            traffic=traffic.result(),
            workers=workers.result(),
            queue=queue.result(),
            transfers=transfers.result(),
            links=links.result(),
            alerts=alerts.result(),
            requests=None if listed is None else RequestsPage(listed.requests[:NUM_REQUESTS]),
            missing=dict(sorted(missing.items())),
        )

    async def _find_state(self) -> str:
        try:
            await self._get(READY_PATH)
        except PageError as exc:
            return str(exc)
        return READY

    async def _read_traffic(self, missing: dict[str, str]) -> Traffic | None:
        try:
            body = await self._get(METRICS_PATH)
            return self._window.add(read_metrics(body, self._clock.now()))
        except PageError as exc:
            missing[METRICS_PATH] = str(exc)
            return None

    async def _read(self, path: str, kind: type[T], missing: dict[str, str]) -> T | None:
        try:
            return msgspec.json.decode(await self._get(path), type=kind)
        except PageError as exc:
            missing[path] = str(exc)
        except UNDECODABLE as exc:
            missing[path] = f"it does not make sense: {exc}"
        return None

    async def _get(self, path: str) -> bytes:
        return await self._pages.get(f"{self._gateway.url}{path}", PAGE_TIMEOUT_S)
