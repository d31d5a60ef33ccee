"""`POST /debug/route`: where a request would go now, and by what the policy compares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.gateway.answer_plan import plan_answers
from baton.gateway.asgi import BodyBudget, BodyLimit, read_body
from baton.gateway.clients import EVERYBODY
from baton.gateway.placing import find_base, find_prompt, find_serving, find_sole_field
from baton.gateway.request import check_content_type, estimate_prompt_tokens, parse_body
from baton.gateway.targets import read_targets
from baton.protocol.route_explanation import RouteCandidate, RouteExplanation
from baton.router.explanation import ExplainedCandidate, explain
from baton.router.placement import PlacementRequest, Unplaceable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Receive, Scope

    from baton.gateway.request import CompletionBody
    from baton.gateway.request_context import Services
    from baton.gateway.targets import Targets
    from baton.router.explanation import Part
    from baton.router.fleet import Fleet

MAX_BODY_BYTES: Final = 16 << 20
MAX_TOTAL_BYTES: Final = 32 << 20
"""Of bodies that are explained at once."""


class RouteExplainer:
    """Owner: the event loop's thread."""

    def __init__(self, services: Services) -> None:
        self._services = services
        max_bytes = min(MAX_BODY_BYTES, services.options.max_body_bytes)
        self._limit = BodyLimit(max_bytes, lambda: max_bytes)
        self._bodies = BodyBudget(MAX_TOTAL_BYTES)

    async def serve(self, scope: Scope, receive: Receive) -> RouteExplanation:
        """Read a completion's body, and explain where it would go with the targets of its headers.

        With an API key it is the request of that key's tenant, whose cached blocks are its own.

        Raises:
            BatonError: the request would be refused, as it would be for a completion; or the
                policy cannot be explained.
        """
        headers, clients = scope["headers"], self._services.clients
        check_content_type(headers)
        targets = read_targets(headers)
        shows_key = any(name == b"authorization" for name, _ in headers)
        client = clients.authenticate(headers) if shows_key else EVERYBODY
        with self._bodies.hold() as held:
            whole = parse_body(await read_body(receive, self._limit, held), client.tenant)
            body = find_base(self._services.workers, whole)
            plan = plan_answers(body, self._services.options.max_answers)
            return await self._explain(plan.prompts[0], plan.num_total, targets)

    async def _explain(
        self, body: CompletionBody, num_answers: int, named: Targets
    ) -> RouteExplanation:
        services, usual = self._services, self._services.options.targets_of(body.model)
        match = await find_prompt(services, body)
        everywhere = services.workers.fleet
        num_known = 0 if match is None else match.num_tokens
        fleet = find_serving(everywhere, body, num_known)
        request = PlacementRequest(
            body.model,
            non_disaggregable=find_sole_field(fleet, body),
            num_prompt_tokens=estimate_prompt_tokens(body) if match is None else match.num_tokens,
            at=services.clock.now(),
            cached={} if match is None else match.cached,
            stored={} if match is None else match.stored,
            full=services.admission.find_full(body.model),
            ttft_s=named.ttft_s or usual.ttft_s,
            tpot_s=named.tpot_s or usual.tpot_s,
            itl_s=named.itl_s or usual.itl_s,
            is_tokenized=match is not None,
        )
        found = explain(services.placement, fleet, request, services.load)
        placed = None if isinstance(found.placement, Unplaceable) else found.placement
        if isinstance(found.placement, Unplaceable):
            why: tuple[str, ...] = (found.placement.reason,)
        else:
            why = (*found.placement.reasons, *found.placement.why)
        candidates = (*found.candidates, *_list_without(everywhere, fleet, body, num_known))
        return RouteExplanation(
            model=body.model,
            policy=services.options.policy_name,
            num_prompt_tokens=request.num_prompt_tokens,
            is_tokenized=match is not None,
            cached_tokens={str(worker): num for worker, num in request.cached.items() if num},
            stored_tokens={str(worker): num for worker, num in request.stored.items() if num},
            num_answers=num_answers,
            mode=None if placed is None else placed.mode,
            prefill=None if placed is None or placed.prefill is None else placed.prefill.id,
            decode=None if placed is None else placed.decode.id,
            why=why,
            candidates=tuple(
                RouteCandidate(
                    each.part,
                    each.prefill,
                    each.decode,
                    {name: float(value) for name, value in each.figures.items()},
                    each.is_chosen(found.placement),
                    each.why_not,
                )
                for each in candidates
            ),
        )


def _list_without(
    everywhere: Fleet, fleet: Fleet, body: CompletionBody, num_tokens: int
) -> Iterable[ExplainedCandidate]:
    """The workers of a model that do not have the adapter, or no room for the prompt."""
    served, left = everywhere.models[body.model], fleet.models[body.model]
    for worker in (*served.prefills, *served.decodes) if fleet is not everywhere else ():
        if body.adapter and body.adapter not in worker.adapters:
            why_not = f"has no adapter {body.adapter!r}"
        elif worker.max_context_tokens <= num_tokens < left.least_context_tokens:
            why_not = f"has room for {worker.max_context_tokens} tokens"
        else:
            continue
        prefill, decode = (None, worker.id) if worker.decodes else (worker.id, None)
        part: Part = "decode" if worker.decodes else "prefill"
        yield ExplainedCandidate(part, prefill, decode, why_not=why_not)
