"""A running fleet's alerts, by its gateway's `/alerts`."""

from __future__ import annotations

from typing import Final

from baton.ops.doctor.finding import Area, Finding, Level
from baton.ops.gateway_pages import NOT_FOUND, Gateway, PageError, decode_page
from baton.protocol.alerts import Alert, AlertList, AlertState
from baton.protocol.gateway_http import ALERTS_PATH, RUNBOOK_PATH

WHY: Final = "What the gateway itself has found wrong with links, handoffs, the store, and targets."


def check_alerts(gateway: Gateway) -> list[Finding]:
    """Those that are firing; what cannot be evaluated is a note."""
    try:
        found = _read(gateway)
    except PageError as exc:
        return [_finding("alerts", Level.NOTE, str(exc))]
    firing = [each for each in found.alerts if each.state is AlertState.FIRING]
    if firing:
        return [_of(each, gateway) for each in firing]
    num_pending = sum(each.state is AlertState.PENDING for each in found.alerts)
    shown = f"none is firing, {num_pending} pending, {len(found.not_evaluated)} not evaluated"
    return [_finding("alerts", Level.OK, shown)]


def _of(alert: Alert, gateway: Gateway) -> Finding:
    is_critical, runbook = alert.severity == "critical", alert.runbook_url
    if not runbook.startswith(("http://", "https://")):
        runbook = f"{gateway.url}{RUNBOOK_PATH}#{alert.alert.lower()}"
    return _finding(
        str(alert.alert),
        Level.PROBLEM if is_critical else Level.WARNING,
        alert.summary,
        f"What it means, and what to do: {runbook}",
    )


def _read(gateway: Gateway) -> AlertList:
    answer = gateway.get(ALERTS_PATH)
    if answer[0] == NOT_FOUND:
        raise PageError("the gateway shows alerts to its own host only: run the doctor there")
    return decode_page(gateway, ALERTS_PATH, answer, AlertList)


def _finding(name: str, level: Level, found: str, why: str = WHY) -> Finding:
    return Finding(area=Area.FLEET, name=name, level=level, found=found, why=why, fix=None)
