"""Evaluates the alerts every `alerts.interval_s`; reports changes: log, metric, webhook."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Self

from prometheus_client import CollectorRegistry, Gauge

from baton.gateway.alerts.lifecycle import AlertLifecycle, Followed
from baton.gateway.alerts.rules import SEVERITIES, TIMINGS, AlertRules
from baton.gateway.alerts.webhook import Webhook
from baton.protocol.alerts import Alert, AlertList, AlertName, AlertState

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.config.sections import AlertsSection
    from baton.gateway.alerts.sources import AlertSources

SHOWN_FOR_S: Final = 3600.0
"""For how long a resolved alert is on the page."""
CLOCK_STEP_S: Final = 1.0
"""By so much the machine's wall clock was set; less is what two readings differ by."""

log = logging.getLogger(__name__)


class AlertMonitor:
    """An asynchronous context manager: it evaluates within. Owner: the event loop's thread."""

    def __init__(
        self,
        options: AlertsSection,
        sources: AlertSources,
        registry: CollectorRegistry,
        clock: Clock,
    ) -> None:
        self._options, self._sources, self._clock = options, sources, clock
        self._rules = AlertRules(options)
        self._lifecycle = AlertLifecycle(TIMINGS)
        self._webhook = Webhook(options.webhook_url, registry) if options.webhook_url else None
        self._tasks: list[asyncio.Task[None]] = []
        self._to_unix_s = clock.unix_now() - clock.now()
        firing = Gauge(
            "baton_alert_firing",
            "Sets of labels with which an alert is firing; docs/observability/alerts.md.",
            ("alert",),
            registry=registry,
        )
        self._firing = {name: firing.labels(name) for name in AlertName}

    async def __aenter__(self) -> Self:
        """Begin to evaluate."""
        self._tasks.append(asyncio.create_task(self._run()))
        if self._webhook is not None:
            self._tasks.append(asyncio.create_task(self._webhook.run()))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Evaluate no more; what the webhook has not posted yet is lost."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def evaluate(self) -> None:
        """Look at everything once."""
        now = self._clock.now()
        conditions = self._rules.evaluate(self._sources.observe(), now)
        changed = [self._show(each) for each in self._lifecycle.apply(conditions, now)]
        for name, gauge in self._firing.items():
            gauge.set(self._lifecycle.num_firing(name))
        for alert in changed:
            _log(alert)
        if self._webhook is not None:
            self._webhook.submit(changed)

    def show(self) -> AlertList:
        """What `GET /alerts` answers."""
        now = self._clock.now()
        lately = [
            each
            for each in reversed(self._lifecycle.resolved)
            if each.ended_at is not None and now - each.ended_at < SHOWN_FOR_S
        ]
        disabled = dict.fromkeys(self._options.disabled, "disabled by alerts.disabled")
        return AlertList(
            alerts=tuple(self._show(each) for each in (*self._lifecycle.followed, *lately)),
            not_evaluated={**self._sources.explain_missing(), **disabled},
            num_dropped=self._lifecycle.num_dropped,
        )

    async def _run(self) -> None:
        while True:
            try:
                self.evaluate()
            except Exception:
                log.exception("alerts were not evaluated; trying again")
            await asyncio.sleep(self._options.interval_s)

    def _find_offset(self) -> float:
        """From the monotonic clock to Unix time: an alert began when it was shown to have begun."""
        offset_s = self._clock.unix_now() - self._clock.now()
        if abs(offset_s - self._to_unix_s) > CLOCK_STEP_S:
            self._to_unix_s = offset_s
        return self._to_unix_s

    def _show(self, followed: Followed) -> Alert:
        condition, to_unix = followed.condition, self._find_offset()
        return Alert(
            alert=condition.alert,
            state=followed.state,
            severity=SEVERITIES[condition.alert],
            labels=dict(condition.labels),
            summary=condition.summary,
            value=condition.value,
            starts_at=followed.since + to_unix,
            ends_at=None if followed.ended_at is None else followed.ended_at + to_unix,
            runbook_url=f"{self._options.runbook_url}#{condition.alert.lower()}",
        )


def _log(alert: Alert) -> None:
    if alert.state is AlertState.FIRING:
        log.warning("alert %s: %s; see %s", alert.alert, alert.summary, alert.runbook_url)
    else:
        labels = ", ".join(f"{name}={value}" for name, value in alert.labels.items())
        log.info("alert %s is resolved%s", alert.alert, f" ({labels})" if labels else "")
