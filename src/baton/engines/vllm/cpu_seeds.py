"""Requests with a seed on CPUs, whose prompts are computed in several steps.

vLLM samples a token for each request of a step and drops those of prompts that go on. Where such a
request has a random generator, its model runner V1 sets the generator back by one draw
(`_bookkeeping_sync`). PyTorch's generators on CPUs cannot be set back: the call raises, and the
engine ends. So such a request's generator is kept away from the draw: there is nothing to undo.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def install() -> None:
    """Extend vLLM's class in this process, once, where this vLLM has it."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # noqa: PLC0415 - heavy

    sample = getattr(CPUModelRunner, "sample_tokens", None)
    if sample is None or not hasattr(CPUModelRunner, "_bookkeeping_sync"):
        logger.warning("on this vLLM, a request with a seed may end the engine of a server on CPUs")
        return
    if hasattr(CPUModelRunner, "baton_keeps_seeds"):
        return

    @wraps(sample)
    def sample_with_kept_seeds(runner: Any, grammar_output: Any) -> Any:  # noqa: ANN401 - vLLM's
        generators = runner.input_batch.generators
        kept = take_unused(
            generators, runner.discard_request_mask.np[: runner.input_batch.num_reqs]
        )
        try:
            return sample(runner, grammar_output)
        finally:
            generators.update(kept)

    CPUModelRunner.sample_tokens = sample_with_kept_seeds
    CPUModelRunner.baton_keeps_seeds = True


def take_unused(
    generators: dict[int, torch.Generator], is_dropped: np.ndarray
) -> dict[int, torch.Generator]:
    """Take out the generators, by a request's place in its step, of those whose token is dropped.

    `is_dropped` has the shape (requests,), dtype bool.
    """
    if not generators:
        return {}
    return {i: generators.pop(i) for i in np.flatnonzero(is_dropped).tolist() if i in generators}
