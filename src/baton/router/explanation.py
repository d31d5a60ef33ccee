"""Why a policy chooses as it does: every candidate for a request, with what is compared of it.

An explanation is made on a copy of the policy, so that no turn is taken. The load is not copied: of
a large fleet that would take seconds, and placement only reads it, but for the row of a worker that
it has not asked about before. Whoever is chosen there is who `place` would choose now.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

from baton.errors import BatonError
from baton.router.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.ids import WorkerId
    from baton.router.fleet import Fleet, ModelWorkers, WorkerView
    from baton.router.load import FleetLoad
    from baton.router.placement import PlacementPolicy, PlacementRequest, Unplaceable

Part: TypeAlias = Literal["request", "prefill", "decode"]


class NotExplainableError(BatonError):
    """A policy's state cannot be copied."""


@dataclass(frozen=True, slots=True)
class ExplainedCandidate:
    """One way to serve a request, or one of its parts where a policy chooses them one by one.

    Of a whole request `prefill` None is the decode worker alone. `figures` by name, units in the
    names; the first is what is compared, the least is best, and others are what it is made of.
    `why_not`: why it cannot be chosen now. `num_prefix_tokens` as in `Placement`.
    """

    part: Part
    prefill: WorkerId | None
    decode: WorkerId | None
    figures: Mapping[str, float] = field(default_factory=dict)
    why_not: str | None = None
    num_prefix_tokens: int = 0

    def is_chosen(self, placement: Placement | Unplaceable) -> bool:
        """Whether it is this placement, or its part."""
        if self.why_not is not None or not isinstance(placement, Placement):
            return False
        prefill = None if placement.prefill is None else placement.prefill.id
        match self.part:
            case "request":
                return (self.prefill, self.decode, self.num_prefix_tokens) == (
                    prefill,
                    placement.decode.id,
                    placement.num_prefix_tokens,
                )
            case "prefill":
                return self.prefill == prefill
            case "decode":
                return self.decode == placement.decode.id


@dataclass(frozen=True, slots=True)
class Explanation:
    """Candidates from the best on, those that cannot be chosen last; and what would be chosen."""

    candidates: tuple[ExplainedCandidate, ...]
    placement: Placement | Unplaceable


@runtime_checkable
class ExplainingPolicy(Protocol):
    """A `PlacementPolicy` that lists its candidates."""

    def explain(
        self, fleet: Fleet, request: PlacementRequest, load: FleetLoad
    ) -> list[ExplainedCandidate]:
        """All candidates, from the best on. It may change the policy, which is a copy."""
        ...


def explain(
    policy: PlacementPolicy, fleet: Fleet, request: PlacementRequest, load: FleetLoad
) -> Explanation:
    """What a policy would compare and choose for a request now. Changes nothing of the policy.

    Of a policy that lists no candidates these are the usable workers, without figures.

    Raises:
        NotExplainableError: the policy cannot be copied.
    """
    try:
        policy = deepcopy(policy, {id(load): load})
    except TypeError as exc:  # it holds a lock, a file or the like
        raise NotExplainableError(
            f"the policy {type(policy).__name__} cannot be explained: its state cannot be copied "
            f"({exc})"
        ) from exc
    if isinstance(policy, ExplainingPolicy):
        candidates = policy.explain(fleet, request, load)
    else:
        candidates = list_decodes(fleet.models.get(request.model), request)
    possible = [each for each in candidates if each.why_not is None]
    others = [each for each in candidates if each.why_not is not None]
    placement = policy.place(fleet, request, load)
    return Explanation((*possible, *others), placement)


def list_decodes(
    served: ModelWorkers | None, request: PlacementRequest, part: Part = "request"
) -> list[ExplainedCandidate]:
    """The workers that answer requests, and why some may not."""
    if served is None:
        return []
    return [
        ExplainedCandidate(part, None, worker.id, why_not=why_unusable(worker, request))
        for worker in served.decodes
    ]


def why_unusable(worker: WorkerView, request: PlacementRequest) -> str | None:
    """Why a worker may have no part in a request; None if it may."""
    if worker.id in request.avoid:
        return "has just failed this request"
    return None if worker.available else "is not available"
