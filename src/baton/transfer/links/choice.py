"""Which transport carries a transfer: the cheapest predicted one, without flip-flop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from baton.transfer.links.comparison import compare
from baton.transfer.links.model import NUM_REMEMBERED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from baton.transfer.links.model import LinkModel
    from baton.transfer.links.shape import SizeClass, TransferShape

ChoiceRule: TypeAlias = Literal["measured", "listed"]
"""By the models, or simply the first that is listed."""

MARGIN: Final = 0.05
"""A new one must be so much cheaper than the last one chosen for such a transfer."""
MIN_HALF_LIFE_TRANSFERS: Final = 16
MAX_HALF_LIFE_TRANSFERS: Final = 1024
"""Transfers of a class after which what a link taught there counts half, while others carry them.
Doubled each time that it is left: a link that stays slow is tried ever more seldom."""

NUM_TO_REPLACE: Final = NUM_REMEMBERED // 2 + 1
"""Transfers that turn the median of what a link taught."""
MAX_AGE: Final = 6.0
"""Half-lives: what was learnt never counts for less than a 64th."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one transport would take. `is_measured` is false of a prior."""

    transport: str
    seconds: float
    is_measured: bool


@dataclass(frozen=True, slots=True)
class Choice:
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
    which one is known better than the other: `comparison.py`.
    """

    rule: ChoiceRule
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
        expected = used = self._pick(predictions, last)
        self._last[kind_of] = expected
        if expected not in usable:
            used = self._pick([p for p in predictions if p.transport in usable], expected)
        _remember(histories, models, used, left=last if last != expected else None)
        return Choice(shape, expected, used, tuple(predictions))

    def _pick(self, predictions: Sequence[Prediction], last: str | None) -> str:
        best = predictions[0]
        if self.rule == "listed":
            return best.transport
        for each in predictions:
            if each.seconds < best.seconds:  # the first listed, of equals
                best = each
        incumbent = best
        for each in predictions:
            if each.transport == last:
                incumbent = each
        stays = best.seconds > incumbent.seconds * (1 - MARGIN)
        return incumbent.transport if stays else best.transport


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
