"""Alerts of a running gateway: the page, the metric, the log, the webhook."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from aiohttp import web
from msgspec import structs
from prometheus_client import CollectorRegistry

from baton.config.sections import AlertsSection
from baton.gateway import report_feed, transfer_feed
from baton.gateway.alerts.lifecycle import Timing
from baton.gateway.alerts.rules import MIN_ENDED, TIMINGS
from baton.gateway.alerts.webhook import MAX_QUEUED, Webhook
from baton.gateway.targets import Targets
from baton.ids import new_epoch
from baton.protocol.alerts import Alert, AlertName, AlertState
from baton.telemetry.drift import DEFAULTS
from baton.telemetry.transfer_report import MAX_IDLE_S, SegmentCounts, TransferReport
from baton.telemetry.transfers import LinkLabels, TransferTable, TransferTime
from baton.testing.clocks import ManualClock
from tests.integration.gateway_cluster import STREAM, Cluster, cluster, run, until, until_true
from tests.integration.scripted_vllm import ScriptedVllm, say_abc_as_vllm
from tests.integration.scripted_worker import MODEL

RULES = Path(__file__).parents[2] / "deploy/prometheus/rules.yaml"


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

        await until(lambda: result(registry, "sent") + result(registry, "failed") > 0)
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


def drifted_report(idle_s: float = 0.0) -> bytes:
    """Of a prefill worker whose link to decode-0 is five times as slow as it was.

    `idle_s`: how long ago the link was used last.
    """
    labels = LinkLabels("same_rack", "tcp", "WRITE")
    usual = TransferTime("decode-0", "same_rack", "tcp", "push", 1 << 20, 1e-3)
    clock = ManualClock()
    table = TransferTable(new_epoch(), clock)
    for number in range(DEFAULTS.num_reference + 50):
        slow = structs.replace(usual, seconds=5e-3)
        table.transfer(usual if number < DEFAULTS.num_reference else slow, labels)
    clock.advance(idle_s)
    return msgspec.json.encode(table.report())


async def alerts_of(running: Cluster, name: AlertName, state: str) -> list[dict[str, Any]]:
    """Once there is one in that state."""
    found: list[dict[str, Any]] = []

    async def is_there() -> bool:
        _, page = await running.get_json("/alerts")
        found[:] = [e for e in page["alerts"] if (e["alert"], e["state"]) == (name, state)]
        return bool(found)

    await until_true(is_there)
    return found


def test_a_drifted_link_is_on_the_page_in_the_metrics_and_in_the_log(caplog, monkeypatch):
    monkeypatch.setitem(TIMINGS, AlertName.LINK_DRIFT, Timing())
    monkeypatch.setattr(transfer_feed, "INTERVAL_S", 0.1)

    async def scenario(running: Cluster) -> None:
        running.prefills[0].transfers = drifted_report()
        (found,) = await alerts_of(running, AlertName.LINK_DRIFT, "firing")
        assert found["labels"] == {
            "distance": "same_rack",
            "from": "prefill-0",
            "to": "decode-0",
            "transport": "tcp",
        }
        assert found["value"] == pytest.approx(5.0, rel=0.05)
        assert found["runbook_url"] == "docs/observability/alerts.md#batonlinkdrift"
        assert await alerts_of(running, AlertName.LINK_DRIFT, "firing") == [found]
        assert await running.metric('baton_alert_firing{alert="BatonLinkDrift"}') == 1
        assert await running.metric("baton_alert_firing") == 1
        running.prefills[0].transfers = msgspec.json.encode(TransferReport(epoch=new_epoch()))
        (resolved,) = await alerts_of(running, AlertName.LINK_DRIFT, "resolved")
        assert resolved["ends_at"] >= resolved["starts_at"]
        assert await running.metric("baton_alert_firing") == 0

    with caplog.at_level(logging.INFO):
        run(scenario, alerts=AlertsSection(interval_s=0.1))
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("baton.gateway.alerts")]
    assert len(lines) == 2, lines
    assert "from prefill-0 to decode-0 over tcp take 5.0 times as long" in lines[0]
    assert "BatonLinkDrift is resolved" in lines[1]


def test_an_alert_of_a_link_ends_when_the_link_is_no_longer_used(monkeypatch):
    """The worker at its other end was drained, say: the sender still reports the link."""
    monkeypatch.setitem(TIMINGS, AlertName.LINK_DRIFT, Timing())
    monkeypatch.setattr(transfer_feed, "INTERVAL_S", 0.1)

    async def scenario(running: Cluster) -> None:
        running.prefills[0].transfers = drifted_report(MAX_IDLE_S - 1)
        await alerts_of(running, AlertName.LINK_DRIFT, "firing")
        running.prefills[0].transfers = drifted_report(MAX_IDLE_S)
        await alerts_of(running, AlertName.LINK_DRIFT, "resolved")
        assert await running.metric("baton_alert_firing") == 0
        _, page = await running.get_json("/alerts")
        assert "used within the last 10 min" in page["not_evaluated"]["BatonDistanceDrift"]

    run(scenario, alerts=AlertsSection(interval_s=0.1))


def test_a_link_that_loses_segments_is_named_once_they_are_counted(monkeypatch):
    monkeypatch.setitem(TIMINGS, AlertName.LINK_LOSS, Timing())
    monkeypatch.setattr(transfer_feed, "INTERVAL_S", 0.1)
    monkeypatch.setattr(report_feed, "LOOK_S", 0.1)
    table = TransferTable(new_epoch(), ManualClock())

    async def scenario(running: Cluster) -> None:
        _, page = await running.get_json("/alerts")
        assert "TCP segments" in page["not_evaluated"]["BatonLinkLoss"]

        async def is_there() -> bool:
            for name, num_lost in (("decode-0", 60), ("decode-1", 6)):
                counts = SegmentCounts(6000, num_lost + 9, 9, 9_000_000)
                table.segments(name, "same_rack", "tcp", counts)
            running.prefills[0].transfers = msgspec.json.encode(table.report())
            _, page = await running.get_json("/alerts")
            return any(each["state"] == "firing" for each in page["alerts"])

        await until_true(is_there)
        (found,) = await alerts_of(running, AlertName.LINK_LOSS, "firing")
        assert found["labels"] == {
            "distance": "same_rack",
            "from": "prefill-0",
            "to": "decode-0",
            "transport": "tcp",
        }
        assert found["value"] == pytest.approx(0.01)
        assert "1.0% of the TCP segments from prefill-0 to decode-0" in found["summary"]
        _, page = await running.get_json("/alerts")
        assert "BatonLinkLoss" not in page["not_evaluated"]
        _, page = await running.get_json("/debug/transfers")
        assert {each["receiver"] for each in page["segments"]} == {"decode-0", "decode-1"}
        async with running.post(STREAM, **{"x-request-id": "r"}) as response:
            await response.read()
        _, shown = await running.get_json("/debug/requests/r")
        assert shown["gateway"]["peer"] == "prefill-0 → decode-0"
        assert shown["lost_share"] == pytest.approx(0.01)

    run(scenario, alerts=AlertsSection(interval_s=0.1))


def test_failures_of_a_rank_that_answers_late_are_none_of_now(monkeypatch):
    """What it counted before the gateway could read it was then as long ago as of any other."""
    monkeypatch.setattr(transfer_feed, "INTERVAL_S", 0.1)
    monkeypatch.setattr(report_feed, "LOOK_S", 0.1)
    server = ScriptedVllm("decode-0", "decode", say_abc_as_vllm, num_ranks=2)
    first, second = server.controls

    drifted = msgspec.json.decode(drifted_report(), type=TransferReport)

    async def scenario(running: Cluster) -> None:
        first.transfers = msgspec.json.encode(TransferReport(epoch="a"))

        async def is_read() -> bool:
            _, page = await running.get_json("/debug/transfers")
            return page["num_workers"] == 1

        await until_true(is_read)
        late = structs.replace(drifted, num_digest_failures=7)
        second.transfers = msgspec.json.encode(late)
        await alerts_of(running, AlertName.LINK_DRIFT, "pending")  # it was looked at
        second.transfers = msgspec.json.encode(structs.replace(late, num_digest_failures=8))
        (found,) = await alerts_of(running, AlertName.DIGEST_FAILURES, "firing")
        assert found["value"] == 1

    run(scenario, alerts=AlertsSection(interval_s=0.1), decodes=[server])


def test_missed_targets_burn_the_budget_and_the_webhook_has_it():
    receiver = Receiver()

    async def main() -> None:
        async with receiver as url, asyncio.timeout(30):
            targets = {MODEL: Targets(ttft_s=1e-9)}
            section = AlertsSection(interval_s=0.1, webhook_url=url)
            async with cluster(targets=targets, alerts=section) as running:
                _, page = await running.get_json("/alerts")
                assert page["alerts"] == []
                assert "BatonBurnRateFast" not in page["not_evaluated"]
                assert "BatonLinkDrift" in page["not_evaluated"]
                for _ in range(MIN_ENDED):
                    async with running.post(STREAM) as response:
                        assert response.status == 200
                        await response.read()
                (found,) = await alerts_of(running, AlertName.BURN_RATE_FAST, "firing")
                assert found["labels"] == {"model": MODEL, "objective": "ttft"}
                assert found["value"] == pytest.approx(20)
                missed = await running.metric("baton_gateway_target_misses_total")
                assert missed == MIN_ENDED
                await until(lambda: receiver.bodies)

    asyncio.run(main())
    names = {each["labels"]["alertname"] for body in receiver.bodies for each in body["alerts"]}
    assert names == {"BatonBurnRateFast", "BatonBurnRateSlow"}


def test_others_on_the_network_do_not_see_the_page():
    async def scenario(running: Cluster) -> None:
        status, _ = await running.get_json("/alerts")
        assert status == 404

    run(scenario, management_port=0, wait=False)


def test_metrics_of_the_gateway_that_prometheus_rules_name_exist():
    rules = yaml.safe_load(RULES.read_text("utf-8"))["groups"][0]["rules"]
    named = {name for rule in rules for name in re.findall(r"\bbaton_\w+", rule["expr"])}
    of_gateway = {name for name in named if not name.startswith(("baton_handoff_", "baton_link_"))}

    async def scenario(running: Cluster) -> None:
        async with running.client.get(running.url + "/metrics") as response:
            text = await response.text()
        assert of_gateway <= set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))

    assert len(of_gateway) >= 4
    run(scenario, policy="prefix")  # others predict nothing
