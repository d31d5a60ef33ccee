"""The policy that compares costs: one worker for all of a request, or two, and which.

Every worker that may answer is a candidate alone, and every pair of a worker that may prefill and
one that may answer. Of each, what the client will see is predicted:

    TTFT = prompts before it at the prefill worker + its own prefill (+ the handoff's exposed part),
           where prefill and handoff are of what the worker does not have cached
    TPOT = a step of the decode worker with one answer more / the share of time left for steps

and what the placement costs the answers that are under way at the two. The least sum wins.
`goodput` counts both in units of their limits, and what is beyond a limit `BEYOND` times;
`throughput` counts seconds until the answer is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec

from baton.protocol.worker_http import Role
from baton.registry import Plugin
from baton.router.division import Division, Limits
from baton.router.load import WINDOW_S
from baton.router.pairing import (
    explain_alone,
    find_decodes,
    hand_over,
    is_usable,
    not_full,
    serve_alone,
)
from baton.router.placement import Placement, Unplaceable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.ids import WorkerId
    from baton.router.fleet import Fleet, ModelWorkers, WorkerView
    from baton.router.load import FleetLoad, WorkerActivity
    from baton.router.modes import ModeSetting
    from baton.router.placement import PlacementRequest, PolicyFactory

BEYOND: Final = 10.0
"""What a unit beyond a limit counts: the request is as good as lost, but sooner is better."""
TYPICAL_ANSWER_TOKENS: Final = 128
PREFERRED_ALONE: Final = 0.95
"""Two workers must be so much better than one: predictions are not exact, and a handoff is work."""
MOST_OF_EACH: Final = 8
"""Workers of each part that pairs are made of, the most promising ones."""

Objective: TypeAlias = Literal["goodput", "throughput"]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]


class CostOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is wanted: requests within both limits, in seconds, or as many as can be."""

    objective: Objective = "goodput"
    ttft_s: _Seconds = 2.0
    tpot_s: _Seconds = 0.1


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a client is expected to see, in seconds; tokens of the prompt that are not computed."""

    queue_s: float
    prefill_s: float
    handoff_s: float
    tpot_s: float
    num_cached: int = 0

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.queue_s + self.prefill_s + self.handoff_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve a request: `prefill` None is the decode worker alone."""

    prefill: WorkerView | None
    decode: WorkerView
    prediction: Prediction
    cost: float

    def __str__(self) -> str:
        seen = self.prediction
        who = self.decode.id if self.prefill is None else f"{self.prefill.id} → {self.decode.id}"
        parts = f"queue {seen.queue_s:.3f}, prefill {seen.prefill_s:.3f}"
        if seen.num_cached:
            parts += f" ({seen.num_cached} tokens cached)"
        if self.prefill is not None:
            parts += f", handoff {seen.handoff_s:.3f}"
        ttft, tpot = f"TTFT {seen.ttft_s:.3f} s", f"TPOT {seen.tpot_s:.4f} s"
        return f"{who}: cost {self.cost:.3f}, {ttft} ({parts}), {tpot}"


class CostPolicy:
    """See the module. Owner: the caller's thread."""

    uses_prefixes = True

    def __init__(self, options: CostOptions, mode: ModeSetting = "auto") -> None:
        self._options = options
        self._mode: ModeSetting = mode
        self._divisions: dict[str, Division] = {}

    def place(
        self, fleet: Fleet, request: PlacementRequest, load: FleetLoad
    ) -> Placement | Unplaceable:
        """See `PlacementPolicy`."""
        decodes = find_decodes(fleet, request)
        if isinstance(decodes, Unplaceable):
            return decodes
        served = fleet.models[request.model]
        prefills = self._divide(served, request, load)
        decodes = [w for w in decodes if w.id not in prefills] or decodes
        divided = [f"only prefilling at present: {', '.join(sorted(prefills))}"] if prefills else []
        alone = self._rank([(None, decode) for decode in decodes], request, load)
        best = alone[0]
        if (fixed := serve_alone(best.decode, request, self._mode)) is not None:
            return fixed
        helpers = [w for w in served.helpers if not prefills or _is_for_prefill(w, prefills)]
        pairs = self._rank([*self._pairs(helpers, decodes, request, load)], request, load)
        for pair in pairs:
            if pair.prefill is None or pair.cost >= PREFERRED_ALONE * best.cost:
                break
            placement = hand_over(pair.prefill, pair.decode, request, self._mode)
            if placement.prefill is not None:
                why = (*placement.why, f"chosen: {pair}", f"rather than {best}", *divided)
                return replace(placement, why=why)
        reasons: tuple[str, ...] = ()
        if served.prefills and not any(is_usable(w, request) for w in served.prefills):
            reasons = explain_alone(served.prefills, best.decode, request.avoid)
        why = (f"chosen: {best}", *(f"rather than {pair}" for pair in pairs[:1]), *divided)
        return Placement(None, best.decode, reasons, why=why)

    def _divide(
        self, served: ModelWorkers, request: PlacementRequest, load: FleetLoad
    ) -> frozenset[WorkerId]:
        """The workers of both roles that only prefill at present."""
        if self._options.objective == "throughput" or self._mode == "colocated":
            return frozenset()
        division = self._divisions.get(request.model)
        if division is None:
            limits = Limits(self._options.ttft_s, self._options.tpot_s)
            division = self._divisions[request.model] = Division(limits)
        both = [w for w in served.helpers if w.role is Role.BOTH and w.available]
        division.look(both, load, request.at)
        return division.prefills

    def _pairs(
        self,
        helpers: Sequence[WorkerView],
        decodes: Sequence[WorkerView],
        request: PlacementRequest,
        load: FleetLoad,
    ) -> Iterator[tuple[WorkerView, WorkerView]]:
        """The pairs that are worth a look: of the least busy ones of each part."""
        usable = not_full([each for each in helpers if is_usable(each, request)], request)
        if len(usable) > MOST_OF_EACH:
            usable = nsmallest(
                MOST_OF_EACH, usable, key=lambda w: load.of(w.id, w.model).queue_s(request.at)
            )
        if len(decodes) > MOST_OF_EACH:
            decodes = nsmallest(
                MOST_OF_EACH, decodes, key=lambda w: load.of(w.id, w.model).pace_s(1, request.at)
            )
        for prefill in usable:
            for decode in decodes:
                if prefill.id != decode.id and decode.why_not_from(prefill) is None:
                    yield prefill, decode

    def _rank(
        self,
        ways: Sequence[tuple[WorkerView | None, WorkerView]],
        request: PlacementRequest,
        load: FleetLoad,
    ) -> list[Candidate]:
        """From the best on; among equals in the order that was given."""
        found = [self._weigh(prefill, decode, request, load) for prefill, decode in ways]
        return sorted(found, key=lambda candidate: candidate.cost)

    def _weigh(
        self,
        prefill: WorkerView | None,
        decode: WorkerView,
        request: PlacementRequest,
        load: FleetLoad,
    ) -> Candidate:
        now, handoff_s = request.at, 0.0
        answering = computing = load.of(decode.id, decode.model)
        if prefill is not None:
            computing = load.of(prefill.id, prefill.model)
            handed = request.count_uncached(decode.id)
            handoff_s = load.handoff_cost(prefill, decode).predict(handed)
        uncached = request.count_uncached(decode.id if prefill is None else prefill.id)
        prefill_s = computing.prefill_cost.predict(uncached)
        prediction = Prediction(
            computing.queue_s(now),
            prefill_s,
            handoff_s,
            answering.pace_s(1, now),
            request.num_prompt_tokens - uncached,
        )
        cost = self._own(prediction, request) + self._others(computing, answering, prefill_s, now)
        return Candidate(prefill, decode, prediction, cost)

    def _own(self, prediction: Prediction, request: PlacementRequest) -> float:
        """What the request itself will see, by its own limits where it has some."""
        options = self._options
        if options.objective == "throughput":
            return prediction.ttft_s + TYPICAL_ANSWER_TOKENS * prediction.tpot_s
        ttft_s, tpot_s = request.ttft_s or options.ttft_s, request.tpot_s or options.tpot_s
        return _bend(prediction.ttft_s / ttft_s) + _bend(prediction.tpot_s / tpot_s)

    def _others(
        self, computing: WorkerActivity, answering: WorkerActivity, prefill_s: float, now: float
    ) -> float:
        """What the answers under way at the two will see of it."""
        before, after = answering.pace_s(0, now), answering.pace_s(1, now)
        stalled = computing.num_decodes
        if self._options.objective == "throughput":
            slower_s = (after - before) * TYPICAL_ANSWER_TOKENS * answering.num_decodes
            return slower_s + stalled * prefill_s
        limit = self._options.tpot_s
        slower = (_bend(after / limit) - _bend(before / limit)) * answering.num_decodes
        if not stalled:
            return slower
        usual = computing.pace_s(0, now)
        shared = computing.pace_s(0, now, more_share=prefill_s / WINDOW_S)
        return slower + (_bend(shared / limit) - _bend(usual / limit)) * stalled


def _is_for_prefill(worker: WorkerView, prefills: frozenset[WorkerId]) -> bool:
    return worker.role is Role.PREFILL or worker.id in prefills


def _bend(share: float) -> float:
    """A figure in units of its limit, with what is beyond it counted `BEYOND` times."""
    return share + BEYOND * max(0.0, share - 1.0)


def _build(options: CostOptions) -> PolicyFactory:
    return lambda mode: CostPolicy(options, mode)


COST: Plugin[CostOptions, PolicyFactory] = Plugin(CostOptions, _build)
