"""`GET /alerts` of a gateway: names of alerts, and the page (docs/observability/alerts.md)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

MAX_ALERTS: Final = 512
"""On the page."""

Severity: TypeAlias = Literal["warning", "critical"]


class AlertName(StrEnum):
    """Each alert, by the name that Prometheus' rules (deploy/prometheus) give it too."""

    LINK_DRIFT = "BatonLinkDrift"
    DISTANCE_DRIFT = "BatonDistanceDrift"
    LINK_LOSS = "BatonLinkLoss"
    TRANSPORT_MISMATCH = "BatonTransportMismatch"
    INVERTED_DISTANCE = "BatonInvertedDistance"
    DIGEST_FAILURES = "BatonDigestFailures"
    LEASES_LAPSED = "BatonLeasesLapsed"
    PREFIX_PREDICTION = "BatonPrefixPrediction"
    STORE_SLOWER = "BatonStoreSlower"
    BURN_RATE_FAST = "BatonBurnRateFast"
    BURN_RATE_SLOW = "BatonBurnRateSlow"


class AlertState(StrEnum):
    """`PENDING`: its condition has not held for long enough. `RESOLVED`: it was firing."""

    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert with one set of labels. Times are Unix seconds.

    `value` is what is compared with the threshold that docs/observability/alerts.md names.
    `ends_at` is None unless it is resolved.
    """

    alert: AlertName
    state: AlertState
    severity: Severity
    labels: dict[str, str]
    summary: str
    value: float
    starts_at: float
    ends_at: float | None = None
    runbook_url: str = ""


class AlertList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `GET /alerts`: firing ones first, then pending, then those resolved lately.

    `not_evaluated`: alerts that this gateway does not evaluate now, and why. `num_dropped`: label
    sets that were not followed, as there were too many.
    """

    alerts: Annotated[tuple[Alert, ...], Meta(max_length=MAX_ALERTS)]
    not_evaluated: dict[str, str] = {}
    num_dropped: int = 0
