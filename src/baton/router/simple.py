"""Workers take turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.router.modes import choose_mode
from baton.router.placement import Placement, PlacementRequest, Unplaceable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.ids import WorkerId
    from baton.router.fleet import Fleet, WorkerView
    from baton.router.modes import ModeSetting
    from baton.router.placement import NonDisaggregableField


class RoundRobin:
    """The decode worker that has waited longest, and a prefill worker that can hand over to it.

    While nothing changes that is the operator's order, again and again. A worker that comes back
    takes one turn at once, then its place in the round: it is not flooded to catch up.
    `mode` is the operator's word on how KV is handed over. Owner: the caller's thread.
    """

    def __init__(self, mode: ModeSetting = "auto") -> None:
        self._mode: ModeSetting = mode
        self._turn = 0
        self._last_turn: dict[WorkerId, int] = {}

    def place(self, fleet: Fleet, request: PlacementRequest) -> Placement | Unplaceable:
        """See `PlacementPolicy`."""
        served = fleet.models.get(request.model)
        if served is None:
            return Unplaceable(f"no worker serves the model {request.model!r}")
        decodes = _usable(served.decodes, request.avoid)
        if not decodes:
            return Unplaceable(_why_no_decode_worker(served.decodes, request))
        return self._pair(self._next_in_turn(decodes), served.prefills, request)

    def _pair(
        self, decode: WorkerView, listed: Sequence[WorkerView], request: PlacementRequest
    ) -> Placement:
        if not listed:
            return Placement(prefill=None, decode=decode)
        if (colocated := self._try_colocate(decode, request)) is not None:
            return colocated
        prefills = _usable(listed, request.avoid)
        pairable = [w for w in prefills if decode.why_not_from(w) is None]
        if not pairable:
            return Placement(None, decode, _why_colocated(listed, decode, request.avoid))
        return self._disaggregate(self._next_in_turn(pairable), decode, request)

    def _try_colocate(self, decode: WorkerView, request: PlacementRequest) -> Placement | None:
        """Where one worker is to serve the request alone."""
        if request.non_disaggregable is not None and decode.protocol == "vllm":
            return _non_disaggregable(decode, request.non_disaggregable)
        if self._mode == "colocated":
            return Placement(None, decode, why=("the operator chose colocated",))
        return None

    def _disaggregate(
        self, prefill: WorkerView, decode: WorkerView, request: PlacementRequest
    ) -> Placement:
        choice = choose_mode(prefill, decode, request, self._mode)
        if choice.mode is None:
            return Placement(None, decode, choice.reasons)
        return Placement(
            prefill,
            decode,
            handoff=choice.mode,
            why=choice.reasons,
            is_degraded=choice.is_degraded,
        )

    def _next_in_turn(self, workers: Sequence[WorkerView]) -> WorkerView:
        last_turn = self._last_turn
        chosen = min(workers, key=lambda worker: last_turn.get(worker.id, 0))
        self._turn += 1
        last_turn[chosen.id] = self._turn
        return chosen

    def check_invariants(self) -> None:
        """No two workers took the same turn, and none a turn to come."""
        turns = self._last_turn.values()
        assert len(set(turns)) == len(turns)  # noqa: S101 (a checker asserts)
        assert all(0 < turn <= self._turn for turn in turns)  # noqa: S101 (a checker asserts)


def _usable(workers: Sequence[WorkerView], avoid: frozenset[WorkerId]) -> list[WorkerView]:
    return [w for w in workers if w.available and w.id not in avoid]


def _non_disaggregable(decode: WorkerView, field: NonDisaggregableField) -> Placement:
    reason = f"{decode.id} serves the request alone, because of its field {field.value!r}"
    return Placement(None, decode, (reason,), non_disaggregable=field)


def _why_no_decode_worker(decodes: Sequence[WorkerView], request: PlacementRequest) -> str:
    if not decodes:
        return f"no decode worker serves the model {request.model!r}"
    named = ", ".join(w.id for w in decodes)
    return f"no decode worker of the model {request.model!r} is available (known: {named})"


def _why_colocated(
    prefills: Sequence[WorkerView], decode: WorkerView, avoid: frozenset[WorkerId]
) -> tuple[str, ...]:
    return tuple(_why_not(prefill, decode, avoid) for prefill in prefills)


def _why_not(prefill: WorkerView, decode: WorkerView, avoid: frozenset[WorkerId]) -> str:
    if prefill.id in avoid:
        return f"{prefill.id} has just failed this request"
    if not prefill.available:
        return f"{prefill.id} is not available"
    return decode.why_not_from(prefill) or f"{prefill.id} was not chosen"
