"""A snapshot as rows of text: the same for a terminal and for a file.

Names and reasons come from workers and clients: none of them may steer a terminal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.ops.doctor.finding import one_line, write_bytes, write_seconds
from baton.ops.top.pages import FleetTier, Link, PairHandoffs, SegmentFigures, Worker
from baton.ops.top.snapshot import READY, FleetSnapshot
from baton.protocol.gateway_http import (
    ALERTS_PATH,
    LINKS_PATH,
    REQUESTS_PATH,
    TRANSFERS_PATH,
    WORKERS_PATH,
)
from baton.protocol.worker_http import METRICS_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from baton.ops.top.window import Quantiles, Traffic

MAX_CELL_CHARS: Final = 60
NOTHING: Final = "-"
MAX_LINKS: Final = 100
MAX_PAIRS: Final = 100


@dataclass(frozen=True, slots=True)
class Column:
    """A column's title; figures are aligned at the right."""

    title: str
    is_figure: bool = False


@dataclass(frozen=True, slots=True)
class TopTable:
    """Rows of cells, each row with a key by which it is found again. `note` if there are none."""

    title: str
    columns: tuple[Column, ...]
    rows: Mapping[str, tuple[str, ...]]
    note: str = ""


def describe_traffic(snapshot: FleetSnapshot) -> tuple[str, ...]:
    """The headline: lines of text."""
    state = "ready" if snapshot.state == READY else f"NOT READY: {_cell(snapshot.state, 200)}"
    problems = () if snapshot.workers is None else snapshot.workers.source_problems
    lines = (
        f"baton {snapshot.baton}  {snapshot.gateway}  {state}",
        *(f"source of workers: {_cell(each, 200)}" for each in problems),
    )
    traffic = snapshot.traffic
    if traffic is None:
        return (*lines, f"no metrics: {_cell(snapshot.missing.get(METRICS_PATH, ''), 200)}")
    since = (
        "since the gateway's start"
        if traffic.window_s is None
        else f"last {traffic.window_s:.0f} s"
    )
    rate = "" if traffic.requests_per_s is None else f" ({traffic.requests_per_s:.3g}/s)"
    counts = f"{traffic.num_requests} requests{rate}, {traffic.num_failed} failed"
    latencies = f"TTFT {_latencies(traffic.ttft)}   ITL {_latencies(traffic.itl)}"
    return (
        *lines,
        f"{since}: {counts}, {traffic.num_fallbacks} fallbacks",
        f"{latencies}   {_queue(snapshot, traffic)}",
    )


def make_tables(snapshot: FleetSnapshot, sort: int = 0) -> tuple[TopTable, ...]:
    """Alerts, workers, handoffs, links, tiers, requests; `sort` chooses from `WORKER_SORTS`."""
    return (
        _alerts(snapshot),
        _workers(snapshot, sort),
        _handoffs(snapshot),
        _links(snapshot),
        _tiers(snapshot),
        _requests(snapshot),
    )


def _alerts(snapshot: FleetSnapshot) -> TopTable:
    columns = _texts("state", "alert", "severity", "where", "what")
    alerts = () if snapshot.alerts is None else snapshot.alerts.alerts
    rows = {
        str(place): (
            _cell(each.state),
            _cell(each.alert),
            _cell(each.severity),
            _cell(", ".join(f"{name}={value}" for name, value in each.labels.items())),
            _cell(each.summary, 120),
        )
        for place, each in enumerate(alerts)
    }
    return TopTable("alerts", columns, rows, _note(snapshot, ALERTS_PATH, "none"))


WORKER_SORTS: Final = ("as listed", "load", "KV in use")


def _workers(snapshot: FleetSnapshot, sort: int) -> TopTable:
    columns = (
        *_texts("worker", "role", "state"),
        *_figures("prefills", "decodes", "queued", "queue", "KV free", "share"),
        *_texts("where", "reason"),
    )
    workers = list(() if snapshot.workers is None else snapshot.workers.workers)
    order = _SORT_KEYS[sort % len(WORKER_SORTS)]
    if order is not None:
        workers.sort(key=order, reverse=True)
    rows = {each.url: _worker_row(each) for each in workers}
    title = "workers" if order is None else f"workers by {WORKER_SORTS[sort % len(WORKER_SORTS)]}"
    return TopTable(title, columns, rows, _note(snapshot, WORKERS_PATH, "none"))


def _worker_row(worker: Worker) -> tuple[str, ...]:
    given, load = worker.given, worker.load
    is_up = worker.state == "up"
    return (
        _cell(worker.worker or worker.url),
        _cell(worker.role),
        _cell(worker.health if is_up and worker.health else worker.state),
        NOTHING if given is None else str(given.num_prefills),
        NOTHING if given is None else str(given.num_decodes),
        NOTHING if load is None else str(load.num_waiting),
        NOTHING if given is None else write_seconds(given.queue_s),
        NOTHING if load is None else f"{1 - _kv_in_use(worker):.0%} of {load.num_blocks}",
        f"{worker.share:.0%}",
        _cell(worker.topology or ""),
        _cell(worker.reason or worker.why_withdrawn or "", 120),
    )


def _load_of(worker: Worker) -> float:
    given, load = worker.given, worker.load
    under_way = 0 if given is None else given.num_prefills + given.num_decodes
    return under_way + (0 if load is None else load.num_waiting)


def _kv_in_use(worker: Worker) -> float:
    load = worker.load
    return 0.0 if load is None else 1 - load.num_free_blocks / max(1, load.num_blocks)


_SORT_KEYS: Final[tuple[Callable[[Worker], float] | None, ...]] = (None, _load_of, _kv_in_use)


def _handoffs(snapshot: FleetSnapshot) -> TopTable:
    columns = (
        *_texts("prefill", "decode", "distance", "transport", "mode", "operation"),
        *_figures(
            "latest", "p50", "p99", "rate p50", "exposed p50", "lost", "in all", "mismatches"
        ),
    )
    transfers = snapshot.transfers
    pairs = () if transfers is None else transfers.handoffs[:MAX_PAIRS]
    segments = () if transfers is None else transfers.segments
    lost = {(each.sender, each.receiver, each.transport): each.recent for each in segments}
    rows = {
        f"{p.prefill}>{p.decode}/{p.distance}/{p.transport}/{p.mode}/{p.operation}": _pair_row(
            p, lost.get((p.prefill, p.decode, p.transport), SegmentFigures()).lost_share
        )
        for p in pairs
    }
    seconds = 0.0 if transfers is None else transfers.window_s
    title = f"handoffs, those of the last {seconds:.0f} s first" if rows else "handoffs"
    return TopTable(title, columns, rows, _note(snapshot, TRANSFERS_PATH, "none yet"))


def _pair_row(pair: PairHandoffs, lost_share: float | None) -> tuple[str, ...]:
    recent = pair.recent
    rate, exposed = recent.bytes_per_s.p50, recent.exposed_share.p50
    return (
        _cell(pair.prefill),
        _cell(pair.decode),
        _cell(pair.distance),
        _cell(pair.transport),
        _cell(pair.mode),
        _cell(pair.operation),
        str(recent.num),
        _seconds(recent.transfer_s.p50),
        _seconds(recent.transfer_s.p99),
        NOTHING if rate is None else _rate(rate),
        _share(exposed),
        NOTHING if lost_share is None else f"{lost_share:.2%}",
        str(pair.total.num),
        str(pair.num_mismatches),
    )


def _links(snapshot: FleetSnapshot) -> TopTable:
    columns = (
        *_texts("from", "to", "transport"),
        *_figures("latency", "bandwidth"),
        *_texts("encoding"),
    )
    models = () if snapshot.links is None else snapshot.links.models
    links = [link for model in models for link in model.links][:MAX_LINKS]
    rows = {f"{link.from_}>{link.to}": _link_row(link) for link in links}
    return TopTable("links", columns, rows, _note(snapshot, LINKS_PATH, "none measured yet"))


def _link_row(link: Link) -> tuple[str, ...]:
    return (
        _cell(link.from_),
        _cell(link.to),
        _cell(link.transport),
        write_seconds(link.latency_s),
        _rate(link.bytes_per_s),
        _cell(link.encoding),
    )


def _tiers(snapshot: FleetSnapshot) -> TopTable:
    columns = (
        *_texts("tier"),
        *_figures("workers", "used", "found", "missing", "hit rate", "in all", "read", "written"),
    )
    transfers = snapshot.transfers
    tiers = () if transfers is None else transfers.store.tiers
    seconds = 0.0 if transfers is None else transfers.window_s
    title = f"tiers of the store, last {seconds:.0f} s" if tiers else "tiers of the store"
    rows = {each.tier: _tier_row(each) for each in tiers}
    return TopTable(title, columns, rows, _note(snapshot, TRANSFERS_PATH, "none"))


def _tier_row(tier: FleetTier) -> tuple[str, ...]:
    used, recent = write_bytes(tier.used_bytes), tier.recent
    if tier.capacity_bytes:
        used = f"{tier.used_bytes / tier.capacity_bytes:.0%} of {write_bytes(tier.capacity_bytes)}"
    lost = f", {tier.num_unavailable} cannot reach it" if tier.num_unavailable else ""
    return (
        _cell(tier.tier),
        f"{tier.num_workers}{lost}",
        used,
        str(recent.num_hits),
        str(recent.num_misses),
        _share(recent.hit_share),
        _share(tier.total.hit_share),
        write_bytes(recent.read_bytes),
        write_bytes(recent.written_bytes),
    )


def _requests(snapshot: FleetSnapshot) -> TopTable:
    columns = (
        *_texts("request"),
        *_figures("status"),
        *_texts("mode", "outcome"),
    )
    requests = () if snapshot.requests is None else snapshot.requests.requests
    rows = {
        each.id: (
            _cell(each.id),
            str(each.status),
            _cell(each.mode or NOTHING),
            _cell(each.outcome or NOTHING),
        )
        for each in requests
    }
    return TopTable("latest requests", columns, rows, _note(snapshot, REQUESTS_PATH, "none"))


def _texts(*titles: str) -> tuple[Column, ...]:
    return tuple(map(Column, titles))


def _figures(*titles: str) -> tuple[Column, ...]:
    return tuple(Column(title, is_figure=True) for title in titles)


def _queue(snapshot: FleetSnapshot, traffic: Traffic) -> str:
    queue = snapshot.queue
    if queue is None:
        return f"in flight {traffic.num_in_flight}"
    oldest = max((each.oldest_s for each in queue.waiting), default=None)
    waited = "" if oldest is None else f", the oldest for {write_seconds(oldest)}"
    return f"in flight {traffic.num_in_flight}, queued {queue.num_requests}{waited}"


def _latencies(quantiles: Quantiles) -> str:
    return f"p50 {_seconds(quantiles.p50_s)}, p99 {_seconds(quantiles.p99_s)}"


def _seconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else write_seconds(seconds)


def _share(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"


def _rate(bytes_per_s: float) -> str:
    return f"{write_bytes(round(bytes_per_s))}/s"


def _note(snapshot: FleetSnapshot, path: str, otherwise: str) -> str:
    why = snapshot.missing.get(path)
    return otherwise if why is None else f"not shown: {_cell(why, 200)}"


def _cell(text: str, max_chars: int = MAX_CELL_CHARS) -> str:
    line = one_line(text)
    return line if len(line) <= max_chars else f"{line[: max_chars - 1]}…"
