"""What policies share: who can serve a request, whose KV it can take, and why not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from baton.router.explanation import ExplainedCandidate, list_decodes, why_unusable
from baton.router.modes import choose_mode
from baton.router.placement import Placement, Unplaceable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.ids import WorkerId
    from baton.router.explanation import Part
    from baton.router.fleet import Fleet, ModelWorkers, WorkerView
    from baton.router.load import FleetLoad
    from baton.router.modes import ModeSetting
    from baton.router.placement import PlacementRequest


class PairingPolicy:
    """Chooses a decode worker, then a prefill worker that can hand over to it.

    A subclass decides by what: `choose`. `mode` is the operator's word on how KV is handed over.
    Owner: the caller's thread.
    """

    uses_prefixes = False

    def __init__(self, mode: ModeSetting = "auto") -> None:
        self._mode: ModeSetting = mode

    def choose(
        self, workers: Sequence[WorkerView], request: PlacementRequest, load: FleetLoad
    ) -> WorkerView:
        """One of these workers, of which there is at least one."""
        raise NotImplementedError

    def place(
        self, fleet: Fleet, request: PlacementRequest, load: FleetLoad
    ) -> Placement | Unplaceable:
        """See `PlacementPolicy`."""
        decodes = find_decodes(fleet, request)
        if isinstance(decodes, Unplaceable):
            return decodes
        decode, served = self.choose(decodes, request, load), fleet.models[request.model]
        if not served.prefills and not fleet.absent_prefills:
            return Placement(prefill=None, decode=decode)
        if (alone := serve_alone(decode, request, self._mode)) is not None:
            return alone
        pairable = find_prefills(served, decode, request)
        if not pairable:
            return Placement(None, decode, explain_alone(fleet, decode, request))
        return hand_over(self.choose(pairable, request, load), decode, request, self._mode)

    def weigh(
        self, worker: WorkerView, request: PlacementRequest, load: FleetLoad
    ) -> Mapping[str, float]:
        """The figures by which `choose` compares a worker, if there are any: see `explain`."""
        del worker, request, load
        return {}

    def explain(
        self, fleet: Fleet, request: PlacementRequest, load: FleetLoad
    ) -> list[ExplainedCandidate]:
        """See `ExplainingPolicy`: workers for each part, where there are prefill workers."""
        served = fleet.models.get(request.model)
        if served is None:
            return []
        part: Part = "decode" if served.prefills else "request"
        answering = {worker.id: worker for worker in served.decodes}
        candidates = [
            replace(each, figures=self.weigh(answering[each.decode], request, load))
            for each in list_decodes(served, request, part)
            if each.decode is not None
        ]
        usable = [worker for worker in served.decodes if is_usable(worker, request)]
        for worker in served.prefills:
            obstacles = [decode.why_not_from(worker) for decode in usable]
            why_not = why_unusable(worker, request)
            if why_not is None and obstacles and None not in obstacles:
                why_not = obstacles[0]
            figures = self.weigh(worker, request, load)
            candidates.append(ExplainedCandidate("prefill", worker.id, None, figures, why_not))
        candidates.sort(key=lambda each: tuple(each.figures.values()))
        return candidates


def find_decodes(fleet: Fleet, request: PlacementRequest) -> list[WorkerView] | Unplaceable:
    """The workers that may answer a request; or that there is none."""
    served = fleet.models.get(request.model)
    if served is None:
        return Unplaceable(f"no worker serves the model {request.model!r}")
    decodes = [w for w in served.trials if w.decodes and is_usable(w, request)][:1]
    if not decodes or request.avoid:  # a retry is no trial
        decodes = [w for w in served.decodes if is_usable(w, request)]
    decodes = decodes or [w for w in served.decodes if w.ejected and w.id not in request.avoid]
    return not_full(decodes, request) or Unplaceable(_explain_no_decode(served, request))


def find_prefills(
    served: ModelWorkers, decode: WorkerView, request: PlacementRequest
) -> list[WorkerView]:
    """Those that may prefill a request for this decode worker; a half-open one, if there is."""
    listed = served.prefills
    found = [w for w in listed if is_usable(w, request) and decode.why_not_from(w) is None]
    half_open = [w for w in found if w.half_open][:1] if served.trials else []
    return half_open or not_full(found, request)


def not_full(workers: list[WorkerView], request: PlacementRequest) -> list[WorkerView]:
    """Those that can use a request now; all of them if none can."""
    if not request.full:
        return workers
    return [worker for worker in workers if worker.id not in request.full] or workers


def is_usable(worker: WorkerView, request: PlacementRequest) -> bool:
    """Whether a worker is available, and has not just failed this request."""
    return worker.available and worker.id not in request.avoid


def serve_alone(
    decode: WorkerView, request: PlacementRequest, mode: ModeSetting
) -> Placement | None:
    """Where one worker is to serve the request alone, whatever others could do."""
    field = request.non_disaggregable
    if field is not None and decode.protocol == "vllm":
        reason = f"{decode.id} serves the request alone, because of its field {field.value!r}"
        return Placement(None, decode, (reason,), non_disaggregable=field)
    if mode == "colocated":
        return Placement(None, decode, why=("the operator chose colocated",))
    return None


def hand_over(
    prefill: WorkerView, decode: WorkerView, request: PlacementRequest, mode: ModeSetting
) -> Placement:
    """These two workers, in the mode that fits; the decode worker alone where none does."""
    choice = choose_mode(prefill, decode, request, mode)
    if choice.mode is None:
        return Placement(None, decode, choice.reasons)
    return Placement(
        prefill,
        decode,
        handoff=choice.mode,
        why=choice.reasons,
        is_degraded=choice.is_degraded,
    )


def explain_alone(fleet: Fleet, decode: WorkerView, request: PlacementRequest) -> tuple[str, ...]:
    """Why no prefill worker serves the request with a decode worker."""
    prefills = fleet.models[request.model].prefills
    known = (_why_not(prefill, decode, request.avoid) for prefill in prefills)
    return (*known, *fleet.absent_prefills)


def _explain_no_decode(served: ModelWorkers, request: PlacementRequest) -> str:
    if not served.decodes:
        return f"no decode worker serves the model {request.model!r}"
    named = ", ".join(w.id for w in served.decodes)
    return f"no decode worker of the model {request.model!r} is available (known: {named})"


def _why_not(prefill: WorkerView, decode: WorkerView, avoid: frozenset[WorkerId]) -> str:
    if prefill.id in avoid:
        return f"{prefill.id} has just failed this request"
    if not prefill.available:
        return f"{prefill.id} is {'ejected' if prefill.ejected else 'not available'}"
    return decode.why_not_from(prefill) or f"{prefill.id} was not chosen"
