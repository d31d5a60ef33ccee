"""One gateway of a simulation: its policy, and what it knows of the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.router.load import FleetLoad, RunningRequest
from baton.router.placement import Placement, PlacementPolicy, PlacementRequest, Unplaceable
from baton.router.prefixes import ModelPrefixes, PromptMatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from baton.events.blocks import BlockEvent
    from baton.ids import WorkerId
    from baton.kv.prefix_names import PrefixNames
    from baton.router.fleet import Fleet
    from baton.router.worker_prefixes import WorkerPrefixes

NO_SALT: Final = ""


@dataclass(frozen=True, slots=True)
class Placed:
    """A request that was given to workers. `names` are its prompt's blocks', by block size."""

    placement: Placement
    running: RunningRequest
    names: Mapping[int, list[int]]


class SimulatedGateway:
    """Places requests as a gateway does. Owner: one simulation.

    It knows of other gateways only what the workers' events report. `prefixes` None: its policy
    does not look at caches. `first_share`: see `Fleet.beginning_at`. `itl_s`: each request's target
    for the gaps between tokens, if it has one.
    """

    def __init__(
        self,
        policy: PlacementPolicy,
        names: PrefixNames,
        first_share: float = 0.0,
        itl_s: float | None = None,
    ) -> None:
        self._policy, self.load, self._itl_s = policy, FleetLoad(), itl_s
        self._first_share = first_share
        self._fleet: tuple[Fleet, Fleet] | None = None
        self.prefixes = ModelPrefixes(names) if policy.uses_prefixes else None
        self.followed: dict[WorkerId, WorkerPrefixes] = {}

    def follow(self, worker: WorkerId) -> None:
        """Take up a worker's events from now on."""
        if self.prefixes is not None:
            self.followed[worker] = self.prefixes.follow(worker)

    def apply(self, worker: WorkerId, event: BlockEvent, now: float) -> None:
        """An event of a worker arrives."""
        followed = self.followed.get(worker)
        if followed is not None:
            followed.apply(event, now=now)

    def place(
        self, fleet: Fleet, model: str, token_ids: NDArray[np.int32], now: float
    ) -> Placed | Unplaceable:
        """Place a prompt `[num_tokens]`, and count it in."""
        num_tokens = len(token_ids)
        match = PromptMatch(num_tokens)
        if self.prefixes is not None:
            match = self.prefixes.find(token_ids, NO_SALT, now)
        request = PlacementRequest(
            model,
            num_prompt_tokens=num_tokens,
            at=now,
            cached=match.cached,
            stored=match.stored,
            itl_s=self._itl_s,
        )
        placement = self._policy.place(self._order(fleet), request, self.load)
        if isinstance(placement, Unplaceable):
            return placement
        if self.prefixes is not None:
            self.prefixes.expect(match, placement, now)
        num_cached = max(match.cached.get(placement.computing.id, 0), placement.num_prefix_tokens)
        num_handed = placement.num_prefix_tokens or num_tokens
        running = self.load.begin(
            placement,
            num_tokens - num_cached - placement.num_stored_tokens,
            now,
            num_handed - match.cached.get(placement.decode.id, 0),
            num_cached=num_cached,
        )
        if self._itl_s is not None:
            running.limit_gaps(self._itl_s)
        return Placed(placement, running, match.names)

    def check_invariants(self) -> None:
        """Raise AssertionError where its indexes are inconsistent."""
        if self.prefixes is not None:
            self.prefixes.check_invariants()

    def _order(self, fleet: Fleet) -> Fleet:
        if self._fleet is None or self._fleet[0] is not fleet:
            self._fleet = fleet, fleet.beginning_at(self._first_share)
        return self._fleet[1]
