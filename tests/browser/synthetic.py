"""The dashboard's real files with a made-up stream, of as many workers as a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from baton.clock import MachineClock
from baton.errors import BatonError
from baton.events.blocks import FeedHealth
from baton.gateway.asgi import JSON, send_error, send_whole
from baton.gateway.dashboard.events import (
    DistanceShown,
    DriftShown,
    History,
    Links,
    LossShown,
    ModelShown,
    PairShown,
    Point,
    RecentRequest,
    TargetShown,
    Tick,
    TokenCost,
    TransfersShown,
)
from baton.gateway.dashboard.pages import Dashboard
from baton.gateway.debug import (
    CachedBlocks,
    FollowedEvents,
    GivenWork,
    HandoffLine,
    LearnedCost,
    LinkListReply,
    ListedLink,
    ListedWorker,
    ModelLinks,
    WorkerListReply,
)
from baton.gateway.errors import answer_for
from baton.gateway.queue_page import QueueReply, RoomShown, RunningShown, WaitingShown
from baton.gateway.store_page import (
    FleetStore,
    FleetTier,
    PromptFigures,
    TierFigures,
    WorkerTier,
)
from baton.net.http_limits import Connections, HttpLimits
from baton.net.http_server import bounded_protocol
from baton.protocol.alerts import Alert, AlertList, AlertName, AlertState
from baton.protocol.request_traces import GapSummary, RequestTrace
from baton.protocol.worker_http import Role, StoreLoads, WorkerLoad
from baton.router.health import HealthState
from baton.telemetry.clock_offset import ClockEstimate
from baton.telemetry.timeline import WorkerTrace, compare_prediction, make_timeline
from baton.telemetry.trace import PredictedTimes, PrefillChunk, RequestSpan, Stamp
from tests.integration.scripted_worker import serving

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

COST = LearnedCost(0.004, 5e-5, 320, 0.08)
DISTANCES = ("same_device", "same_host", "same_rack", "same_zone")
START = 1_764_000_000.0


@dataclass
class Fleet:
    """What the stream shows. Half of the workers prefill; four a host, four hosts a rack."""

    num_workers: int = 8
    requests_per_s: int = 500
    num_requests: int = 50
    name: str = "{role}-{index}"
    text: str = "ok"
    model: str = "llama-3.1-70b"
    seed: int = 1
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def role(self, index: int) -> Role:
        return Role.PREFILL if index % 2 == 0 else Role.DECODE

    def worker_name(self, index: int) -> str:
        return self.name.format(role=self.role(index), index=index // 2)

    def point(self, at: float) -> Point:
        rate, noise = self.requests_per_s, self.random.uniform
        burst = 1 + 0.3 * (int(at) % 60 > 45)
        return Point(
            at, rate * noise(0.95, 1.05), rate * 0.001, int(rate * 0.8 * burst), int(20 * burst),
            0.21 * burst * noise(0.9, 1.1), 0.62 * burst * noise(0.9, 1.2),
            0.021 * noise(0.95, 1.1),
            0.03 * burst, 0.14 * noise(0.9, 1.1), 0.04 * noise(0.8, 1.2),
            rate * 600 * noise(0.9, 1.1), rate * 400 * noise(0.9, 1.1),
            rate * 180 * noise(0.9, 1.1),
        )  # fmt: skip

    def worker(self, index: int) -> ListedWorker:
        free = self.random.randrange(400, 4000)
        health = HealthState.EJECTED if index % 61 == 60 else HealthState.HEALTHY
        return ListedWorker(
            worker=self.worker_name(index),
            epoch="0" * 32,
            url=f"https://10.0.{index // 250}.{index % 250}:8000",
            role=self.role(index),
            state="draining" if index % 73 == 72 else "up",
            reason="3 of 5 requests failed" if health is HealthState.EJECTED else None,
            kv_events=FollowedEvents(
                "tcp://10.0.0.1:5557",
                blocks=(CachedBlocks("gpu", 0, 4096 - free), CachedBlocks("host", 0, 9000)),
                feed=FeedHealth(connected=True),
            ),
            load=WorkerLoad(2, 4096, free, 16, 64, StoreLoads(410, 90_000, 5.2)),
            given=GivenWork(1, self.random.randrange(40), 0.08, 0.4, COST, COST, COST),
            health=health,
            topology=f"zone-a/rack-{index // 16}/host-{index // 4}/gpu-{index % 4}",
        )

    def tick(self, at: float) -> Tick:
        n = self.num_workers
        requests = tuple(
            RecentRequest(
                f"req-{int(at)}-{i:03}", 503 if i % 29 == 28 else 200, "push", self.text,
                f"{self.worker_name(2 * i % n)} → {self.worker_name((2 * i + 1) % n)}",
                0.004, 0.19 + i / 500, 3.1,
            )
            for i in range(self.num_requests)
        )  # fmt: skip
        return Tick(
            version="0.1.0",
            point=self.point(at),
            workers=WorkerListReply(tuple(map(self.worker, range(n)))),
            num_hidden=0,
            queue=QueueReply(
                20, 1024, 18_000, 4 << 20,
                (WaitingShown(self.model, "normal", self.text, 20, 18_000, 0.4),),
                (RunningShown(self.model, 380, 3e5),),
                tuple(RoomShown(self.worker_name(i), self.model, 3, 64) for i in range(n)),
            ),
            models=(ModelShown(self.model, 0.41),),
            targets=tuple(
                TargetShown(self.model, objective, target_s, 30.0, 15_000, num_missed)
                for objective, target_s, num_missed in (
                    ("itl", 0.2, 900), ("tpot", 0.05, 20), ("ttft", 0.5, 300)
                )
            ),
            requests=requests,
            cost=TokenCost(24.0, 0.0021, 0.0093),
            alerts=AlertList(
                alerts=(
                    self.alert(AlertName.TRANSPORT_MISMATCH, AlertState.FIRING, at),
                    self.alert(AlertName.LINK_DRIFT, AlertState.PENDING, at),
                ),
                not_evaluated={AlertName.BURN_RATE_FAST: "no targets are set (router.targets)"},
            ),
        )  # fmt: skip

    def alert(self, name: AlertName, state: AlertState, at: float) -> Alert:
        labels = {"from": self.worker_name(0), "to": self.worker_name(1)}
        return Alert(
            alert=name,
            state=state,
            severity="critical" if state is AlertState.FIRING else "warning",
            labels=labels,
            summary=f"handoffs from {self.worker_name(0)} take another way: {self.text}",
            value=3.0,
            starts_at=START,
            runbook_url="docs/observability/alerts.md#batonlinkdrift"
            if name is AlertName.LINK_DRIFT
            else "https://example.invalid/alerts.html#batontransportmismatch",
        )

    def links(self) -> Links:
        pairs = [
            (2 * i % self.num_workers, (2 * j + 1) % self.num_workers)
            for i in range(self.num_workers // 2)
            for j in range(min(self.num_workers // 2, 10))
        ]
        lines = tuple(
            HandoffLine(distance, "learned", 0.002 * (at + 1), 4e-6 * (at + 1), 12, 2e9)
            for at, distance in enumerate(DISTANCES)
        )
        links = tuple(
            ListedLink(
                self.worker_name(one), self.worker_name(other), self.transport(one, other),
                2e-5 + self.random.random() * 1e-4, 1e9 + self.random.random() * 4e9, "raw", 3e9,
            )
            for one, other in pairs
        )  # fmt: skip
        shown = tuple(self.pair(*pair) for pair in pairs)
        distances = tuple(
            DistanceShown(d, "shared" if d == "same_host" else "tcp", 40, 900, 9 << 30,
                          0.012, 0.05, 2.4e9, 0.2)
            for d in DISTANCES[1:]
        )  # fmt: skip
        one, other = self.worker_name(0), self.worker_name(1)
        drifts = (
            DriftShown(one, other, "tcp", "WRITE", "drifted", 9.8),
            DriftShown(one, other, "shared", "READ", "drifted", 4.25),
        )
        loss = LossShown(self.worker_name(0), self.worker_name(1), "tcp", 120_000, 0.0101)
        tiers = tuple(
            tier for i in range(self.num_workers) for tier in self.tiers(self.worker_name(i))
        )
        store = FleetStore(
            tiers=tuple(self.all_workers(tier, tiers) for tier in ("host", "file", "redis")),
            worker_tiers=tiers,
            total_prompts=PromptFigures(9000, 1000, 0.9),
            recent_prompts=PromptFigures(720, 280, 0.72),
        )
        transfers = TransfersShown(60.0, shown, distances, drifts, (loss,), store, 0)
        return Links(LinkListReply((ModelLinks(self.model, lines, links),)), transfers)

    def all_workers(self, tier: str, tiers: tuple[WorkerTier, ...]) -> FleetTier:
        one, *_ = of = [each for each in tiers if each.tier == tier]
        return FleetTier(
            tier=tier, num_workers=len(of),
            num_unavailable=sum(not each.is_available for each in of),
            fullest=one.worker, used_bytes=one.used_bytes, capacity_bytes=one.capacity_bytes,
            total=one.total, recent=one.recent,
        )  # fmt: skip

    def tiers(self, worker: str) -> tuple[WorkerTier, ...]:
        num, is_available = self.random.randrange(50, 90), not worker.endswith("-2")
        return tuple(
            WorkerTier(
                worker=worker, tier=tier, used_bytes=used << 30, capacity_bytes=capacity << 30,
                is_available=is_available or tier != "redis",
                total=TierFigures(60 * num, 4000, 60 * num / (60 * num + 4000), 60 << 30, 9 << 30),
                recent=TierFigures(num, 50, num / (num + 50), 1 << 30, 200 << 20),
            )
            for tier, used, capacity in (("host", 31, 32), ("file", 410, 2048), ("redis", 90, 0))
        )  # fmt: skip

    def pair(self, one: int, other: int) -> PairShown:
        num = self.random.randrange(5, 60)
        is_slow = one == 0
        return PairShown(
            self.worker_name(one), self.worker_name(other), "same_rack", self.transport(one, other),
            "push", "WRITE", num, num << 24, 0.09 if is_slow else 0.012, 0.006, 0.2,
            3 if is_slow else 0, "nixl" if is_slow else None,
        )  # fmt: skip

    def transport(self, one: int, other: int) -> str:
        return "tcp" if one == 0 else "shared" if one // 4 == other // 4 else "nixl"

    def trace(self, request_id: str) -> RequestTrace:
        gateway = RequestSpan(
            request_id=request_id, worker="gateway", epoch="e", role="gateway", mode="push",
            outcome=self.text, waited_s=0.004,
            predicted=PredictedTimes(
                queue_s=0.02, load_s=0.0, prefill_s=0.12, handoff_s=0.03
            ),
            stamps={Stamp.RECEIVED: 10.0, Stamp.ADMITTED: 10.001, Stamp.TOKENIZED: 10.002,
                    Stamp.DEQUEUED: 10.003, Stamp.PLACED: 10.0035, Stamp.FIRST_TOKEN: 10.196,
                    Stamp.FINISHED: 13.1},
        )  # fmt: skip
        prefill = RequestSpan(
            request_id=request_id, worker=self.worker_name(0), epoch="e", role="prefill",
            chunks=[PrefillChunk(10.024, 10.09, 512), PrefillChunk(10.09, 10.154, 512)],
            stamps={Stamp.RECEIVED: 10.004, Stamp.PREFILL_STARTED: 10.024,
                    Stamp.FIRST_LAYER_READY: 10.034, Stamp.PREFILL_DONE: 10.154},
        )  # fmt: skip
        decode = RequestSpan(
            request_id=request_id, worker=self.worker_name(1), epoch="e", role="decode",
            mode="push", transport="tcp", expected_transport="nixl", num_bytes=64 << 20,
            num_pages=2048, num_prompt_tokens=1024, num_output_tokens=120,
            fallbacks=[self.text],
            peer_stamps={Stamp.PREFILL_STARTED: 10.024, Stamp.FIRST_LAYER_READY: 10.034,
                         Stamp.PREFILL_DONE: 10.154},
            stamps={Stamp.RECEIVED: 10.004, Stamp.LAST_LAYER_LANDED: 10.174, Stamp.KV_READY: 10.176,
                    Stamp.DECODE_SCHEDULED: 10.18, Stamp.FIRST_TOKEN: 10.192,
                    Stamp.FINISHED: 13.004},
        )  # fmt: skip
        exact = ClockEstimate(0.0, 0.0)
        timeline = make_timeline(gateway, WorkerTrace(decode, exact), WorkerTrace(prefill, exact))
        return RequestTrace(
            id=request_id,
            status=200,
            placement=(f"{self.worker_name(1)}: predicted TTFT 0.19 s", self.text),
            summary=None,
            gateway=gateway,
            decode=decode,
            prefill=prefill,
            missing=(),
            timeline=timeline,
            compared=compare_prediction(gateway, timeline),
            token_gaps=GapSummary(119, 0.021, 0.02, 0.04, 0.09),
            distance="same_rack",
        )


class Stream:
    """In place of the gateway's: `interval_s` between ticks; None: they never end."""

    def __init__(self, fleet: Fleet, interval_s: float, num_ticks: int | None) -> None:
        self.fleet, self.interval_s, self.num_ticks = fleet, interval_s, num_ticks
        self.num_sent = 0
        self.is_over = asyncio.Event()

    async def serve(self, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        points = tuple(self.fleet.point(START - 300 + i) for i in range(300))
        await self._write(send, "history", History(Point.__struct_fields__, points))
        leaving = asyncio.create_task(_until_left(receive))
        while not leaving.done():
            if self.num_ticks is None or self.num_sent < self.num_ticks:
                await self._write(send, "tick", self.fleet.tick(START + self.num_sent))
                if self.num_sent % 5 == 0:
                    await self._write(send, "links", self.fleet.links())
                self.num_sent += 1
            elif self.num_sent == self.num_ticks:
                self.is_over.set()
            await asyncio.sleep(self.interval_s)

    async def _write(self, send: Any, name: str, data: msgspec.Struct) -> None:
        body = b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
        await send({"type": "http.response.body", "body": body, "more_body": True})

    def end(self) -> None:
        pass


class App:
    """An ASGI application: the page, its stream, and traces of requests."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._dashboard = stream, Dashboard(stream)  # type: ignore[arg-type]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        try:
            if path.startswith("/debug/requests/"):
                trace = self._stream.fleet.trace(path.rpartition("/")[2])
                await send_whole(send, 200, msgspec.json.encode(trace), (JSON,))
            else:
                await self._dashboard.serve(path, scope, receive, send)
        except BatonError as exc:
            await send_error(send, answer_for(exc))


@contextlib.asynccontextmanager
async def serve_dashboard(
    fleet: Fleet, interval_s: float = 1.0, num_ticks: int | None = None
) -> AsyncGenerator[tuple[str, Stream]]:
    """The page's URL, and what feeds it."""
    stream = Stream(fleet, interval_s, num_ticks)
    listener = socket.create_server(("127.0.0.1", 0))
    table = Connections(HttpLimits(), MachineClock(), lambda _: None)
    async with serving(App(stream), listener, http=bounded_protocol(table)):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/dashboard", stream


async def _until_left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
