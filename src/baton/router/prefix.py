"""The policy that sends prompts to where their beginning is cached, unless that worker is busy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec

from baton.registry import Plugin
from baton.router.placement import Unplaceable
from baton.router.simple import RoundRobin

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.ids import WorkerId
    from baton.router.fleet import Fleet, WorkerView
    from baton.router.load import FleetLoad, WorkerActivity
    from baton.router.modes import ModeSetting
    from baton.router.placement import Placement, PlacementRequest, PolicyFactory


class PrefixOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tokens_per_answer`: what an answer under way counts, in tokens of prompts to compute."""

    tokens_per_answer: Annotated[float, msgspec.Meta(ge=0)] = 64.0


class PrefixPolicy(RoundRobin):
    """The worker with the fewest tokens to compute before this prompt is done.

    Those of prompts that it was given already, this prompt's own without what it has cached, and
    for each answer under way `tokens_per_answer`; more in a worker's slow start. In turns where
    several have as few. It needs no model of costs, and knows none: `cost` does.
    """

    uses_prefixes = True

    def __init__(self, options: PrefixOptions, mode: ModeSetting = "auto") -> None:
        super().__init__(mode)
        self._per_answer = options.tokens_per_answer

    def place(
        self, fleet: Fleet, request: PlacementRequest, load: FleetLoad
    ) -> Placement | Unplaceable:
        """See `PlacementPolicy`."""
        placement = super().place(fleet, request, load)
        if isinstance(placement, Unplaceable):
            return placement
        worker = placement.prefill or placement.decode
        cached = request.num_prompt_tokens - request.count_uncached(worker.id)
        has = f"{worker.id} has {cached} of {request.num_prompt_tokens} tokens cached"
        return replace(placement, why=(*placement.why, has))

    def choose(
        self, workers: Sequence[WorkerView], request: PlacementRequest, load: FleetLoad
    ) -> WorkerView:
        """See `PairingPolicy`."""
        ahead: dict[WorkerId, float] = {}
        for worker in workers:
            activity = load.of(worker.id, worker.model)
            tokens = self._count_before(activity) + request.count_uncached(worker.id)
            ahead[worker.id] = tokens / worker.share(request.at)
        least = min(ahead.values())
        nearest = [worker for worker in workers if ahead[worker.id] == least]
        return super().choose(nearest, request, load)

    def weigh(
        self, worker: WorkerView, request: PlacementRequest, load: FleetLoad
    ) -> Mapping[str, float]:
        """See `PairingPolicy`."""
        before = self._count_before(load.of(worker.id, worker.model))
        uncached = request.count_uncached(worker.id)
        return {
            "tokens_to_compute": (before + uncached) / worker.share(request.at),
            **super().weigh(worker, request, load),
            "before_tokens": before,
            "uncached_tokens": uncached,
        }

    def _count_before(self, activity: WorkerActivity) -> float:
        """Tokens to compute before a prompt that comes now, and what answers count."""
        return activity.prefill_tokens + self._per_answer * activity.num_decodes


def _build(options: PrefixOptions) -> PolicyFactory:
    return lambda mode: PrefixPolicy(options, mode)


PREFIX: Plugin[PrefixOptions, PolicyFactory] = Plugin(PrefixOptions, _build)
