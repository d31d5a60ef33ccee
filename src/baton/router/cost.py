"""The policy that compares costs: one worker for all of a request, or two, and which.

Every worker that may answer is a candidate alone, and every pair of a worker that may prefill and
one that may answer. Of each, what the client will see is predicted:

    TTFT = prompts before it at the prefill worker + the load of what its store has + its own
           prefill of the rest (+ the handoff's exposed part, + the wait for a place among the
           answers of the decode worker, as far as it is longer than all that),
           where load, prefill and handoff are of what the worker does not have cached
    TPOT = a step of the decode worker with one answer more / the share of time left for steps

A prefix that another worker has cached can also be loaded from it: then only the rest is computed,
by the worker that answers. Or the other worker computes it meanwhile (`split_prompts.py`).
To each is added what the placement costs others: the answers that are under way at the two, and
prompts to come, since what a worker has to keep pushes out what they would have found. The least
sum wins.
Where a request, or an answer that is under way, has a target for the gaps between tokens (`itl_s`),
a gap is predicted too: a step, and the piece of a prompt that is computed in it.
`goodput` counts both in units of their limits, and what is beyond a limit `BEYOND` times; of a gap
only that;
`throughput` counts seconds until the answer is complete. A worker in its slow start costs more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import merge
from itertools import chain, product
from math import inf
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.protocol.worker_http import Role
from baton.registry import Plugin
from baton.router.cost_parts import (
    CostOptions,
    Parts,
    Prediction,
    Usable,
    weigh,
)
from baton.router.demand import Limits
from baton.router.devices import DeviceSums
from baton.router.division import Division
from baton.router.explanation import ExplainedCandidate, why_unusable
from baton.router.pair_search import MOST_OF_EACH, PairSearch
from baton.router.pairing import (
    explain_alone,
    find_decodes,
    hand_over,
    is_usable,
    not_full,
    serve_alone,
)
from baton.router.placement import Placement, Unplaceable
from baton.router.split_prompts import LEAST_SAVED, LEAST_SPLIT, find_split

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from baton.ids import WorkerId
    from baton.router.fleet import Fleet, ModelWorkers, WorkerView
    from baton.router.handoff_costs import HandoffCosts
    from baton.router.load import FleetLoad
    from baton.router.modes import ModeSetting
    from baton.router.placement import PlacementRequest, PolicyFactory

LEAST_LOADED: Final = 128
"""Tokens that a worker must lack for their KV to be loaded from another one."""
MOST_SOURCES: Final = 3
"""Workers that have most of a prompt, from which it may be loaded."""
PREFERRED_ALONE: Final = 0.95
"""Two workers must be so much better than one: predictions are not exact, and a handoff is work."""
PREFERRED_REPLICA: Final = 0.75
"""The same where both do both parts, no labour is divided, and the first has no more of the prompt
cached: the next requests need both, too."""

EQUAL: Final = 1.0 + 1e-9
TRIAL: Final = "a trial of the prefill worker, which was ejected"
"""Whatever it costs: nothing else shows whether that worker is well again."""
LOADING_MODES: Final = frozenset({"auto", "push"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve a request: `prefill` None is the decode worker alone.

    `handoffs` is where the handoff's cost comes from. `num_prefix_tokens` above 0: it hands over so
    many, of which it computes `num_split_tokens` and has cached the others. It must cost less than
    `preferred` times the best worker alone.
    """

    prefill: WorkerView | None
    decode: WorkerView
    prediction: Prediction
    cost: float
    handoffs: HandoffCosts | None = None
    num_prefix_tokens: int = 0
    preferred: float = PREFERRED_ALONE
    num_split_tokens: int = 0

    def __str__(self) -> str:
        seen = self.prediction
        who = self.decode.id if self.prefill is None else f"{self.prefill.id} → {self.decode.id}"
        if self.num_split_tokens:
            who += f" (split: the first computes up to token {self.num_prefix_tokens})"
        elif self.num_prefix_tokens:
            who += f" (a prefix of {self.num_prefix_tokens} tokens)"
        parts = f"queue {seen.queue_s:.3f}, prefill {seen.prefill_s:.3f}"
        if seen.num_cached:
            parts += f" ({seen.num_cached} tokens cached)"
        if seen.num_stored:
            parts += f", load {seen.load_s:.3f} ({seen.num_stored} tokens stored)"
        if self.prefill is not None and self.handoffs is not None:
            how = self.handoffs.explain(self.prefill, self.decode)
            parts += f", handoff {seen.handoff_s:.3f} ({how})"
        if seen.decode_queue_s:
            parts += f", decode queue {seen.decode_queue_s:.3f}"
        ttft, tpot = f"TTFT {seen.ttft_s:.3f} s", f"TPOT {seen.tpot_s:.4f} s"
        itl = "" if seen.itl_s is None else f", ITL {seen.itl_s:.4f} s"
        return f"{who}: cost {self.cost:.3f}, {ttft} ({parts}), {tpot}{itl}"

    def explain(self, why_not: str | None = None) -> ExplainedCandidate:
        """Its figures."""
        seen, prefill = self.prediction, self.prefill
        figures = {
            "cost": self.cost,
            "ttft_s": seen.ttft_s,
            "queue_s": seen.queue_s,
            "prefill_s": seen.prefill_s,
            "handoff_s": seen.handoff_s,
            "tpot_s": seen.tpot_s,
            "cached_tokens": seen.num_cached,
        }
        if self.num_split_tokens:
            figures["split_at"] = self.num_prefix_tokens
        elif self.num_prefix_tokens:
            figures["loaded_tokens"] = self.num_prefix_tokens
        if seen.num_stored:
            figures |= {"stored_tokens": seen.num_stored, "load_s": seen.load_s}
        if seen.decode_queue_s:
            figures["decode_queue_s"] = seen.decode_queue_s
        if seen.itl_s is not None:
            figures["itl_s"] = seen.itl_s
        first = None if prefill is None else prefill.id
        return ExplainedCandidate(
            "request",
            first,
            self.decode.id,
            figures,
            why_not,
            num_prefix_tokens=self.num_prefix_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Loading:
    """A prefix of `source`, which has all but `num_uncached` tokens; others compute those alone.

    That takes `prefill_s` at each worker that may answer, and costs others `others`, TTFT apart.
    `is_little`: that worker would compute hardly more without it. The source begins after
    `begins_s`.
    """

    source: WorkerView
    num_uncached: int
    begins_s: float
    prefill_s: NDArray[np.float64]
    others: NDArray[np.float64]
    is_little: NDArray[np.bool_]


class CostPolicy:
    """See the module. Owner: the caller's thread."""

    uses_prefixes = True

    def __init__(self, options: CostOptions, mode: ModeSetting = "auto") -> None:
        self._options = options
        self._mode: ModeSetting = mode
        self._divisions: dict[str, Division] = {}
        self._usable: dict[str, Usable] = {}

    @property
    def tpot_limit_s(self) -> float:
        """What a token may take, of requests that name nothing; inf where all is throughput."""
        return self._options.tpot_s if self._options.objective == "goodput" else inf

    def place(
        self, fleet: Fleet, request: PlacementRequest, load: FleetLoad
    ) -> Placement | Unplaceable:
        """See `PlacementPolicy`."""
        usable = self._find_usable(fleet, request, load)
        if isinstance(usable, Unplaceable):
            return usable
        parts = weigh(usable, request, load, self._options)
        best = self._best_alone(parts, request)
        num_stored = best.prediction.num_stored
        if (fixed := serve_alone(best.decode, request, self._mode)) is not None:
            return replace(fixed, num_stored_tokens=num_stored)
        most = inf if usable.has_trial else best.cost
        ranked, limit = self._rank_all(parts, best, request, load)
        first = next(ranked, None)
        pairs = [] if first is None else [first]
        prefills = usable.prefills
        divided = [f"only prefilling at present: {', '.join(sorted(prefills))}"] if prefills else []
        trial = (TRIAL,) if usable.has_trial else ()
        for pair in chain(pairs, ranked):
            if pair.prefill is None or pair.cost >= limit:
                break
            if pair.cost >= pair.preferred * most:
                continue
            placement = self._hand_over(pair, pair.prefill, request)
            if placement.prefill is not None:
                why = (*placement.why, f"chosen: {pair}", f"rather than {best}", *divided, *trial)
                return replace(placement, why=why)
        reasons: tuple[str, ...] = ()
        listed = usable.served.prefills
        can_help = any(
            is_usable(w, request) and best.decode.why_not_from(w) is None for w in listed
        )
        if (listed or fleet.absent_prefills) and not can_help:
            reasons = explain_alone(fleet, best.decode, request)
        why = (f"chosen: {best}", *(f"rather than {pair}" for pair in pairs), *divided)
        return Placement(None, best.decode, reasons, why=why, num_stored_tokens=num_stored)

    def _rank_all(
        self, parts: Parts, best: Candidate, request: PlacementRequest, load: FleetLoad
    ) -> tuple[Iterator[Candidate], float]:
        """Two workers in all their ways, the best first; none that costs the limit is better."""
        ranked = self._rank_pairs(parts, request, load)
        if parts.usable.has_trial:
            return ranked, inf
        loading = self._rank_prefixes(parts, best.cost, request, load)
        splits = self._find_splits(parts, [best], request, load)
        preferred = max([PREFERRED_ALONE, *(each.preferred for each in splits)])
        return merge(ranked, loading, splits, key=attrgetter("cost")), preferred * best.cost

    def explain(
        self, fleet: Fleet, request: PlacementRequest, load: FleetLoad
    ) -> list[ExplainedCandidate]:
        """See `ExplainingPolicy`. Of many workers pairs are made of the most promising only."""
        usable, served = self._find_usable(fleet, request, load), fleet.models.get(request.model)
        candidates: list[ExplainedCandidate] = []
        if not isinstance(usable, Unplaceable):
            parts = weigh(usable, request, load, self._options)
            costs, num = self._costs_alone(parts), request.num_prompt_tokens
            ways = [
                Candidate(None, usable.workers[at], parts.predict((at, at), num), float(cost))
                for at, cost in enumerate(costs)
            ]
            ways += self._rank_pairs(parts, request, load)
            ways += self._rank_prefixes(parts, inf, request, load)
            alone = sorted(ways[: len(costs)], key=attrgetter("cost"))
            ways += self._find_splits(parts, alone[:MOST_OF_EACH], request, load)
            ways.sort(key=attrgetter("cost"))
            candidates += [way.explain(self._why_not(way, request)) for way in ways]
            candidates += _explain_unpaired(usable)
        listed = {each.decode for each in candidates if each.prefill is None}
        for worker in () if served is None else (*served.prefills, *served.decodes):
            why_not = why_unusable(worker, request)
            if why_not is None and worker.decodes and worker.id not in listed:
                why_not = "only prefills at present"
            if why_not is not None:
                first, second = (None, worker.id) if worker.decodes else (worker.id, None)
                candidates.append(ExplainedCandidate("request", first, second, why_not=why_not))
        return candidates

    def _why_not(self, way: Candidate, request: PlacementRequest) -> str | None:
        """Why a pair cannot be had, though both workers can."""
        alone = serve_alone(way.decode, request, self._mode)
        if way.prefill is None:
            return None
        placement = alone or self._hand_over(way, way.prefill, request)
        return "; ".join(placement.reasons or placement.why) if placement.prefill is None else None

    def _hand_over(
        self, way: Candidate, prefill: WorkerView, request: PlacementRequest
    ) -> Placement:
        if not way.num_prefix_tokens:
            placement = hand_over(prefill, way.decode, request, self._mode)
            if placement.prefill is None or not way.prediction.num_stored:
                return placement
            return replace(placement, num_stored_tokens=way.prediction.num_stored)
        placement = hand_over(prefill, way.decode, request, "push")
        if placement.prefill is None:
            return placement
        if way.num_split_tokens and placement.handoff != "push":
            return replace(placement, prefill=None)  # one would wait for the other
        return replace(
            placement,
            num_prefix_tokens=way.num_prefix_tokens,
            num_split_tokens=way.num_split_tokens,
        )

    def _find_usable(
        self, fleet: Fleet, request: PlacementRequest, load: FleetLoad
    ) -> Usable | Unplaceable:
        """Made once for a fleet, unless some of its workers are not for this request."""
        served = fleet.models.get(request.model)
        prefills = self._divide(served, request, load) if served is not None else frozenset()
        known = self._usable.get(request.model)
        if (
            known is not None
            and not (request.avoid or request.full)
            and known.served is served
            and known.prefills == prefills
            and known.load is load
            and known.num_forgotten == load.num_forgotten
        ):
            return known
        decodes = find_decodes(fleet, request)
        if isinstance(decodes, Unplaceable):
            return decodes
        served = fleet.models[request.model]
        decodes = [w for w in decodes if w.id not in prefills] or decodes
        numbers = {worker.id: at for at, worker in enumerate(decodes)}
        workers = [*decodes]
        for worker in not_full([w for w in served.helpers if is_usable(w, request)], request):
            if worker.id not in numbers:
                numbers[worker.id] = len(workers)
                workers.append(worker)
        helpers = [
            worker
            for worker in served.helpers
            if worker.id in numbers and (not prefills or _is_for_prefill(worker, prefills))
        ]
        trial: list[WorkerView] = []
        if served.trials and not request.avoid:  # a retry is no trial
            trial = [worker for worker in helpers if worker.half_open and not worker.decodes][:1]
        rows = load.rows(workers)
        places = load.costs(request.model).columns.place[rows].copy()
        usable = Usable(
            served,
            prefills,
            load,
            load.num_forgotten,
            workers,
            [worker.id for worker in workers],
            len(decodes),
            np.array([numbers[worker.id] for worker in trial or helpers], dtype=np.intp),
            rows,
            places,
            bool((places != places[0]).any()),
            DeviceSums.of(places, load.costs(request.model).handoffs.places.has_device),
            any(worker.slow_start is not None for worker in workers),
            bool(trial),
        )
        if not (request.avoid or request.full):
            self._usable[request.model] = usable
        return usable

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
        if division.is_due(request.at) and not served.is_part:
            both = [w for w in served.helpers if w.role is Role.BOTH and w.available]
            division.look(both, load, request.at)
        return division.prefills

    def _best_alone(self, parts: Parts, request: PlacementRequest) -> Candidate:
        """The best worker to do both parts; among equals the one that has had no prompt longest."""
        costs, usable = self._costs_alone(parts), parts.usable
        best = int(costs.argmin())
        equals = np.flatnonzero(costs <= EQUAL * costs[best])
        if len(equals) > 1:
            best = int(equals[parts.given_at[equals].argmin()])
        prediction = parts.predict((best, best), request.num_prompt_tokens)
        return Candidate(None, usable.workers[best], prediction, float(costs[best]))

    def _costs_alone(self, parts: Parts) -> NDArray[np.float64]:
        """Of each worker that may answer, if it does both parts `[num_decodes]`."""
        costs = parts.own_ttft + parts.stall + parts.answering
        if parts.shares is not None:
            costs /= parts.shares
        return costs[: parts.usable.num_decodes]

    def _rank_pairs(
        self, parts: Parts, request: PlacementRequest, load: FleetLoad
    ) -> Iterator[Candidate]:
        """Pairs of the most promising workers of each part, from the best on."""
        usable, handoffs = parts.usable, load.costs(request.model).handoffs
        workers, others_at_first = usable.workers, parts.stall + parts.keep
        answering, weight = parts.answering[: usable.num_decodes], 1.0
        if self._options.objective == "goodput":
            weight /= request.ttft_s or self._options.ttft_s
        search = PairSearch(
            parts.own_ttft + others_at_first,
            _count_places(parts, answering, weight),
            usable.helpers,
            parts.num_uncached,
            weight,
            handoffs,
            usable.places,
            usable.is_spread,
        )
        firsts, seconds = search.find()
        handoff_s = search.predict_handoffs(usable.ids, firsts, seconds)
        arrives_s = parts.before_s[firsts] + handoff_s
        waits_s = parts.wait_after(arrives_s, seconds)
        costs = self._options.count_ttft(arrives_s + waits_s, request)
        costs += others_at_first[firsts] + answering[seconds]
        if parts.shares is not None:
            costs /= np.minimum(parts.shares[firsts], parts.shares[seconds])
        for at in costs.argsort(kind="stable").tolist():
            first, second = int(firsts[at]), int(seconds[at])
            prefill, decode = workers[first], workers[second]
            if decode.why_not_from(prefill) is None:
                taking_s, preferred = float(handoff_s[at]), PREFERRED_ALONE
                seen = parts.predict(
                    (first, second), request.num_prompt_tokens, taking_s, float(waits_s[at])
                )
                ahead = parts.num_uncached[second] - parts.num_uncached[first]
                if prefill.role is Role.BOTH and not usable.prefills and ahead < LEAST_LOADED:
                    preferred = PREFERRED_REPLICA
                cost = float(costs[at])
                yield Candidate(prefill, decode, seen, cost, handoffs, preferred=preferred)

    def _rank_prefixes(
        self, parts: Parts, alone_cost: float, request: PlacementRequest, load: FleetLoad
    ) -> list[Candidate]:
        """For each of those that have most of the prompt cached, who best loads that and answers.

        Only what could be better than one worker.
        """
        if not (request.cached and self._options.load_prefixes and self._mode in LOADING_MODES):
            return []
        usable, line = parts.usable, load.costs(request.model).prefill
        answering = slice(usable.num_decodes)
        num_computed = parts.num_computed[answering]
        num_tokens = float(request.num_prompt_tokens)
        whole_s = line.predict(num_computed, num_tokens - num_computed)
        found: list[Candidate] = []
        for source, uncached, begins_s in _find_sources(parts, request):
            if uncached > request.num_prompt_tokens - LEAST_LOADED:
                break
            if not source.takes_prefixes:
                continue
            # Of what a prompt takes at each worker: it has no more to compute than the source.
            share = np.minimum(1.0, line.predict(uncached, num_tokens - uncached) / whole_s)
            prefill_s = share * parts.prefill_s[answering]
            others = share * parts.stall[answering] + parts.answering[answering]
            least = min([PREFERRED_ALONE * alone_cost, *(each.cost for each in found)])
            # What the store has nearly as much of is not asked of a worker.
            is_little = num_computed < uncached + LEAST_LOADED
            loading = _Loading(source, int(uncached), begins_s, prefill_s, others, is_little)
            better = self._find_loading(parts, loading, request, load, least=least)
            if better is None:  # nor is it where the source has less
                break
            found += better
        found.reverse()
        return found

    def _find_splits(
        self, parts: Parts, alone: list[Candidate], request: PlacementRequest, load: FleetLoad
    ) -> list[Candidate]:
        """How another worker would share the prompt with each of these, where that can be."""
        options, usable = self._options, parts.usable
        if not options.split_prompts or self._mode not in LOADING_MODES or usable.has_trial:
            return []
        if request.num_prompt_tokens < LEAST_SPLIT or not request.is_tokenized:
            return []
        found: list[Candidate] = []
        for best in alone:
            second = usable.ids.index(best.decode.id)
            split = find_split(parts, second, request, load, options=options)
            if split is not None:
                # Most of the cost may be the answer's, of which nothing is saved.
                least_saved = LEAST_SAVED * options.count_ttft(best.prediction.ttft_s, request)
                found.append(
                    Candidate(
                        usable.workers[split.first],
                        best.decode,
                        split.prediction,
                        split.cost,
                        load.costs(request.model).handoffs,
                        split.num_prefix,
                        1.0 - least_saved / best.cost,
                        split.num_computed,
                    )
                )
        return found

    def _find_loading(
        self,
        parts: Parts,
        loading: _Loading,
        request: PlacementRequest,
        load: FleetLoad,
        *,
        least: float,
    ) -> list[Candidate] | None:
        """Who best loads what the source has; empty where that costs `least` or more.

        None where it would also if the load took no time.
        """
        usable, handoffs = parts.usable, load.costs(request.model).handoffs
        source, prefill_s, others = loading.source, loading.prefill_s, loading.others
        queue_s = parts.queue_s[: usable.num_decodes]
        missing = parts.num_uncached[: usable.num_decodes] - loading.num_uncached
        without = self._options.count_ttft(queue_s + prefill_s, request) + others
        if parts.shares is not None:
            without /= parts.shares[: usable.num_decodes]
        without[loading.is_little] = inf
        if without.min() >= least:
            return None
        found: list[Candidate] = []
        for at in without.argsort(kind="stable")[:MOST_OF_EACH].tolist():
            if without[at] >= least:
                break
            decode = usable.workers[at]
            if not decode.takes_prefixes or decode.why_not_from(source) is not None:
                continue
            load_s = handoffs.predict_load(source, decode, float(missing[at])) + loading.begins_s
            before_s, num_loaded = float(queue_s[at]), request.num_prompt_tokens
            num_loaded -= loading.num_uncached
            prediction = Prediction(
                before_s,
                float(prefill_s[at]),
                max(0.0, load_s - before_s),  # prompts before it are computed while it loads
                float(parts.tpot_s[at]),
                num_loaded,
                itl_s=parts.predict_itl(at),
            )
            cost = self._options.count_ttft(prediction.ttft_s, request) + float(others[at])
            if parts.shares is not None:
                cost /= float(parts.shares[at])
            if cost < least:
                least = cost
                found = [Candidate(source, decode, prediction, cost, handoffs, num_loaded)]
        return found


def _count_places(
    parts: Parts, answering: NDArray[np.float64], weight: float
) -> NDArray[np.float64]:
    """What an answer costs at each worker, with its wait beyond the shortest way to answer it."""
    if parts.place_s is None:
        return answering
    waits_s = parts.place_s[: len(answering)] - parts.before_s.min()
    counted: NDArray[np.float64] = answering + weight * np.maximum(0.0, waits_s)
    return counted


def _find_sources(parts: Parts, request: PlacementRequest) -> list[tuple[WorkerView, float, float]]:
    """Who has most of the prompt cached, the tokens that each lacks, and when it can begin.

    Baton's workers begin at once, and full ones, too: a prefix that they hand over takes no place
    among their requests. A vLLM server computes a token for it, in its own queue.
    """
    usable = parts.usable
    least = parts.num_uncached.argsort(kind="stable")[:MOST_SOURCES].tolist()
    sources = [
        (worker, float(parts.num_uncached[at]), _begins_s(worker, at, parts))
        for at, worker in ((at, usable.workers[at]) for at in least)
    ]
    if request.full:
        known, served = set(usable.ids), usable.served
        sources += [
            (worker, float(request.count_uncached(worker.id)), 0.0)
            for worker in (*served.prefills, *served.decodes)
            if worker.id in request.cached
            and worker.id not in known
            and worker.protocol == "baton"
            and is_usable(worker, request)
        ]
        sources.sort(key=itemgetter(1))
    return sources[:MOST_SOURCES]


def _begins_s(source: WorkerView, at: int, parts: Parts) -> float:
    """Until a usable worker offers what it has cached: a vLLM server's queue, and a step of it."""
    return 0.0 if source.protocol == "baton" else float(parts.queue_s[at] + parts.tpot_s[at])


def _explain_unpaired(usable: Usable) -> list[ExplainedCandidate]:
    """Pairs of usable workers that cannot hand over to each other."""
    helpers = [usable.workers[at] for at in usable.helpers[:MOST_OF_EACH]]
    decodes = usable.workers[: min(usable.num_decodes, MOST_OF_EACH)]
    return [
        ExplainedCandidate("request", prefill.id, decode.id, why_not=why_not)
        for prefill, decode in product(helpers, decodes)
        if prefill is not decode and (why_not := decode.why_not_from(prefill)) is not None
    ]


def _is_for_prefill(worker: WorkerView, prefills: frozenset[WorkerId]) -> bool:
    return worker.role is Role.PREFILL or worker.id in prefills


def _build(options: CostOptions) -> PolicyFactory:
    return lambda mode: CostPolicy(options, mode)


COST: Plugin[CostOptions, PolicyFactory] = Plugin(CostOptions, _build)
