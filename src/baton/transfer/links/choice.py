"""Which transport carries a transfer: the cheapest predicted one, with hysteresis and backoff.

Links are compared on an equal base. Probes run on memory that caches hold, requests do not: for
some shapes all links are slower than probed, by much the same factor. Only the link that carries
such transfers measures that. If it alone were corrected, it would lose to whichever link was not
used yet. So the correction that one link measured is, up to a plausible limit, also applied to
links without transfers of that shape; beyond the limit, it is that link's own.

Old measurements (`freshness`) lose weight against the probe: a link that was left during a burst
of load does not stay slow in the model without limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

from baton.clock import Instant
from baton.record import Record
from baton.transfer.links.cost_model import NUM_REMEMBERED, LinkModel, SizeClass, TransferShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from baton.telemetry.transfers import Direction, Outcome, PeerSegments, TransferTime

MIN_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 60.0
_LONG_AGO: Final = Instant(0.0)


@dataclass(slots=True)
class Backoff:
    """One link's failures in a row."""

    num_failures: int = 0
    until: Instant = _LONG_AGO

    def record_failure(self, now: Instant) -> float:
        """One more failure: for how many seconds it cools."""
        delay_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0**self.num_failures)
        self.num_failures = min(self.num_failures + 1, 16)
        self.until = Instant(now + delay_s)
        return delay_s

    def record_success(self) -> None:
        """It carried something: the next failure is a first one."""
        self.num_failures = 0

    def is_over(self, now: Instant) -> bool:
        """Whether it may be tried again."""
        return now >= self.until


class LinkObserver(Protocol):
    """Called by the agent's thread; must not block."""

    def chosen(self, direction: Direction, choice: Choice) -> None:
        """A transfer goes over `choice.used`."""
        ...

    def transferred(self, transfer: TransferTime) -> None:
        """A transfer succeeded."""
        ...

    def carried(self, outcome: Outcome) -> None:
        """A link carried what it was given."""
        ...

    def failed(self, direction: Direction, transport: str) -> None:
        """A transport failed in the middle of a handoff, and another one takes over."""
        ...

    def measured(self, direction: Direction, transport: str, model: LinkModel) -> None:
        """A link was probed: its measured cost."""
        ...

    def sent(self, transport: str, segments: Sequence[PeerSegments]) -> None:
        """What the kernel sent over a transport that counts it; every few seconds, if only ()."""
        ...


class NullObserver:
    """Counts nothing."""

    def chosen(self, direction: Direction, choice: Choice) -> None:
        """See `LinkObserver`."""

    def transferred(self, transfer: TransferTime) -> None:
        """See `LinkObserver`."""

    def carried(self, outcome: Outcome) -> None:
        """See `LinkObserver`."""

    def failed(self, direction: Direction, transport: str) -> None:
        """See `LinkObserver`."""

    def measured(self, direction: Direction, transport: str, model: LinkModel) -> None:
        """See `LinkObserver`."""

    def sent(self, transport: str, segments: Sequence[PeerSegments]) -> None:
        """See `LinkObserver`."""


MAX_COMMON: Final = math.log(1.3)
"""By how much the probes may be off for a shape, whichever the link."""


def compare(
    shape: TransferShape, models: Mapping[str, LinkModel], freshness: Mapping[str, float]
) -> dict[str, float]:
    """Seconds that each link is expected to take.

    `freshness[link]`, 0 to 1: how much of what it was taught for such shapes still counts.
    """
    kind = shape.size_class
    corrections: dict[str, tuple[float, float]] = {}
    sum_of_weights = common = 0.0
    for link, model in models.items():
        if not model.num_probes:
            continue
        learnt = model.correction(kind)
        log_ratio, trust = learnt.log_ratio, learnt.trust
        weight = trust * freshness[link]
        sum_of_weights += weight
        common += weight * log_ratio
        # One late transfer does not make a link a slow one: it may have waited for something else.
        corrections[link] = log_ratio, freshness[link] if trust == 1.0 else 0.0
    common = min(MAX_COMMON, max(-MAX_COMMON, common / (sum_of_weights or 1.0)))
    expected: dict[str, float] = {}
    for link, model in models.items():
        own, known = corrections.get(link, (0.0, 1.0))
        correction = known * own + (1 - known) * common
        expected[link] = model.predict_uncorrected(shape) * math.exp(correction)
    return expected


ChoiceRule: TypeAlias = Literal["measured", "listed"]
"""By the models, or simply the first that is listed."""

MARGIN: Final = 0.05
"""A new one must be so much cheaper than the last one chosen for such a transfer."""
LOCAL_GAIN: Final = 2.0
"""What reaches beyond the host must be so many times as fast as what does not, to be chosen where
both work: it takes the CPU of both sides, which no clock shows; and a busy host blurs small times.
"""
MIN_HALF_LIFE_TRANSFERS: Final = 16
MAX_HALF_LIFE_TRANSFERS: Final = 1024
"""Transfers of a class after which what a link taught there counts half, while others carry them.
Doubled each time that it is left: a link that stays slow is tried ever more seldom."""

NUM_TO_REPLACE: Final = NUM_REMEMBERED // 2 + 1
"""Transfers that turn the median of what a link taught."""
MAX_AGE: Final = 6.0
"""Half-lives: what was learnt never counts for less than a 64th."""


class Prediction(Record, frozen=True):
    """What one transport would take. `is_measured` is false of a prior."""

    transport: str
    seconds: float
    is_measured: bool


class Choice(Record, frozen=True):
    """`expected` is the best of all that both workers have; `used` the best of those that work.

    `predictions` has all of them, in the order in which they are listed.
    """

    shape: TransferShape
    expected: str
    used: str
    predictions: tuple[Prediction, ...]

    @property
    def predicted_s(self) -> float:
        """What the used one is predicted to take."""
        for each in self.predictions:
            if each.transport == self.used:
                return each.seconds
        raise AssertionError(f"{self.used} was chosen without a prediction")

    @property
    def is_mismatch(self) -> bool:
        """Whether a better way was there and could not be gone."""
        return self.expected != self.used


@dataclass(slots=True)
class _LinkHistory:
    """One link, for one class of shapes: since when others have carried them."""

    age: float = 0.0
    half_life: int = MIN_HALF_LIFE_TRANSFERS
    _younger: float = 0.0
    """By how much each transfer makes it younger, once it carries them again."""

    @property
    def freshness(self) -> float:
        return float(0.5**self.age)

    def carried(self) -> None:
        """What it teaches now replaces what is old by and by, whatever the age was."""
        self.age = max(0.0, self.age - self._younger)

    def was_passed_over(self) -> None:
        self.age = min(MAX_AGE, self.age + 1 / self.half_life)
        self._younger = self.age / NUM_TO_REPLACE


@dataclass(slots=True)
class Chooser:
    """Chooses among the links to one peer, in one direction. Owner: the agent's thread.

    Remembers its last choice for each class of shapes (powers of two of bytes and of bytes a
    descriptor): noise of a few percent does not move transfers to and fro. How it compares links of
    which one is known better than the other: `compare`. `local` are links within this host.
    """

    rule: ChoiceRule
    local: frozenset[str] = frozenset()
    _last: dict[SizeClass, str] = field(default_factory=dict)
    _histories: dict[SizeClass, dict[str, _LinkHistory]] = field(default_factory=dict)

    def choose(
        self, shape: TransferShape, models: Mapping[str, LinkModel], usable: Sequence[str]
    ) -> Choice | None:
        """The choice for one transfer; None if nothing is usable.

        `models` has every link in common, in the order in which they are listed; `usable` are those
        that can be gone now.
        """
        if not usable:
            return None
        kind_of = shape.size_class
        histories = self._histories.setdefault(kind_of, {})
        freshness: dict[str, float] = {}
        for kind in models:
            if kind not in histories:
                histories[kind] = _LinkHistory()
            freshness[kind] = histories[kind].freshness
        seconds = compare(shape, models, freshness)
        predictions: list[Prediction] = []
        for kind, model in models.items():
            predictions.append(Prediction(kind, seconds[kind], model.is_measured))
        last = self._last.get(kind_of)
        local = self.local.intersection(usable)
        expected = used = self._pick(predictions, last, local)
        self._last[kind_of] = expected
        if expected not in usable:
            used = self._pick([p for p in predictions if p.transport in usable], expected, local)
        _remember(histories, models, used, left=last if last != expected else None)
        return Choice(shape, expected, used, tuple(predictions))

    def _pick(
        self, predictions: Sequence[Prediction], last: str | None, local: frozenset[str]
    ) -> str:
        if self.rule == "listed":
            return predictions[0].transport
        costs = {
            each.transport: each.seconds / (LOCAL_GAIN if each.transport in local else 1.0)
            for each in predictions
        }
        best = min(costs, key=costs.__getitem__)  # the first listed, of equals
        if last is None or last not in costs:
            return best
        return last if costs[best] > costs[last] * (1 - MARGIN) else best


def _remember(
    histories: Mapping[str, _LinkHistory], among: Iterable[str], used: str, left: str | None
) -> None:
    """One more transfer of a class: what carried it, and what was left for that."""
    for kind in among:
        history = histories[kind]
        if kind == used:
            history.carried()
        else:
            history.was_passed_over()
        if kind == left:
            history.half_life = min(2 * history.half_life, MAX_HALF_LIFE_TRANSFERS)
