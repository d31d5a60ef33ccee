"""Write deploy/grafana/baton.json, Grafana's board of a Baton fleet.

`python -m scripts.grafana_board` writes it from the panels in grafana_request_panels.py and
grafana_kv_panels.py. A panel has queries and a legend for each; rows, sizes and colours follow.
Queries name no instance: a worker that is started again is the same line. Tests run every query
against a Prometheus that scrapes a fleet, and compare the file with this one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scripts.grafana_kv_panels import HANDOFFS, LINKS, STORE
from scripts.grafana_request_panels import OVERVIEW, QUEUES, REQUESTS, WORKERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.grafana_queries import Panel

BOARD: Final = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "baton.json"
SCHEMA_VERSION: Final = 39
"""Of Grafana 11; later ones migrate it by themselves."""
COLUMNS: Final = 24
HEIGHT: Final = 8
STAT_HEIGHT: Final = 4

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below one title."""

    title: str
    panels: tuple[Panel, ...]


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
