"""Policies that need no model of costs: turns, chance, and the fewest requests."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated

import msgspec

from baton.registry import Plugin
from baton.router.pairing import PairingPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from baton.ids import WorkerId
    from baton.router.fleet import WorkerView
    from baton.router.load import FleetLoad
    from baton.router.modes import ModeSetting
    from baton.router.placement import PlacementRequest, PolicyFactory


class RoundRobin(PairingPolicy):
    """The decode worker that has waited longest, and a prefill worker that can hand over to it.

    While nothing changes that is the operator's order, again and again. A worker that comes back
    takes one turn at once, then its place in the round: it is not flooded to catch up. In a slow
    start it takes its share of its turns.
    """

    def __init__(self, mode: ModeSetting = "auto") -> None:
        super().__init__(mode)
        self._turn = 0
        self._last_turn: dict[WorkerId, int] = {}
        self._due: dict[WorkerId, float] = {}

    def choose(
        self, workers: Sequence[WorkerView], request: PlacementRequest, load: FleetLoad
    ) -> WorkerView:
        """See `PairingPolicy`."""
        del load
        chosen = self._take_turn(workers)
        if any(worker.slow_start is not None for worker in workers):
            most = max(worker.share(request.at) for worker in workers)
            while not self._is_due(chosen, chosen.share(request.at) / most):
                chosen = self._take_turn(workers)
        return chosen

    def _take_turn(self, workers: Sequence[WorkerView]) -> WorkerView:
        last_turn = self._last_turn
        chosen = min(workers, key=lambda worker: last_turn.get(worker.id, 0))
        self._turn += 1
        last_turn[chosen.id] = self._turn
        return chosen

    def _is_due(self, worker: WorkerView, share: float) -> bool:
        """Whether this turn, of which a worker takes a share, is one that it takes."""
        due = self._due.pop(worker.id, 0.0) + share
        if due < 1 and share < 1:
            self._due[worker.id] = due
            return False
        if share < 1:
            self._due[worker.id] = due - 1
        return True

    def weigh(
        self, worker: WorkerView, request: PlacementRequest, load: FleetLoad
    ) -> Mapping[str, float]:
        """See `PairingPolicy`."""
        del request, load
        return {"last_turn": self._last_turn.get(worker.id, 0)}

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """See `RemembersWorkers`."""
        for worker in workers:
            self._last_turn.pop(worker, None)
            self._due.pop(worker, None)

    def check_invariants(self) -> None:
        """No two workers took the same turn, and none a turn to come."""
        turns = self._last_turn.values()
        assert len(set(turns)) == len(turns)  # noqa: S101 (a checker asserts)
        assert all(0 < turn <= self._turn for turn in turns)  # noqa: S101 (a checker asserts)


class LeastLoaded(RoundRobin):
    """The worker with the fewest requests of this gateway; in turns where several have as few.

    In a slow start, it may have its share of what others have.
    """

    def choose(
        self, workers: Sequence[WorkerView], request: PlacementRequest, load: FleetLoad
    ) -> WorkerView:
        """See `PairingPolicy`."""
        counts = [
            (load.of(worker.id, worker.model).num_requests + 1) / worker.share(request.at)
            for worker in workers
        ]
        least = min(counts)
        idlest = [w for w, num in zip(workers, counts, strict=True) if num == least]
        return super().choose(idlest, request, load)

    def weigh(
        self, worker: WorkerView, request: PlacementRequest, load: FleetLoad
    ) -> Mapping[str, float]:
        """See `PairingPolicy`."""
        num = (load.of(worker.id, worker.model).num_requests + 1) / worker.share(request.at) - 1
        return {"num_requests": num, **super().weigh(worker, request, load)}


class RandomChoice(PairingPolicy):
    """Any worker, in a pseudo-random order that follows from `seed`."""

    def __init__(self, mode: ModeSetting = "auto", seed: int = 0) -> None:
        super().__init__(mode)
        self._seed, self._turn = seed.to_bytes(8, "little"), 0

    def choose(
        self, workers: Sequence[WorkerView], request: PlacementRequest, load: FleetLoad
    ) -> WorkerView:
        """See `PairingPolicy`."""
        del request, load
        self._turn += 1
        drawn = blake2b(self._turn.to_bytes(8, "little"), key=self._seed, digest_size=8).digest()
        return workers[int.from_bytes(drawn, "little") % len(workers)]


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None."""


class RandomOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`seed`: another one gives another order."""

    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


ROUND_ROBIN: Plugin[NoOptions, PolicyFactory] = Plugin(NoOptions, lambda _: RoundRobin)
LEAST_LOADED: Plugin[NoOptions, PolicyFactory] = Plugin(NoOptions, lambda _: LeastLoaded)
RANDOM: Plugin[RandomOptions, PolicyFactory] = Plugin(
    RandomOptions, lambda options: lambda mode: RandomChoice(mode, options.seed)
)
