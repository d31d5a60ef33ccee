"""A fleet through its gateway: pages, metrics of its workers, traces of its latest requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from baton.errors import UNDECODABLE, BatonError
from baton.ops.gateway_pages import Gateway, RequestIds
from baton.ops.request_traces import page_of
from baton.protocol.gateway_http import (
    ALERTS_PATH,
    DEMAND_PATH,
    LINKS_PATH,
    QUEUE_PATH,
    READY_PATH,
    REQUESTS_PATH,
    TRANSFERS_PATH,
    WORKERS_PATH,
)
from baton.protocol.worker_http import METRICS_PATH, VERSION_PATH

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.ops.bundle.archive import BundleContents
    from baton.ops.bundle.redaction import Redactor
    from baton.ops.page_reader import PageReader

PAGE_TIMEOUT_S: Final = 5.0
NUM_AT_ONCE: Final = 8
MAX_WORKERS: Final = 64
PAGES: Final = (
    VERSION_PATH,
    READY_PATH,
    QUEUE_PATH,
    LINKS_PATH,
    TRANSFERS_PATH,
    DEMAND_PATH,
    ALERTS_PATH,
)
"""JSON pages, besides those of which more follows: `/debug/workers` and `/debug/requests`."""

T = TypeVar("T")


class ListedWorker(msgspec.Struct, frozen=True):
    """What is read of a worker in `/debug/workers`."""

    url: str
    worker: str | None = None


class WorkerList(msgspec.Struct, frozen=True):
    """What is read of `/debug/workers`."""

    workers: tuple[ListedWorker, ...]


@dataclass(frozen=True, slots=True)
class FleetCollector:
    """Adds what one gateway, and its workers, show to `contents`, below `folder`."""

    gateway: Gateway
    folder: str
    pages: PageReader
    contents: BundleContents
    redactor: Redactor
    at_once: asyncio.Semaphore

    async def collect(self, num_requests: int) -> None:
        """Read everything. If cancelled, what was not read yet is noted as missing."""
        async with asyncio.TaskGroup() as group:
            group.create_task(
                self._take(
                    "metrics.txt", f"{self.gateway.url}{METRICS_PATH}", self.redactor.metrics
                )
            )
            for page in PAGES:
                group.create_task(self._take_page(page))
            group.create_task(self._collect_workers())
            group.create_task(self._collect_requests(num_requests))

    async def _collect_workers(self) -> None:
        listed = _read(await self._take_page(WORKERS_PATH), WorkerList)
        if listed is None:
            self._miss("workers", "the gateway does not list them (see debug-workers.json)")
            return
        workers = listed.workers[:MAX_WORKERS]
        if len(listed.workers) > MAX_WORKERS:
            self._miss("workers", f"of {len(listed.workers)} workers only {MAX_WORKERS} are asked")
        async with asyncio.TaskGroup() as group:
            for number, worker in enumerate(workers):
                group.create_task(self._take_metrics(number, worker))

    async def _take_metrics(self, number: int, worker: ListedWorker) -> None:
        name = f"workers/{number:03}-metrics.txt"
        origin = _origin_of(worker.url)
        if origin is None:
            self._miss(name, "its URL in /debug/workers is not http(s)://HOST:PORT")
        else:
            await self._take(name, f"{origin}{METRICS_PATH}", self.redactor.metrics, is_worker=True)

    async def _collect_requests(self, num_requests: int) -> None:
        if num_requests == 0:
            return
        listed = _read(await self._take_page(REQUESTS_PATH), RequestIds)
        if listed is None:
            self._miss("requests", "the gateway does not list them (see debug-requests.json)")
            return
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(listed.requests[:num_requests]):
                url = f"{self.gateway.url}{page_of(request.id)}"
                name = f"requests/{number:03}.json"
                group.create_task(self._take(name, url, self.redactor.page))

    async def _take_page(self, path: str) -> bytes | None:
        name = f"{path.strip('/').replace('/', '-')}.json"
        return await self._take(name, f"{self.gateway.url}{path}", self.redactor.page)

    async def _take(
        self, name: str, url: str, redact: Callable[[bytes], bytes], *, is_worker: bool = False
    ) -> bytes | None:
        """Add a page; the page as it was, None where it is missing."""
        get = self.pages.get_of_worker if is_worker else self.pages.get
        try:
            async with self.at_once:
                body = await get(url, PAGE_TIMEOUT_S)
            redacted = redact(body)
        except BatonError as exc:
            self._miss(name, str(exc))
            return None
        except asyncio.CancelledError:
            self._miss(name, "it was not read within the time for all pages (--timeout-s)")
            raise
        self.contents.add(f"{self.folder}/{name}", redacted)
        return body

    def _miss(self, name: str, why: str) -> None:
        self.contents.miss(f"{self.folder}/{name}", self.redactor.text(why))


def _read(body: bytes | None, kind: type[T]) -> T | None:
    if body is None:
        return None
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE:
        return None


def _origin_of(url: str) -> str | None:
    """The URL, if it names nothing but a host and a port."""
    try:
        parts = urlsplit(url)
        has_port = parts.port is not None
    except ValueError:
        return None
    is_plain = parts.path in {"", "/"} and not (parts.query or parts.fragment or parts.username)
    if parts.scheme not in {"http", "https"} or not parts.hostname or not is_plain or not has_port:
        return None
    return f"{parts.scheme}://{parts.netloc}"
