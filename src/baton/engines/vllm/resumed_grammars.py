"""vLLM's grammars, extended in its engine's process: one stands where given tokens leave it.

A request that goes on from an answer's first tokens has them at the end of its prompt
(`resumed_streams`). Its grammar, of a JSON schema or a tool's call, begins with the answer: it has
to accept them before the first token is sampled.
"""

from __future__ import annotations

import logging
from copy import copy
from dataclasses import replace
from functools import wraps
from typing import Any, Final

logger = logging.getLogger(__name__)

NUM_GIVEN_FIELD: Final = "baton_num_given"
"""In a request's `kv_transfer_params`: how many of its prompt's last tokens are its answer's."""


def is_supported() -> bool:
    """Whether this vLLM makes its grammars where we know."""
    from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415 - heavy

    return hasattr(StructuredOutputManager, "_create_grammar")


def install() -> None:
    """Extend vLLM's class in this process, where this vLLM has it."""
    if not is_supported():
        logger.warning("this vLLM's streams with a grammar cannot go on from their tokens")
        return
    from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415 - heavy

    create = StructuredOutputManager._create_grammar  # noqa: SLF001 - what makes it has no other name

    @wraps(create)
    def create_behind_given(manager: Any, request: Any) -> Any:  # noqa: ANN401 - vLLM's
        grammar = create(manager, request)
        num_given = (request.kv_transfer_params or {}).get(NUM_GIVEN_FIELD, 0)
        if num_given:
            advance(manager, request, grammar, num_given)
        return grammar

    StructuredOutputManager._create_grammar = create_behind_given  # noqa: SLF001


def advance(manager: Any, request: Any, grammar: Any, num_given: int) -> None:  # noqa: ANN401 - vLLM's
    """Let a request's new grammar accept the last `num_given` tokens of its prompt.

    One by one, as vLLM does with those that it generates: it leaves a model's reasoning out.

    Raises:
        ValueError: it does not accept them. vLLM then fails this request alone.
    """
    prompt, given = request.prompt_token_ids[:-num_given], request.prompt_token_ids[-num_given:]
    begun = copy(request)  # as it was with its answer's first token, with a grammar that is ready
    begun.prompt_token_ids, begun.all_token_ids = prompt, [*prompt]
    begun.structured_output_request = replace(request.structured_output_request, _grammar=grammar)
    for token_id in given:
        begun.all_token_ids.append(token_id)
        if not manager.accept_tokens(begun, [token_id]):
            raise ValueError(f"the grammar of {request.request_id} does not accept {token_id}")
    request.structured_output_request.reasoning_ended = (
        begun.structured_output_request.reasoning_ended
    )
