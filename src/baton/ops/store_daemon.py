"""`baton store serve`: a user of the store that stays when workers go, and looks after entries.

One thread owns the tiers: each second it removes what has expired and makes room above the high
mark, and reads some entries of this host's tiers to compare them with their digests. The event
loop's thread answers `/metrics` and `/health` on loopback.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from baton.clock import Clock, Instant, MachineClock
from baton.errors import StoreError
from baton.net.http_limits import Connections, HttpLimits
from baton.net.http_server import (
    SilentServer,
    bind,
    count_refusals,
    end_signals,
    make_server_config,
    start_listening,
    url_of,
)
from baton.ops.store import is_damaged
from baton.protocol.worker_http import HEALTH_PATH, METRICS_PATH, Health
from baton.store.counted_tier import CountedTier, make_families
from baton.store.interface import EntryName, HasPlaces, MaintainsEntries, ServerPlace
from baton.telemetry.process_status import Ready, StatusReporter, claim_standard_output

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Generator, Iterable, Sequence

    from prometheus_client import Metric
    from starlette.types import Receive, Scope, Send

    from baton.store.capacity import StoredEntry

logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
ROUND_S: Final = 1.0
FAILED: Final = 1
HEALTHY_S: Final = 30.0
"""A round that takes longer: a disk does not answer."""
STOP_TIMEOUT_S: Final = 10.0
LIMITS: Final = HttpLimits(max_connections=64, max_connections_per_address=64)
WRONG_KEY: Final = (
    "every entry that was read so far looks damaged: is this the workers' cluster key? None is "
    "removed"
)


@dataclass(slots=True)
class TierCare:
    """What is done for one tier. Owner: the maintenance thread; others read the counts.

    Damaged entries are removed once one was right: before that, it may be the key that is wrong.
    """

    tier: CountedTier
    num_whole: int = 0
    num_damaged: int = 0
    num_failed_rounds: int = 0
    error: str = ""
    _unread: deque[StoredEntry] = field(default_factory=deque)
    _damaged: set[EntryName] = field(default_factory=set)

    @property
    def is_key_doubtful(self) -> bool:
        """Whether all that was read was damaged."""
        return bool(self.num_damaged) and not self.num_whole

    def try_maintain(self) -> bool:
        """Remove what must go, and ask servers how they are; False: the round has failed."""
        return self._try(self._maintain)

    def verify(self, max_read_bytes: int) -> None:
        """End a round: read entries, at least one, until so many bytes were read.

        None of a tier on servers: each list and each read takes from what others use, and may be
        billed. Who reads an entry there verifies it.
        """
        is_verified = max_read_bytes > 0 and self.tier.remote is None
        if not is_verified or self._try(partial(self._verify, max_read_bytes)):
            self.error = ""

    def _try(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except StoreError as exc:
            self.num_failed_rounds += 1
            if not self.error:
                logger.warning("store: tier %s: %s", self.tier.kind, exc)
            self.error = str(exc)
            return False
        return True

    def _maintain(self) -> None:
        tier = self.tier.inner
        if isinstance(tier, MaintainsEntries):
            tier.maintain()
        for place in tier.places if isinstance(tier, HasPlaces) else (tier,):
            if isinstance(place, ServerPlace) and not place.is_available():
                raise StoreError("no answer; it is asked again later")

    def _verify(self, max_read_bytes: int) -> None:
        if not self._unread:
            self._unread.extend(self.tier.entries())
            self._damaged &= {entry.name for entry in self._unread}
        num_read = 0
        while self._unread and num_read < max_read_bytes:
            entry = self._unread.popleft()
            num_read += entry.num_bytes
            if self.tier.is_whole(entry.name):
                self.num_whole += 1
            elif is_damaged(self.tier, entry.name):
                self.num_damaged += 1
                self._note_damaged(entry.name)
        if self.num_whole:
            while self._damaged:
                self.tier.discard(self._damaged.pop())

    def _note_damaged(self, name: EntryName) -> None:
        """Log it once: with a wrong key all entries are found damaged again and again."""
        if name not in self._damaged:
            self._damaged.add(name)
            logger.warning("store: entry %s in %s is damaged", name.hex(), self.tier.kind)


def run_round(cares: Sequence[TierCare], max_read_bytes: int) -> None:
    """Maintain all tiers, then verify entries: no tier waits for room while another is read."""
    maintained = [care for care in cares if care.try_maintain()]
    for care in maintained:
        care.verify(max_read_bytes)


@dataclass(slots=True)
class Maintenance:
    """Rounds over all tiers, on a thread of its own."""

    cares: Sequence[TierCare]
    verify_bytes_per_s: int
    clock: Clock
    _stopping: threading.Event = field(default_factory=threading.Event)
    _round_began_at: Instant = field(init=False)

    def __post_init__(self) -> None:
        self._round_began_at = self.clock.now()

    @contextmanager
    def running(self) -> Generator[None]:
        """The thread, for the length of a block. A tier that does not answer ends the process."""
        thread = threading.Thread(target=self._run, name="store-maintenance", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join(STOP_TIMEOUT_S)
            if thread.is_alive():
                logger.error("a tier has not answered for %.0f s: left as it is", STOP_TIMEOUT_S)
                os._exit(FAILED)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._round_began_at = self.clock.now()
            run_round(self.cares, int(self.verify_bytes_per_s * ROUND_S))
            self._stopping.wait(ROUND_S)

    def find_fault(self) -> str | None:
        """Why the store is not well; None: it is. From any thread."""
        silent_s = self.clock.now() - self._round_began_at
        if silent_s > HEALTHY_S:
            return f"a tier has not answered for {silent_s:.0f} s"
        for care in self.cares:
            if care.error:
                return f"{care.tier.kind}: {care.error}"
            if care.is_key_doubtful:
                return f"{care.tier.kind}: {WRONG_KEY}"
        return None


class StoreCollector(Collector):
    """The tiers, and what the daemon did for them; reads them at each scrape."""

    def __init__(self, cares: Sequence[TierCare]) -> None:
        self._cares = cares

    def collect(self) -> Iterable[Metric]:
        """See `Collector`. Tiers that cannot be looked at cost their own samples only."""
        verified = CounterMetricFamily(
            "baton_store_verified_entries", "Entries read and checked.", labels=["tier", "result"]
        )
        failed = CounterMetricFamily(
            "baton_store_failed_rounds", "Rounds of maintenance that failed.", labels=["tier"]
        )
        for care in self._cares:
            kind = care.tier.kind
            verified.add_metric([kind, "whole"], care.num_whole)
            verified.add_metric([kind, "damaged"], care.num_damaged)
            failed.add_metric([kind], care.num_failed_rounds)
        yield from (verified, failed)
        try:
            reports = [care.tier.report() for care in self._cares]
        except StoreError as exc:
            logger.warning("store: not in the metrics: %s", exc)
            return
        yield from make_families(reports)


class DaemonApp:
    """The ASGI callable."""

    def __init__(self, maintenance: Maintenance, registry: CollectorRegistry) -> None:
        self._maintenance, self._registry = maintenance, registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        del receive
        if scope["type"] != "http":
            raise NotImplementedError(f"ASGI scope {scope['type']}")
        status, body, content_type = self._respond(str(scope["method"]), str(scope["path"]))
        headers = [
            (b"content-length", str(len(body)).encode()),
            (b"content-type", content_type.encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _respond(self, method: str, path: str) -> tuple[int, bytes, str]:
        if method != "GET":
            return 405, b"use GET\n", "text/plain"
        match path:
            case _ if path == HEALTH_PATH:
                fault = self._maintenance.find_fault()
                health = Health("ok") if fault is None else Health("failed", fault)
                return 200 if fault is None else 503, msgspec.json.encode(health), JSON
            case _ if path == METRICS_PATH:
                return 200, generate_latest(self._registry), CONTENT_TYPE_LATEST
            case _:
                return 404, b"there are /health and /metrics\n", "text/plain"


JSON: Final = "application/json"


def run_store_daemon(
    tiers: Sequence[CountedTier], *, port: int, verify_bytes_per_s: int, status_fd: int
) -> None:
    """Serve until SIGTERM or SIGINT. Blocks; belongs on the main thread.

    Raises:
        ConfigError: the port is taken.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series
    clock = MachineClock()
    maintenance = Maintenance([TierCare(tier) for tier in tiers], verify_bytes_per_s, clock)
    registry = CollectorRegistry()
    registry.register(StoreCollector(maintenance.cares))
    connections = Connections(LIMITS, clock, count_refusals(registry, "baton_store"), None)
    config = make_server_config(
        DaemonApp(maintenance, registry), connections, drain_timeout_s=round(STOP_TIMEOUT_S)
    )
    status_reporter = StatusReporter(claim_standard_output(status_fd))
    with closing(bind(LOOPBACK, port)) as listener, maintenance.running():
        start_listening(listener)
        asyncio.run(_serve(SilentServer(config), listener, status_reporter))


async def _serve(
    server: SilentServer, listener: socket.socket, status_reporter: StatusReporter
) -> None:
    def stop(_: int) -> None:
        """Answer what was asked, then end."""
        server.should_exit = True

    with end_signals(stop):
        status_reporter.report(Ready(url_of(listener, LOOPBACK)))
        await server.serve(sockets=[listener])
