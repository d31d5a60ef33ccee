"""A placement policy: the workers with the most free KV blocks."""

from __future__ import annotations

import msgspec

from baton.registry import Plugin
from baton.router.modes import choose_mode
from baton.router.placement import Placement, Unplaceable


class MostFreeBlocks:
    """See `PlacementPolicy`. Pure: it sees the fleet's snapshot and nothing else."""

    uses_prefixes = False  # it does not look at `request.cached`

    def __init__(self, mode):
        self.mode = mode

    def place(self, fleet, request, load) -> Placement | Unplaceable:
        served = fleet.models.get(request.model)
        decodes = _usable(served.decodes, request) if served else []
        if not decodes:
            return Unplaceable(f"no decode worker serves the model {request.model!r} now")
        decode = max(decodes, key=_num_free_blocks)
        prefills = [w for w in _usable(served.prefills, request) if not decode.why_not_from(w)]
        if request.non_disaggregable is not None and decode.protocol == "vllm":
            return Placement(None, decode, non_disaggregable=request.non_disaggregable)
        if not prefills:
            return Placement(None, decode, ("no prefill worker can hand over to it",))
        prefill = max(prefills, key=_num_free_blocks)
        choice = choose_mode(prefill, decode, request, self.mode)
        if choice.mode is None:
            return Placement(None, decode, choice.reasons)
        why, degraded = choice.reasons, choice.is_degraded
        return Placement(prefill, decode, handoff=choice.mode, why=why, is_degraded=degraded)


def _usable(workers, request):
    return [w for w in workers if w.available and w.id not in request.avoid]


def _num_free_blocks(worker) -> int:
    return worker.load.num_free_blocks if worker.load is not None else 0


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """None."""


PLUGIN = Plugin(Options, lambda options: MostFreeBlocks)
