"""Write deploy/grafana/baton.json, Grafana's board of a Baton fleet, from the panels below.

`python scripts/grafana_board.py` writes it. A panel has queries and a legend for each; rows, sizes
and colours follow. Queries name no instance: a worker that is started again is the same line.
Tests run every query against a Prometheus that scrapes a fleet, and compare the file with this one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

BOARD: Final = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "baton.json"
SCHEMA_VERSION: Final = 39
"""Of Grafana 11; later ones migrate it by themselves."""
COLUMNS: Final = 24
HEIGHT: Final = 8
STAT_HEIGHT: Final = 4

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and the legend of its lines."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. `unit` is Grafana's name of a unit."""

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    is_stacked: bool = False
    limits: tuple[float, float] | None = None
    """From the first value on a stat is orange, from the second on red."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below one title."""

    title: str
    panels: tuple[Panel, ...]


def rate(counter: str, by: str = "") -> str:
    """Sum of the rates of a counter, by labels."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({counter}[$__rate_interval]))"


def quantile(share: float, histogram: str, labels: str = "", by: str = "") -> str:
    """A quantile of a histogram's latest values, over all processes."""
    grouped = f"le, {by}" if by else "le"
    buckets = f"{histogram}_bucket{{{labels}}}" if labels else f"{histogram}_bucket"
    return f"histogram_quantile({share}, sum by ({grouped}) (rate({buckets}[$__rate_interval])))"


def quantiles(histogram: str, labels: str = "") -> tuple[Query, ...]:
    """The three that are read most."""
    shares = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    return tuple(Query(quantile(share, histogram, labels), name) for share, name in shares)


MODEL: Final = 'model=~"$model"'
REQUESTS_OF_MODEL: Final = f"baton_gateway_requests_total{{{MODEL}}}"
FAILED: Final = f'baton_gateway_requests_total{{{MODEL},code=~"5.."}}'
TTFT: Final = "baton_gateway_time_to_first_token_seconds"
ITL: Final = "baton_gateway_inter_token_latency_seconds"
PATH: Final = "distance, transport"
PATH_LEGEND: Final = "{{distance}} {{transport}}"

OVERVIEW: Final = (
    Panel(
        "Requests per second",
        "Completions that ended.",
        "reqps",
        (Query(rate(REQUESTS_OF_MODEL)),),
        width=3,
        kind="stat",
    ),
    Panel(
        "Failed requests",
        "Share of requests that ended with a status of 500 or more.",
        "percentunit",
        (
            Query(
                f"{rate(FAILED)} / ({rate(REQUESTS_OF_MODEL)} > 0) or vector(0)",
            ),
        ),
        width=3,
        kind="stat",
        limits=(0.001, 0.01),
    ),
    Panel(
        "TTFT p99",
        "From a request's arrival to the first byte of its answer.",
        "s",
        (Query(quantile(0.99, TTFT, MODEL)),),
        width=3,
        kind="stat",
    ),
    Panel(
        "ITL p99",
        "Between two chunks of a stream.",
        "s",
        (Query(quantile(0.99, ITL, MODEL)),),
        width=3,
        kind="stat",
    ),
    Panel(
        "Workers up",
        "Workers that requests may be placed on.",
        "none",
        (Query("sum(max by (url, role) (baton_gateway_worker_up))"),),
        width=3,
        kind="stat",
    ),
    Panel(
        "Alerts",
        "Firing at gateways: GET /alerts lists them with their labels.",
        "none",
        (Query("sum(max by (alert) (baton_alert_firing))"),),
        width=3,
        kind="stat",
        limits=(1, 5),
    ),
    Panel(
        "Handoffs not over the expected transport",
        "In the last hour. They work, and are slower: run `baton doctor` on the workers' hosts.",
        "none",
        (Query("sum(increase(baton_handoff_transport_mismatch_total[1h]))"),),
        width=6,
        kind="stat",
        limits=(1, 100),
    ),
)

REQUESTS: Final = (
    Panel(
        "Requests by status",
        "499: the client left before its answer was complete.",
        "reqps",
        (Query(rate(REQUESTS_OF_MODEL, "code"), "{{code}}"),),
        is_stacked=True,
    ),
    Panel("Time to first token (TTFT)", "As clients see it.", "s", quantiles(TTFT, MODEL)),
    Panel("Inter-token latency (ITL)", "As clients see it.", "s", quantiles(ITL, MODEL)),
    Panel(
        "Request duration",
        "From arrival to the last byte.",
        "s",
        quantiles("baton_gateway_request_duration_seconds", MODEL),
    ),
    Panel(
        "TTFT p99 by mode",
        "How KV was handed over: push, pull, pool, reference; colocated: not at all.",
        "s",
        (Query(quantile(0.99, TTFT, MODEL, "mode"), "{{mode}}"),),
    ),
    Panel(
        "Requests under way",
        "Being served, and those that wait for a worker to come back.",
        "none",
        (
            Query("sum(baton_gateway_inflight_requests)", "in flight"),
            Query("sum(baton_gateway_waiting_requests)", "wait for a worker"),
        ),
    ),
)

QUEUES: Final = (
    Panel(
        "Queued requests",
        "Requests that wait in the gateway for a worker with room.",
        "none",
        (Query("sum by (priority) (baton_gateway_queued_requests)", "{{priority}}"),),
        is_stacked=True,
    ),
    Panel(
        "Queue wait p99",
        "Of requests that had to wait.",
        "s",
        (
            Query(
                quantile(0.99, "baton_gateway_queue_wait_seconds", "", "priority"), "{{priority}}"
            ),
        ),
    ),
    Panel(
        "Refused and expired",
        "Requests that could not wait, or waited for too long.",
        "reqps",
        (
            Query(rate("baton_gateway_queue_refused_total", "cause"), "refused: {{cause}}"),
            Query(rate("baton_gateway_queue_expired_total", "cause"), "expired: {{cause}}"),
        ),
    ),
    Panel(
        "Requests inside engines",
        "awaiting_kv: their KV is on its way.",
        "none",
        (Query("sum by (state) (baton_worker_inflight_requests)", "{{state}}"),),
        is_stacked=True,
    ),
    Panel(
        "Queue time in workers p99",
        "From arrival at the worker to the start of prefill.",
        "s",
        (Query(quantile(0.99, "baton_worker_request_queue_time_seconds", "", "role"), "{{role}}"),),
    ),
    Panel(
        "Prefill time p99",
        "As each role saw it.",
        "s",
        (
            Query(
                quantile(0.99, "baton_worker_request_prefill_time_seconds", "", "role"), "{{role}}"
            ),
        ),
    ),
)

RECEIVED: Final = "baton_handoff_received_bytes_total"
HANDOFFS: Final = (
    Panel(
        "Handoffs by transport",
        "Completed ones, on decode's side.",
        "ops",
        (
            Query(
                rate('baton_handoffs_total{role="decode",result="completed"}', "transport"),
                "{{transport}}",
            ),
        ),
        is_stacked=True,
    ),
    Panel(
        "Handoffs that did not complete",
        "declined: decode had nearly all of the prompt's KV already.",
        "ops",
        (
            Query(
                rate('baton_handoffs_total{role="decode",result!="completed"}', "result"),
                "{{result}}",
            ),
        ),
    ),
    Panel(
        "KV received",
        "By distance and transport.",
        "Bps",
        (Query(rate(RECEIVED, PATH), PATH_LEGEND),),
        is_stacked=True,
    ),
    Panel(
        "Transfer time p99",
        "From the first layer computed to the last one landed: in mode push the rest of prefill is "
        "in it.",
        "s",
        (Query(quantile(0.99, "baton_handoff_transfer_seconds", "", PATH), PATH_LEGEND),),
    ),
    Panel(
        "Transfer time for each MiB, p50",
        "Compare distances: a farther one that is faster than a nearer one is a fault.",
        "s",
        (Query(quantile(0.5, "baton_handoff_transfer_seconds_per_mib", "", PATH), PATH_LEGEND),),
    ),
    Panel(
        "Exposed transfer",
        "The part of transfers that came after prefill, and so added to TTFT; 0: it hid behind "
        "compute.",
        "percentunit",
        (Query(quantile(0.9, "baton_handoff_exposed_share", "", PATH), f"p90 {PATH_LEGEND}"),),
    ),
    Panel(
        "Exposed seconds for each handoff",
        "What a handoff adds to TTFT, on the average.",
        "s",
        (
            Query(
                f"{rate('baton_handoff_exposed_seconds_total', PATH)} / "
                f"({rate('baton_handoff_transfer_seconds_count', PATH)} > 0)",
                PATH_LEGEND,
            ),
        ),
    ),
    Panel(
        "Fallbacks",
        "Handoffs and requests that were served in another way than intended: slower, never wrong.",
        "ops",
        (
            Query(rate("baton_handoff_fallbacks_total", "cause"), "handoff: {{cause}}"),
            Query(rate("baton_gateway_fallbacks_total", "cause"), "request: {{cause}}"),
        ),
    ),
    Panel(
        "Mismatches and verification",
        "Transports that were not the expected ones; KV that was not what its sender had; leases "
        "that decode did not renew.",
        "ops",
        (
            Query(
                rate("baton_handoff_transport_mismatch_total", "expected, used"),
                "{{used}} for {{expected}}",
            ),
            Query(
                rate("baton_handoff_digest_failures_total", "transport"), "digest: {{transport}}"
            ),
            Query(rate("baton_handoff_leases_lapsed_total"), "leases lapsed"),
        ),
    ),
)

LINKS: Final = (
    Panel(
        "Measured bandwidth",
        "Of links between workers, by probes and transfers: the lowest and the highest.",
        "Bps",
        (
            Query(
                "min by (transport, operation) (baton_link_bandwidth_bytes_per_second > 0)",
                "{{transport}} {{operation}}, lowest",
            ),
            Query(
                "max by (transport, operation) (baton_link_bandwidth_bytes_per_second > 0)",
                "{{transport}} {{operation}}, highest",
            ),
        ),
    ),
    Panel(
        "Measured latency",
        "Of links between workers: the highest.",
        "s",
        (
            Query(
                "max by (transport, operation) (baton_link_latency_seconds > 0)",
                "{{transport}} {{operation}}",
            ),
        ),
    ),
    Panel(
        "Error of the link model",
        "Difference of predicted and observed time, over the observed one.",
        "percentunit",
        tuple(
            Query(
                quantile(share, "baton_link_model_relative_error", "", PATH),
                f"{name} {PATH_LEGEND}",
            )
            for share, name in ((0.5, "p50"), (0.9, "p90"))
        ),
    ),
)

STORE: Final = (
    Panel(
        "Store: used share by tier",
        "A tier that is full demotes or drops entries.",
        "percentunit",
        (
            Query(
                "sum by (tier) (baton_store_used_bytes) / "
                "(sum by (tier) (baton_store_capacity_bytes) > 0)",
                "{{tier}}",
            ),
        ),
    ),
    Panel(
        "Store: hit rate by tier",
        "Of the entries that were asked for.",
        "percentunit",
        (
            Query(
                rate('baton_store_leases_total{result="hit"}', "tier")
                + " / ("
                + rate("baton_store_leases_total", "tier")
                + " > 0)",
                "{{tier}}",
            ),
        ),
    ),
    Panel(
        "Store: traffic",
        "Entries put and read.",
        "Bps",
        (Query(rate("baton_store_bytes_total", "tier, direction"), "{{tier}} {{direction}}"),),
    ),
    Panel(
        "Store: entries that left, or could not be read",
        "damaged: not what was put; they are removed and never used.",
        "ops",
        (
            Query(rate("baton_store_evictions_total", "tier, outcome"), "{{tier}} {{outcome}}"),
            Query(rate("baton_store_damaged_total", "tier"), "{{tier}} damaged"),
            Query(rate("baton_store_read_errors_total", "tier"), "{{tier}} read errors"),
        ),
    ),
    Panel(
        "Prompt tokens by source",
        "computed here; cached: from this worker's memory or the store; received: from prefill.",
        "short",
        (Query(rate("baton_worker_prompt_tokens_total", "source"), "{{source}}"),),
        is_stacked=True,
    ),
    Panel(
        "Cached tokens: predicted and actual",
        "What the router expected workers to have of prompts, and what they had.",
        "short",
        (Query(rate("baton_router_cached_tokens_total", "kind"), "{{kind}}"),),
    ),
)

WORKERS: Final = (
    Panel(
        "Workers and their state",
        "As the gateway sees them.",
        "none",
        (Query("max by (url, role, state) (baton_gateway_worker_state) == 1"),),
        kind="table",
    ),
    Panel(
        "KV blocks",
        "quarantined: pages of aborted handoffs, until nothing can land in them any more.",
        "none",
        (Query("sum by (state) (baton_worker_blocks)", "{{state}}"),),
    ),
    Panel(
        "KV blocks in use",
        "Share of blocks that are not free, of the fullest worker and of all.",
        "percentunit",
        (
            Query(
                '1 - min(baton_worker_blocks{state="free"} / ignoring(state) '
                "(baton_worker_blocks_capacity > 0))",
                "fullest",
            ),
            Query(
                '1 - sum(baton_worker_blocks{state="free"}) / '
                "(sum(baton_worker_blocks_capacity) > 0)",
                "all",
            ),
        ),
    ),
    Panel(
        "Requests at workers",
        "Of this gateway: prompts to compute, and answers under way.",
        "none",
        (
            Query(
                f"sum by (worker, part) (baton_router_requests{{{MODEL}}})", "{{worker}} {{part}}"
            ),
        ),
    ),
    Panel(
        "Error of predicted costs",
        "By which the policy `cost` places requests: the difference over the larger of the two.",
        "percentunit",
        (Query(f"max by (cost) (baton_router_cost_error_ratio{{{MODEL}}})", "{{cost}}, highest"),),
    ),
    Panel(
        "Tokens generated",
        "By all workers.",
        "short",
        (Query(rate("baton_worker_output_tokens_total"), "tokens per second"),),
    ),
    Panel(
        "Ejected, silent and preempted workers",
        "Why workers were taken out.",
        "ops",
        (
            Query(rate("baton_gateway_ejections_total", "cause"), "ejected: {{cause}}"),
            Query(rate("baton_gateway_silent_workers_total"), "silent"),
            Query(rate("baton_gateway_preempted_workers_total"), "preempted"),
        ),
    ),
    Panel(
        "Streams whose worker was lost, or that moved",
        "resumed: the client noticed a pause at most.",
        "ops",
        (
            Query(rate("baton_gateway_resumed_streams_total", "result"), "lost: {{result}}"),
            Query(rate("baton_gateway_moved_streams_total", "result"), "moved: {{result}}"),
            Query(rate("baton_gateway_broken_streams_total", "cause"), "broken: {{cause}}"),
        ),
    ),
    Panel(
        "Warnings",
        "Those that clients and unauthenticated peers can cause: most are counted, not logged.",
        "ops",
        (Query(rate("baton_warnings_total", "source, subject"), "{{source}}: {{subject}}"),),
    ),
)

ROWS: Final = (
    Row("Overview", OVERVIEW),
    Row("Requests", REQUESTS),
    Row("Queues", QUEUES),
    Row("Handoffs", HANDOFFS),
    Row("Links", LINKS),
    Row("Store and prefixes", STORE),
    Row("Workers", WORKERS),
)

DATASOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}


def make_board() -> Json:
    """The board, as Grafana imports it."""
    return {
        "uid": "baton-fleet",
        "title": "Baton: a fleet",
        "description": "Made by scripts/grafana_board.py; see docs/observability/tools.md.",
        "tags": ["baton", "llm"],
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [_datasource_variable(), _model_variable()]},
        "panels": list(_place(ROWS)),
    }


def _datasource_variable() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "regex": "",
        "refresh": 1,
        "current": {},
        "options": [],
    }


def _model_variable() -> Json:
    query = "label_values(baton_gateway_requests_total, model)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "model"},
        "hide": 0,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "regex": "/.+/",
        "refresh": 2,
        "sort": 1,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
    }


def _place(rows: tuple[Row, ...]) -> Iterator[Json]:
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
            "panels": [],
        }
        x, y = 0, y + 1
        height = STAT_HEIGHT if row.panels[0].kind == "stat" else HEIGHT
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + height
            number += 1
            place = {"h": height, "w": panel.width, "x": x, "y": y}
            yield {"id": number, "gridPos": place, **_draw(panel)}
            x += panel.width
        y += height


def _draw(panel: Panel) -> Json:
    is_table = panel.kind == "table"
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "editorMode": "code",
                "format": "table" if is_table else "time_series",
                "instant": is_table,
                "range": not is_table,
            }
            for place, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _options(panel),
        **({"transformations": _columns()} if is_table else {}),
    }


def _field_defaults(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.limits is not None:
        colours = zip(("orange", "red"), panel.limits, strict=True)
        steps += [{"color": colour, "value": value} for colour, value in colours]
    defaults: Json = {
        "unit": panel.unit,
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "mappings": [],
    }
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
        defaults |= {
            "min": 0,
            "custom": {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 20 if panel.is_stacked else 0,
                "showPoints": "never",
                "spanNulls": False,
                "stacking": stacking,
            },
        }
    return defaults


def _options(panel: Panel) -> Json:
    match panel.kind:
        case "timeseries":
            return {
                "legend": {
                    "displayMode": "table",
                    "placement": "bottom",
                    "showLegend": True,
                    "calcs": ["lastNotNull", "max"],
                },
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "stat":
            return {
                "colorMode": "value",
                "graphMode": "area",
                "textMode": "auto",
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            }
        case "table":
            return {"showHeader": True, "cellHeight": "sm"}


def _columns() -> list[Json]:
    """A row for each worker: its labels, without the time and the value, which is 1."""
    hidden = {"Time": True, "Value": True}
    return [{"id": "organize", "options": {"excludeByName": hidden, "renameByName": {}}}]


def write(path: Path = BOARD) -> None:
    """Write the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_text(make_board()), encoding="utf-8")


def to_text(board: Json) -> str:
    """As it is kept: one line for each panel, so that a change shows."""
    panels = board["panels"]
    assert isinstance(panels, list)
    rest = json.dumps({**board, "panels": []}, indent=1)
    lines = ",\n".join(f"  {json.dumps(panel)}" for panel in panels)
    return rest.replace('"panels": []', f'"panels": [\n{lines}\n ]') + "\n"


if __name__ == "__main__":
    write()
