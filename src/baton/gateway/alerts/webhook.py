"""Alerts posted to a URL, as Alertmanager posts them (its webhook payload, version 4).

submit ──► queue of at most MAX_QUEUED ──► POST ──► sent
           (the oldest is dropped)          └─ error, 429, 5xx: again after 1, 2, 4, 8 s ─► failed
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from datetime import UTC, datetime
from hashlib import sha256
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Literal

import aiohttp
import msgspec
from prometheus_client import CollectorRegistry, Counter
from yarl import URL

from baton.protocol.alerts import Alert, AlertState

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_QUEUED: Final = 64
POST_TIMEOUT_S: Final = 5.0
RETRY_DELAYS_S: Final = (1.0, 2.0, 4.0, 8.0)
RECEIVER: Final = "baton"
NOT_ENDED: Final = "0001-01-01T00:00:00Z"
"""Alertmanager's `endsAt` of an alert that is firing."""
RESULTS: Final = ("sent", "failed", "dropped")

log = logging.getLogger(__name__)


class PostedAlert(msgspec.Struct, frozen=True, rename="camel"):
    """One alert, in Alertmanager's words."""

    status: Literal["firing", "resolved"]
    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: str
    ends_at: str
    generator_url: str = msgspec.field(name="generatorURL", default="")
    fingerprint: str = ""


class Notification(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The body of one POST."""

    version: Literal["4"] = "4"
    group_key: str
    truncated_alerts: int = 0
    status: Literal["firing", "resolved"]
    receiver: str = RECEIVER
    group_labels: dict[str, str] = {}
    common_labels: dict[str, str] = {}
    common_annotations: dict[str, str] = {}
    external_url: str = msgspec.field(name="externalURL", default="")
    alerts: tuple[PostedAlert, ...]


def make_notification(alerts: Sequence[Alert]) -> Notification:
    """Of alerts that began to fire, or were resolved; at least one."""
    posted = tuple(_post(each) for each in alerts)
    labels = [each.labels for each in posted]
    is_firing = any(each.status == "firing" for each in posted)
    return Notification(
        group_key="{}:{}",
        status="firing" if is_firing else "resolved",
        common_labels={
            name: value
            for name, value in labels[0].items()
            if all(each.get(name) == value for each in labels)
        },
        alerts=posted,
    )


def _post(alert: Alert) -> PostedAlert:
    labels = {"alertname": str(alert.alert), "severity": alert.severity, **alert.labels}
    key = "\xff".join(f"{name}\xff{value}" for name, value in sorted(labels.items()))
    return PostedAlert(
        status="resolved" if alert.state is AlertState.RESOLVED else "firing",
        labels=labels,
        annotations={"summary": alert.summary, "runbook_url": alert.runbook_url},
        starts_at=_format(alert.starts_at),
        ends_at=NOT_ENDED if alert.ends_at is None else _format(alert.ends_at),
        fingerprint=sha256(key.encode()).hexdigest()[:16],
    )


def _format(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


class Webhook:
    """Posts notifications one after the other. Owner: the event loop's thread."""

    def __init__(self, url: str, registry: CollectorRegistry) -> None:
        self._url = URL(url)
        # Its path and query may be secrets.
        self._shown = f"{self._url.scheme}://{self._url.authority.rpartition('@')[2]}"
        self._queue: deque[bytes] = deque()
        self._has_some = asyncio.Event()
        notifications = Counter(
            "baton_alert_notifications",
            "Notifications for the webhook of alerts, by what became of them.",
            ("result",),
            registry=registry,
        )
        self._counts = {result: notifications.labels(result) for result in RESULTS}

    def submit(self, alerts: Sequence[Alert]) -> None:
        """Post these later. Never blocks: without room, the oldest notification is dropped."""
        if not alerts:
            return
        if len(self._queue) >= MAX_QUEUED:
            self._queue.popleft()
            self._counts["dropped"].inc()
        self._queue.append(msgspec.json.encode(make_notification(alerts)))
        self._has_some.set()

    async def run(self) -> None:
        """Post what is submitted, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=POST_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await self._has_some.wait()
                self._has_some.clear()
                while self._queue:
                    await self._deliver(session, self._queue.popleft())

    async def _deliver(self, session: aiohttp.ClientSession, body: bytes) -> None:
        problem = ""
        for delay_s in (*RETRY_DELAYS_S, None):
            problem, may_retry = await self._post(session, body)
            if not problem:
                self._counts["sent"].inc()
                return
            if delay_s is None or not may_retry:
                break
            await asyncio.sleep(delay_s)
        self._counts["failed"].inc()
        log.warning(
            "alerts: a notification was not delivered to %s: %s; check alerts.webhook_url, "
            "GET /alerts has the alerts",
            self._shown,
            problem,
        )

    async def _post(self, session: aiohttp.ClientSession, body: bytes) -> tuple[str, bool]:
        """What went wrong ("": nothing), and whether another attempt may help."""
        headers = {"content-type": "application/json"}
        try:
            async with session.post(
                self._url, data=body, headers=headers, allow_redirects=False
            ) as response:
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            return f"{type(exc).__name__}", True
        if HTTPStatus(200) <= status < HTTPStatus(300):
            return "", False
        is_temporary = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return f"HTTP {status}", is_temporary or status == HTTPStatus.TOO_MANY_REQUESTS
