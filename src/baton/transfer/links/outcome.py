"""What is recorded of choices and transfers, for whoever counts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from baton.transfer.links.choice import Choice
    from baton.transfer.links.model import LinkModel

Direction: TypeAlias = Literal["push", "pull"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A period from the first transfer over an idle link to the last one's end.

    `predicted_s` is the sum of what was predicted of each. `refined` says whether the time tells
    something about the link: not where it went by in submitting.
    """

    transport: str
    direction: Direction
    num_transfers: int
    num_bytes: int
    predicted_s: float
    observed_s: float
    refined: bool


class LinkObserver(Protocol):
    """Called by the agent's thread; must not block."""

    def chosen(self, direction: Direction, choice: Choice) -> None:
        """A transfer goes over `choice.used`."""
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


class NullObserver:
    """Counts nothing."""

    def chosen(self, direction: Direction, choice: Choice) -> None:
        """See `LinkObserver`."""

    def carried(self, outcome: Outcome) -> None:
        """See `LinkObserver`."""

    def failed(self, direction: Direction, transport: str) -> None:
        """See `LinkObserver`."""

    def measured(self, direction: Direction, transport: str, model: LinkModel) -> None:
        """See `LinkObserver`."""
