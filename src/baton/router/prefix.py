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
    from baton.router.load import FleetLoad
    from baton.router.modes import ModeSetting
    from baton.router.placement import Placement, PlacementRequest, PolicyFactory
    from baton.router.worker_activity import WorkerActivity


class PrefixOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tokens_per_answer`: what an answer under way counts, in tokens of prompts to compute.

    `stored_share`: what a token counts that is not cached, and can be loaded from the store.
    """

    tokens_per_answer: Annotated[float, msgspec.Meta(ge=0)] = 64.0
    stored_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.25


class PrefixPolicy(RoundRobin):
    """The worker with the fewest tokens to compute before this prompt is done.

    Those of prompts that it was given already, this prompt's own without what it has cached, and
    for each answer under way `tokens_per_answer`; more in a worker's slow start. What it can load
    from its store counts `stored_share`. In turns where several have as few. It needs no model of
    costs, and knows none: `cost` does.
    """

    uses_prefixes = True

    def __init__(self, options: PrefixOptions, mode: ModeSetting = "auto") -> None:
        super().__init__(mode)
        self._per_answer, self._discount = options.tokens_per_answer, 1.0 - options.stored_share

    def place(
        self, fleet: Fleet, request: PlacementRequest, load: FleetLoad
    ) -> Placement | Unplaceable:
        """See `PlacementPolicy`."""
        placement = super().place(fleet, request, load)
        if isinstance(placement, Unplaceable):
            return placement
        worker, num_tokens = placement.prefill or placement.decode, request.num_prompt_tokens
        cached, stored = (
            num_tokens - request.count_uncached(worker.id),
            request.count_stored(worker),
        )
        has = f"{worker.id} has {cached} of {num_tokens} tokens cached"
        if stored:
            has += f", and can load {stored}"
        return replace(placement, why=(*placement.why, has), num_stored_tokens=stored)

    def choose(
        self, workers: Sequence[WorkerView], request: PlacementRequest, load: FleetLoad
    ) -> WorkerView:
        """See `PairingPolicy`."""
        ahead: dict[WorkerId, float] = {}
        for worker in workers:
            activity = load.of(worker.id, worker.model)
            tokens = self._count_before(activity) + request.count_uncached(worker.id)
            if request.stored:
                tokens -= self._discount * request.count_stored(worker)
            ahead[worker.id] = tokens / worker.share(request.at)
        least = min(ahead.values())
        nearest = [worker for worker in workers if ahead[worker.id] == least]
        return super().choose(nearest, request, load)

    def weigh(
        self, worker: WorkerView, request: PlacementRequest, load: FleetLoad
    ) -> Mapping[str, float]:
        """See `PairingPolicy`."""
        before = self._count_before(load.of(worker.id, worker.model))
        uncached, stored = request.count_uncached(worker.id), request.count_stored(worker)
        tokens = before + uncached - self._discount * stored
        figures = {
            "tokens_to_compute": tokens / worker.share(request.at),
            **super().weigh(worker, request, load),
            "before_tokens": before,
            "uncached_tokens": uncached,
        }
        return figures | {"stored_tokens": stored} if stored else figures

    def _count_before(self, activity: WorkerActivity) -> float:
        """Tokens to compute before a prompt that comes now, and what answers count."""
        return activity.prefill_tokens + self._per_answer * activity.num_decodes


def _build(options: PrefixOptions) -> PolicyFactory:
    return lambda mode: PrefixPolicy(options, mode)


PREFIX: Plugin[PrefixOptions, PolicyFactory] = Plugin(PrefixOptions, _build)
