"""Alerts of a running gateway: the page, the metric, the log, the webhook."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from prometheus_client import CollectorRegistry

from baton.config.sections import AlertsSection
from baton.gateway.alerts.webhook import MAX_QUEUED, Webhook
from baton.gateway.targets import Targets
from baton.protocol.alerts import Alert, AlertName, AlertState
from tests.integration.gateway_cluster import STREAM, cluster, run, until_true
from tests.integration.scripted_worker import MODEL

ROOT = Path(__file__).parents[2]


def alert(state: AlertState = AlertState.FIRING, name: str = "a") -> Alert:
    return Alert(
        alert=AlertName.LINK_DRIFT,
        state=state,
        severity="warning",
        labels={"from": name, "to": "d"},
        summary="slow",
        value=2.0,
        starts_at=1_700_000_000.5,
        ends_at=None if state is AlertState.FIRING else 1_700_000_060.0,
        runbook_url="docs#x",
    )


class Receiver:
    """A webhook's server that answers with the given statuses, then 200."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.bodies = list(statuses), []

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        return web.Response(status=self.statuses.pop(0) if self.statuses else 200)

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_post("/hook", self.handle)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/hook?token=secret"

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()


def result(registry: CollectorRegistry, name: str) -> float:
    return registry.get_sample_value("baton_alert_notifications_total", {"result": name}) or 0


async def deliver(receiver: Receiver, *alerts: Alert) -> CollectorRegistry:
    registry = CollectorRegistry()
    async with receiver as url:
        webhook = Webhook(url, registry)
        task = asyncio.create_task(webhook.run())
        webhook.submit(alerts)

        def is_done() -> bool:
            return result(registry, "sent") + result(registry, "failed") > 0

        await until_true(is_done)
        task.cancel()
    return registry


def test_a_notification_is_alertmanagers():
    receiver = Receiver()
    registry = asyncio.run(deliver(receiver, alert(), alert(AlertState.RESOLVED, "b")))
    assert result(registry, "sent") == 1
    (body,) = receiver.bodies
    assert (body["version"], body["status"], body["truncatedAlerts"]) == ("4", "firing", 0)
    assert body["commonLabels"] == {
        "alertname": "BatonLinkDrift",
        "severity": "warning",
        "to": "d",
    }
    firing, resolved = body["alerts"]
    assert firing["startsAt"] == "2023-11-14T22:13:20.500+00:00"
    assert firing["endsAt"] == "0001-01-01T00:00:00Z"
    assert (resolved["status"], resolved["endsAt"][:19]) == ("resolved", "2023-11-14T22:14:20")
    assert firing["annotations"] == {"summary": "slow", "runbook_url": "docs#x"}
    assert firing["fingerprint"] != resolved["fingerprint"]
    for key in ("receiver", "groupKey", "groupLabels", "commonAnnotations", "externalURL"):
        assert key in body


def test_a_receiver_that_is_busy_is_asked_again():
    receiver = Receiver(503)
    registry = asyncio.run(deliver(receiver, alert()))
    assert (len(receiver.bodies), result(registry, "sent")) == (2, 1)
    assert receiver.bodies[0] == receiver.bodies[1]


def test_a_refusal_is_logged_without_the_urls_secret(caplog):
    receiver = Receiver(400)
    with caplog.at_level(logging.WARNING):
        registry = asyncio.run(deliver(receiver, alert()))
    assert (len(receiver.bodies), result(registry, "failed")) == (1, 1)
    assert "HTTP 400" in caplog.text
    assert "secret" not in caplog.text


def test_a_receiver_that_does_not_answer_costs_no_more_than_the_queue():
    async def main() -> CollectorRegistry:
        registry = CollectorRegistry()
        webhook = Webhook("http://127.0.0.1:9/hook", registry)
        for _ in range(MAX_QUEUED + 7):
            webhook.submit([alert()])
        return registry

    assert result(asyncio.run(main()), "dropped") == 7


@pytest.fixture(scope="module")
def rules() -> set[tuple[str, frozenset[str]]]:
    """Each series of the gateway's that Prometheus' rules name, with its labels."""
    loaded = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())
    found = set()
    for rule in (rule for group in loaded["groups"] for rule in group["rules"]):
        for name in re.findall(r"\bbaton_\w+", rule["expr"]):
            found.add(name)
    return found
