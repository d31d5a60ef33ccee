"""Which transport carries a transfer: the cheapest predicted one, without flip-flop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.transfer.links.model import LinkModel
    from baton.transfer.links.shape import SizeClass, TransferShape

ChoiceRule: TypeAlias = Literal["measured", "listed"]
"""By the models, or simply the first that is listed."""

MARGIN: Final = 0.05
"""A new one must be so much cheaper than the last one chosen for such a transfer."""


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
        return next(p.seconds for p in self.predictions if p.transport == self.used)

    @property
    def is_mismatch(self) -> bool:
        """Whether a better way was there and could not be gone."""
        return self.expected != self.used


@dataclass(slots=True)
class Chooser:
    """Chooses among the links to one peer, in one direction. Owner: the agent's thread.

    Remembers its last choice for each class of shapes (powers of two of bytes and of bytes a
    descriptor): noise of a few percent does not move transfers to and fro.
    """

    rule: ChoiceRule
    _last: dict[SizeClass, str] = field(default_factory=dict)

    def choose(
        self, shape: TransferShape, models: Mapping[str, LinkModel], usable: Sequence[str]
    ) -> Choice | None:
        """The choice for one transfer; None if nothing is usable.

        `models` has every link in common, in the order in which they are listed; `usable` are those
        that can be gone now.
        """
        predictions = tuple(
            Prediction(kind, model.predict(shape), model.is_measured)
            for kind, model in models.items()
        )
        if not usable:
            return None
        kind_of = shape.size_class
        expected = self._pick(predictions, self._last.get(kind_of))
        self._last[kind_of] = expected
        usable_ones = tuple(p for p in predictions if p.transport in usable)
        used = self._pick(usable_ones, expected)
        return Choice(shape, expected, used, predictions)

    def _pick(self, predictions: Sequence[Prediction], last: str | None) -> str:
        if self.rule == "listed":
            return predictions[0].transport
        best = min(predictions, key=lambda p: p.seconds)  # the first listed, of equals
        incumbent = next((p for p in predictions if p.transport == last), best)
        stays = best.seconds > incumbent.seconds * (1 - MARGIN)
        return incumbent.transport if stays else best.transport
