"""What placement must know of a request: to serve it, and to explain where it would go."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from baton.gateway.request import CompletionBody, find_non_disaggregable_field, find_vllm_field
from baton.protocol.engine_fields import unsupported

if TYPE_CHECKING:
    from baton.gateway.request_context import Services
    from baton.gateway.workers import Workers
    from baton.router.fleet import Fleet
    from baton.router.placement import NonDisaggregableField
    from baton.router.prefixes import PromptMatch


def find_base(workers: Workers, body: CompletionBody) -> CompletionBody:
    """The body as a request for a model, where the client has named one of its adapters."""
    if body.adapter or body.model in workers.fleet.models:
        return body
    base = workers.fleet.adapters.get(body.model)
    return body if base is None else replace(body, model=base, adapter=body.model)


async def find_prompt(services: Services, body: CompletionBody) -> PromptMatch | None:
    """Who has how much of a prompt; None where its tokens are not known, or not looked at.

    Raises:
        ModelNotFoundError: no worker serves that model.
        InvalidRequestError: more token ids than any worker has room for.
        ContextLengthError: the prompt is certainly too long.
    """
    workers, model = services.workers, body.model
    if model not in workers.fleet.models:
        raise workers.why_not_served(model)
    body.check_ids(partial(find_largest_context, workers, model))
    body.check_text(partial(find_longest_text, workers, model))
    return None if services.prefixes is None else await services.prefixes.find(body)


def find_largest_context(workers: Workers, model: str) -> int:
    """Tokens that some worker of a model has room for."""
    infos = (worker.info for worker in workers.all)
    return max(
        (i.max_context_tokens for i in infos if i and i.served_model_name == model), default=0
    )


def find_longest_text(workers: Workers, model: str) -> int | None:
    """Characters of a text that some worker of a model may have room for; None: not known."""
    infos = [worker.info for worker in workers.all]
    known = [i.max_prompt_chars for i in infos if i and i.served_model_name == model]
    return None if None in known else max(filter(None, known), default=None)


def find_serving(fleet: Fleet, body: CompletionBody, num_tokens: int) -> Fleet:
    """The fleet without the workers that do not serve the request's adapter and its fields.

    Nor with those that have no room for its prompt, of which `num_tokens` are known, and a token.

    Raises:
        InvalidRequestError: no worker of its model serves its fields.
    """
    field = find_vllm_field(body)
    # Of the whole model: that none has the adapter at present is no fault of the request.
    if field is not None and "vllm" not in fleet.models[body.model].decode_protocols:
        raise unsupported(field, body.fields[field])
    if body.adapter:
        fleet = fleet.with_adapter(body.model, body.adapter)
    if field is not None:
        fleet = fleet.only(body.model, "vllm")
    if num_tokens >= fleet.models[body.model].least_context_tokens:
        fleet = fleet.with_room(body.model, num_tokens)
    return fleet


def find_sole_field(fleet: Fleet, body: CompletionBody) -> NonDisaggregableField | None:
    """The field for which one worker of this fleet would serve a request alone, if it has one."""
    speaks_vllm = "vllm" in fleet.models[body.model].decode_protocols
    return find_non_disaggregable_field(body) if speaks_vllm else None
