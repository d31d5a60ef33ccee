"""What is read of a gateway's pages. Fields that are not listed here are ignored."""

from __future__ import annotations

import msgspec


class Load(msgspec.Struct, frozen=True):
    """What a worker reports of its engine."""

    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    max_running: int | None = None


class Given(msgspec.Struct, frozen=True):
    """What the gateway has given a worker to do; `queue_s` until a new prompt would begin."""

    num_prefills: int
    num_decodes: int
    queue_s: float


class Worker(msgspec.Struct, frozen=True):
    """One worker of `/debug/workers`."""

    url: str
    role: str
    state: str
    worker: str | None = None
    reason: str | None = None
    load: Load | None = None
    given: Given | None = None
    health: str = ""
    share: float = 1.0
    topology: str | None = None
    why_withdrawn: str | None = None


class WorkersPage(msgspec.Struct, frozen=True):
    """`/debug/workers`."""

    workers: tuple[Worker, ...]
    source_problems: tuple[str, ...] = ()


class Waiting(msgspec.Struct, frozen=True):
    """Requests that wait in the gateway, of one model, class and tenant."""

    model: str
    priority: str
    num_requests: int
    oldest_s: float


class QueuePage(msgspec.Struct, frozen=True):
    """`/debug/queue`."""

    num_requests: int
    max_requests: int
    num_tokens: int
    max_tokens: int
    waiting: tuple[Waiting, ...] = ()


class Quantiles(msgspec.Struct, frozen=True):
    """None: there is no value."""

    p50: float | None = None
    p99: float | None = None


class HandoffFigures(msgspec.Struct, frozen=True):
    """Handoffs that landed: from the first layer computed to the last one there."""

    num: int
    num_bytes: int
    transfer_s: Quantiles
    bytes_per_s: Quantiles
    exposed_share: Quantiles


class PairHandoffs(msgspec.Struct, frozen=True):
    """Of two workers, over one transport, in one mode, by one operation."""

    prefill: str
    decode: str
    distance: str
    transport: str
    mode: str
    operation: str
    total: HandoffFigures
    recent: HandoffFigures
    num_mismatches: int = 0


class SegmentFigures(msgspec.Struct, frozen=True):
    """TCP segments; `lost_share` of them were lost, None where none was sent."""

    lost_share: float | None = None


class PairSegments(msgspec.Struct, frozen=True):
    """What one worker's kernel sent to another worker."""

    sender: str
    receiver: str
    transport: str
    recent: SegmentFigures


class TierFigures(msgspec.Struct, frozen=True):
    """Entries asked for and found, or not; `hit_share` of those, None where none was asked for."""

    num_hits: int
    num_misses: int
    read_bytes: int
    written_bytes: int
    hit_share: float | None = None


class FleetTier(msgspec.Struct, frozen=True):
    """A tier of the store; bytes are those of the fullest worker's."""

    tier: str
    num_workers: int
    used_bytes: int
    capacity_bytes: int
    total: TierFigures
    recent: TierFigures
    num_unavailable: int = 0


class FleetStore(msgspec.Struct, frozen=True):
    """What the workers report of it."""

    tiers: tuple[FleetTier, ...] = ()


class TransfersPage(msgspec.Struct, frozen=True):
    """`/debug/transfers`; `recent` is of the last `window_s`."""

    window_s: float
    handoffs: tuple[PairHandoffs, ...] = ()
    segments: tuple[PairSegments, ...] = ()
    store: FleetStore = FleetStore()
    num_left_out: int = 0


class Link(msgspec.Struct, frozen=True, rename={"from_": "from"}):
    """A measured link."""

    from_: str
    to: str
    transport: str
    latency_s: float
    bytes_per_s: float
    encoding: str = "raw"


class ModelLinks(msgspec.Struct, frozen=True):
    """Of one model."""

    model: str
    links: tuple[Link, ...] = ()


class LinksPage(msgspec.Struct, frozen=True):
    """`/debug/links`."""

    models: tuple[ModelLinks, ...] = ()


class Request(msgspec.Struct, frozen=True):
    """One line of `/debug/requests`."""

    id: str
    status: int
    mode: str | None = None
    outcome: str | None = None


class RequestsPage(msgspec.Struct, frozen=True):
    """`/debug/requests`: the latest first."""

    requests: tuple[Request, ...] = ()


class Alert(msgspec.Struct, frozen=True):
    """One alert of `/alerts`."""

    alert: str
    state: str
    severity: str
    summary: str = ""
    labels: dict[str, str] = {}


class AlertsPage(msgspec.Struct, frozen=True):
    """`/alerts`."""

    alerts: tuple[Alert, ...] = ()
