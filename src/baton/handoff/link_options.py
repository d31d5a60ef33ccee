"""How an agent chooses among the links to a peer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.transfer.links.probes import ProbeBounds

if TYPE_CHECKING:
    from baton.transfer.links.choice import ChoiceRule


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """The rule, and the bounds of measuring, for each peer and direction.

    By rule "listed" nothing is measured, and the first transport that works carries everything.
    """

    rule: ChoiceRule = "measured"
    bounds: ProbeBounds = field(default_factory=ProbeBounds)
