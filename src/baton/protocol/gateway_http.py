"""Paths of a gateway, besides those that workers serve, too (`worker_http.py`)."""

from __future__ import annotations

from typing import Final

READY_PATH: Final = "/ready"
OPENAPI_PATH: Final = "/openapi.json"
ALERTS_PATH: Final = "/alerts"
DASHBOARD_PATH: Final = "/dashboard"
RUNBOOK_PATH: Final = "/dashboard/runbook.html"
"""A page with a section for each alert, under its name in lower case."""
DEMAND_PATH: Final = "/debug/demand"
LINKS_PATH: Final = "/debug/links"
QUEUE_PATH: Final = "/debug/queue"
REQUESTS_PATH: Final = "/debug/requests"
ROUTE_PATH: Final = "/debug/route"
TRANSFERS_PATH: Final = "/debug/transfers"
WORKERS_PATH: Final = "/debug/workers"
