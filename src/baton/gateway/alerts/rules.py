"""Which alerts' conditions hold, by what a gateway sees. Pure: times are given.

docs/observability/alerts.md has a section for each rule: what it means, and what to do.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.gateway.alerts.lifecycle import Condition, Timing
from baton.gateway.alerts.link_loss import LinkLossRule
from baton.gateway.alerts.windows import BudgetWindow, GrowthWindow
from baton.protocol.alerts import AlertName, Severity
from baton.telemetry.transfer_report import DISTANCES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from baton.config.sections import AlertsSection
    from baton.gateway.alerts.observations import (
        EndedByTarget,
        HandoffPath,
        LinkTimes,
        Observations,
    )

RECENT_S: Final = 30.0
NEAR_DISTANCES: Final = DISTANCES[:2]
"""Of workers on one host."""
NETWORK_TRANSPORT: Final = "tcp"
SAME_HOST_TRANSPORTS: Final = frozenset({"shared", "cuda_ipc", "local"})
COUNTER_WINDOW_S: Final = 300.0
PREFIX_WINDOW_S: Final = 600.0
MIN_PREDICTED_TOKENS: Final = 4096
"""Within `PREFIX_WINDOW_S`, below which nothing is concluded."""
MIN_CLASS_LINKS: Final = 2


class BurnLimit(NamedTuple):
    """A burn rate, and the two windows in both of which it must be reached.

    A rate is 1 / `allowed_share` at most, where all requests miss: that can be less than
    `usual_rate`. The limit is then `part` of the way from 1, the budget, to that.
    """

    usual_rate: float
    part: float
    short_s: float
    long_s: float

    def rate(self, allowed_share: float) -> float:
        """The limit where so many requests may miss their target."""
        return min(self.usual_rate, 1.0 + self.part * (1.0 / allowed_share - 1.0))


FAST_BURN: Final = BurnLimit(14.4, 0.75, 300.0, 3600.0)
"""2 % of a month's budget in an hour, and whether that still goes on."""
SLOW_BURN: Final = BurnLimit(6.0, 0.3, 1800.0, 21_600.0)
"""5 % of a month's budget in six hours."""
MIN_ENDED: Final = 20
"""Requests in the shorter window, below which a burn rate is not known."""

TIMINGS: Final[Mapping[AlertName, Timing]] = {
    AlertName.LINK_DRIFT: Timing(for_s=10.0, keep_s=30.0),
    AlertName.DISTANCE_DRIFT: Timing(for_s=30.0, keep_s=30.0),
    AlertName.LINK_LOSS: Timing(for_s=10.0, keep_s=30.0),
    AlertName.TRANSPORT_MISMATCH: Timing(keep_s=300.0),
    AlertName.INVERTED_DISTANCE: Timing(for_s=60.0, keep_s=60.0),
    AlertName.PREFIX_PREDICTION: Timing(for_s=60.0, keep_s=60.0),
    AlertName.STORE_SLOWER: Timing(for_s=60.0, keep_s=60.0),
    AlertName.BURN_RATE_FAST: Timing(keep_s=60.0),
    AlertName.BURN_RATE_SLOW: Timing(keep_s=300.0),
}
"""Of those that are not here: at once, and over at once (their windows are long enough)."""

SEVERITIES: Final[Mapping[AlertName, Severity]] = {
    name: "critical" if name in {AlertName.DIGEST_FAILURES, AlertName.BURN_RATE_FAST} else "warning"
    for name in AlertName
}


class AlertRules:
    """The rules, and the windows that some of them look at. Owner: one thread."""

    def __init__(self, options: AlertsSection) -> None:
        self._options = options
        self._link_loss = LinkLossRule(options.link_loss_share)
        self._digest_failures = GrowthWindow(COUNTER_WINDOW_S)
        self._lapsed_leases = GrowthWindow(COUNTER_WINDOW_S)
        self._predicted = GrowthWindow(PREFIX_WINDOW_S)
        self._found = GrowthWindow(PREFIX_WINDOW_S)
        self._num_by_path: dict[tuple[str, str, str], int] = {}
        self._budgets: dict[tuple[str, str], BudgetWindow] = {}

    def evaluate(self, seen: Observations, now: float) -> list[Condition]:
        """Conditions that hold; those that the operator has disabled are left out."""
        disabled = set(self._options.disabled)
        found = [
            *_drifted_links(seen.links),
            *_drifted_distances(seen.links),
            *self._link_loss.evaluate(seen.segments, now),
            *self._mismatches(seen),
            *self._inverted_distances(seen),
            *self._counters(seen, now),
            *self._prefix_prediction(seen, now),
            *self._slow_stores(seen),
            *self._burn_rates(seen.ended, now),
        ]
        return [each for each in found if each.alert not in disabled]

    def _mismatches(self, seen: Observations) -> Iterator[Condition]:
        before, self._num_by_path = self._num_by_path, {}
        for path in seen.paths:
            key = path.source, path.target, path.used
            is_used = path.num > before.get(key, 0)
            self._num_by_path[key] = max(path.num, self._num_by_path.get(key, 0))
            if path.mismatch_s_ago is not None and path.mismatch_s_ago <= RECENT_S:
                expected, why = path.expected, "the log of the worker that sent it has the reason"
            elif is_used and _is_silent_tcp(path):
                expected, why = "shared", "they are on one host, and have no transport for that"
            else:
                continue
            yield Condition(
                AlertName.TRANSPORT_MISMATCH,
                (
                    ("expected", expected),
                    ("from", path.source),
                    ("to", path.target),
                    ("used", path.used),
                ),
                f"KV from {path.source} to {path.target} goes over {path.used}, not {expected}: "
                f"{why}",
                1.0,
            )

    def _inverted_distances(self, seen: Observations) -> Iterator[Condition]:
        ordered = sorted(seen.classes, key=lambda each: (each.model, each.distance))
        for near, far in combinations(ordered, 2):
            if near.model != far.model or near.distance == far.distance:
                continue
            ratio = near.seconds / far.seconds
            if ratio >= self._options.inversion_ratio:
                yield Condition(
                    AlertName.INVERTED_DISTANCE,
                    (
                        ("far", str(far.distance)),
                        ("model", near.model),
                        ("near", str(near.distance)),
                    ),
                    f"links over {near.distance} take {ratio:.1f} times as long as links over "
                    f"{far.distance}",
                    ratio,
                )

    def _counters(self, seen: Observations, now: float) -> Iterator[Condition]:
        num_failures = self._digest_failures.note(seen.num_digest_failures, now)
        if num_failures > 0:
            yield Condition(
                AlertName.DIGEST_FAILURES,
                (),
                f"{num_failures:.0f} transfers within {COUNTER_WINDOW_S:.0f} s arrived with other "
                "bytes than were sent; they were refused and sent again",
                num_failures,
            )
        num_lapsed = self._lapsed_leases.note(seen.num_lapsed_leases, now)
        if num_lapsed >= self._options.lapsed_leases:
            yield Condition(
                AlertName.LEASES_LAPSED,
                (),
                f"{num_lapsed:.0f} leases lapsed within {COUNTER_WINDOW_S:.0f} s: computed prompts "
                "that no decode worker fetched",
                num_lapsed,
            )

    def _prefix_prediction(self, seen: Observations, now: float) -> Iterator[Condition]:
        predicted = self._predicted.note({"": seen.predicted_tokens}, now)
        found = self._found.note({"": seen.found_tokens}, now)
        if predicted < MIN_PREDICTED_TOKENS:
            return
        share = found / predicted
        if share < self._options.prefix_share:
            yield Condition(
                AlertName.PREFIX_PREDICTION,
                (),
                f"workers had {share:.0%} of the {predicted:.0f} prompt tokens that they were "
                f"predicted to have cached, within {PREFIX_WINDOW_S:.0f} s",
                share,
            )

    def _slow_stores(self, seen: Observations) -> Iterator[Condition]:
        for each in seen.stores:
            ratio = each.load_s / max(each.compute_s, 1e-9)
            if ratio >= self._options.store_ratio:
                yield Condition(
                    AlertName.STORE_SLOWER,
                    (("model", each.model), ("worker", each.worker)),
                    f"loading {each.num_tokens} tokens from the store takes {each.load_s:.3f} s, "
                    f"computing them {each.compute_s:.3f} s",
                    ratio,
                )

    def _burn_rates(self, ended: tuple[EndedByTarget, ...], now: float) -> Iterator[Condition]:
        for each in ended:
            key = each.model, each.objective
            budget = self._budgets.get(key)
            if budget is None:
                allowed = 1.0 - self._options.good_share
                budget = self._budgets[key] = BudgetWindow(allowed, SLOW_BURN.long_s)
            budget.note(each.num, each.num_missed, now)
            for alert, limit in (
                (AlertName.BURN_RATE_FAST, FAST_BURN),
                (AlertName.BURN_RATE_SLOW, SLOW_BURN),
            ):
                windows = limit.short_s, limit.long_s
                rates = [budget.burn_rate(window_s, MIN_ENDED, now) for window_s in windows]
                known = [rate for rate in rates if rate is not None]
                if len(known) == len(rates) and min(known) >= limit.rate(budget.allowed_share):
                    yield Condition(
                        alert,
                        (("model", each.model), ("objective", each.objective)),
                        f"{min(known) * budget.allowed_share:.0%} of the requests miss the target "
                        f"of {each.target_s} s for {each.objective}, in the last "
                        f"{limit.short_s / 60:.0f} min and {limit.long_s / 3600:.0f} h",
                        min(known),
                    )


def _is_silent_tcp(path: HandoffPath) -> bool:
    """Whether two workers on one host use the network, as neither was given another transport.

    Where both offer one, the workers compare the two themselves and report a mismatch.
    """
    is_near = path.distance in NEAR_DISTANCES
    has_other = bool(path.in_common & SAME_HOST_TRANSPORTS)
    return is_near and path.used == NETWORK_TRANSPORT and not has_other


def _drifted_links(links: tuple[LinkTimes, ...]) -> Iterator[Condition]:
    for link in links:
        if link.is_drifted:
            yield Condition(
                AlertName.LINK_DRIFT,
                (
                    ("distance", link.distance),
                    ("from", link.source),
                    ("to", link.target),
                    ("transport", link.transport),
                ),
                f"transfers from {link.source} to {link.target} over {link.transport} take "
                f"{link.ratio or 0.0:.1f} times as long as when the link was new",
                link.ratio or 0.0,
            )


def _drifted_distances(links: tuple[LinkTimes, ...]) -> Iterator[Condition]:
    by_distance: defaultdict[str, list[LinkTimes]] = defaultdict(list)
    for link in links:
        if link.ratio is not None:
            by_distance[link.distance].append(link)
    for distance, alike in by_distance.items():
        num_drifted = sum(link.is_drifted for link in alike)
        if num_drifted >= MIN_CLASS_LINKS and 2 * num_drifted > len(alike):
            yield Condition(
                AlertName.DISTANCE_DRIFT,
                (("distance", distance),),
                f"{num_drifted} of {len(alike)} links over {distance} are slower than they were",
                num_drifted / len(alike),
            )
