"""vLLM's engine client, extended: it reports a stream's token ids, and goes on from given ones.

    prompt │ given: part of the engine's prompt │ generated
           └──── answer, as vLLM's serving layer sees it ──┘

A stream that another server began comes with the tokens of its answer so far
(`kv_transfer_params.baton_resume`). The engine gets them as the end of its prompt. The output
processor gets them as the answer's first tokens: its detokenizer and stop strings, and the parsers
of the serving layer, are then where they were. Both are done where vLLM's API server hands a
request to the two, in its own process, which Baton started.

A request that is not streamed but has such tokens only moves KV: they belong to its prompt. So does
one that wants only its prompt's first tokens computed (`kv_transfer_params.baton_prefix_tokens`).

A stream that cannot go on from tokens is sampled with the gateway's seed, where its client gave
none: another server then gives the same answer from its start.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from functools import lru_cache, wraps
from importlib.metadata import entry_points
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import msgspec

from baton.engines.vllm import resumed_grammars
from baton.engines.vllm.resumed_grammars import NUM_GIVEN_FIELD
from baton.engines.vllm.stream_tokens import CURRENT, MOST_UNNAMED
from baton.errors import UNDECODABLE
from baton.protocol.request_fields import Resume

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from baton.engines.vllm.stream_tokens import StreamTokens

logger = logging.getLogger(__name__)

RESUME_FIELD: Final = "baton_resume"
PREFIX_FIELD: Final = "baton_prefix_tokens"
NUM_AT_ONCE: Final = 64
"""Restored outputs until other requests have their turn."""

CARRIED_ON: Final = frozenset({
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
    "stream_interval",
    "flat_logprobs",
    "skip_clone",
    "skip_reading_prefix_cache",
    "extra_args",
    "output_text_buffer_length",
    "_eos_token_id",
    "_all_stop_token_ids",
})
"""vLLM's sampling parameters with which a token depends on the tokens before it, wherever the
prompt ends, once a grammar has accepted them. Penalties and bad words look at the answer alone,
log-probabilities are known only where a token was generated; whatever a later vLLM adds is not
carried on until it was read.
"""


def find_obstacle(params: Any, lora: object, prompt: object) -> str | None:  # noqa: ANN401 - vLLM's
    """Why a stream cannot go on from token ids; None if it can.

    `params` are vLLM's `SamplingParams`, `prompt` its `EngineInput`.
    """
    kind: Any = type(params)
    for name, default in _find_defaults(kind).items():
        value = getattr(params, name)
        if value is not None if default is None else value != default:
            return name
    if params.structured_outputs is not None and not resumed_grammars.is_supported():
        return "structured_outputs"
    if params.seed is not None and params.temperature != 0:
        return "seed"  # the generator's state after so many tokens is not known
    if lora is not None:
        return "LoRA"
    if not _is_tokens(prompt):
        return "a prompt of more than tokens"
    return None


def install() -> None:
    """Extend vLLM's classes in this process, where this vLLM has them."""
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415 - seconds to import
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
    from vllm.v1.engine.output_processor import OutputProcessor  # noqa: PLC0415

    generate = getattr(AsyncLLM, "generate", None)
    add_request = getattr(OutputProcessor, "add_request", None)
    if generate is None or add_request is None:
        logger.warning("this vLLM's streams run again from their start when they go on elsewhere")
        return

    @wraps(generate)
    def generate_from_given(
        engine: Any,  # noqa: ANN401 - vLLM's
        prompt: Any,  # noqa: ANN401
        sampling_params: Any,  # noqa: ANN401
        request_id: str,
        **options: Any,  # noqa: ANN401
    ) -> AsyncGenerator[Any, None]:
        given, group_sizes = _take_given(sampling_params, engine.model_config.get_vocab_size())
        stream = CURRENT.get()
        if sampling_params.output_kind is not RequestOutputKind.DELTA:
            prompt = _cut(_extended(prompt, given), sampling_params)
            stream = None
        elif stream is not None:
            lora = options.get("lora_request")
            if find_obstacle(sampling_params, lora, prompt) is None and _is_plain(engine):
                stream.begin(
                    given if len(given) < (sampling_params.max_tokens or 0) else (),
                    len(prompt["prompt_token_ids"]),
                    group_sizes,
                )
            else:
                _begin_repeatable(stream, sampling_params)
        outputs = generate(engine, prompt, sampling_params, request_id, **options)
        return outputs if stream is None else _report(stream, outputs)

    @wraps(add_request)
    def add_with_given(
        processor: Any,  # noqa: ANN401 - vLLM's
        request: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **options: Any,  # noqa: ANN401
    ) -> None:
        add_request(processor, request, *args, **options)
        stream = CURRENT.get()
        if stream is not None and stream.given:
            given, stream.given = stream.given, ()
            stream.restored = restore(
                processor.request_states[request.request_id], given, stream.group_sizes
            )
            give_to_engine(request, given)

    AsyncLLM.generate = generate_from_given
    OutputProcessor.add_request = add_with_given


def restore(
    state: Any,  # noqa: ANN401 - vLLM's
    given: tuple[int, ...],
    group_sizes: list[int] | None = None,
) -> list[Any]:
    """Put an answer's first tokens into vLLM's `RequestState`: their `RequestOutput`s.

    In the groups in which they were generated: some of vLLM's parsers of tool calls depend on them.
    """
    outputs, at = [], 0
    for size in group_sizes or repeat(1, len(given)):
        group = list(given[at : at + size])
        at += size
        state.detokenizer.update(group, stop_terminated=False)
        output = state.make_request_output(group, None, None, None)
        if output is not None:
            outputs.append(output)
    return outputs


def give_to_engine(request: Any, given: tuple[int, ...]) -> None:  # noqa: ANN401 - vLLM's
    """Make an answer's first tokens the end of the prompt in vLLM's `EngineCoreRequest`."""
    params = request.sampling_params
    request.prompt_token_ids = [*request.prompt_token_ids, *given]
    params.max_tokens -= len(given)
    params.min_tokens = max(0, params.min_tokens - len(given))
    params.extra_args["kv_transfer_params"][NUM_GIVEN_FIELD] = len(given)


def _begin_repeatable(stream: StreamTokens, params: Any) -> None:  # noqa: ANN401 - vLLM's
    """Begin a stream that cannot go on from tokens: the same answer can be given from its start."""
    stream.begin(None, 0)
    if params.seed is None and params.temperature != 0:
        params.seed = stream.use_seed()


async def _report(
    stream: StreamTokens, outputs: AsyncGenerator[Any, None]
) -> AsyncGenerator[Any, None]:
    """The same outputs, behind those restored. The tokens of each but the last are reported.

    The last one's may end the answer: another server generates them again, and ends it, too.
    """
    async with aclosing(outputs):
        async for output in outputs:
            if len(stream.pending) > MOST_UNNAMED:
                await stream.name_pending()
            for number, restored in enumerate(stream.take_restored()):
                if number % NUM_AT_ONCE == NUM_AT_ONCE - 1:
                    await asyncio.sleep(0)
                restored.num_cached_tokens = min(
                    output.num_cached_tokens or 0, len(restored.prompt_token_ids)
                )
                stream.add(restored.outputs[0].token_ids)
                yield restored
            if not output.finished:
                stream.add(output.outputs[0].token_ids)
            yield output


def _is_plain(engine: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Whether nothing in the engine looks at an answer's tokens but what requests ask for."""
    has_processors = engine.model_config.logits_processors is not None or _has_plugins()
    return not has_processors and getattr(engine.vllm_config, "watermark_config", None) is None


@lru_cache(maxsize=1)
def _has_plugins() -> bool:
    """Whether logits processors are installed that vLLM loads unasked."""
    return bool(entry_points(group="vllm.logits_processors"))


def _take_given(
    params: Any,  # noqa: ANN401 - vLLM's
    vocab_size: int,
) -> tuple[tuple[int, ...], list[int] | None]:
    """Take the tokens so far out of a request's parameters: nothing else in vLLM needs them.

    With the sizes of the groups in which they were generated; None: one by one.
    """
    extra: Mapping[str, object] = params.extra_args or {}
    transfer = extra.get("kv_transfer_params")
    raw = transfer.pop(RESUME_FIELD, None) if isinstance(transfer, dict) else None
    if raw is None:
        return (), None
    try:
        resume = msgspec.convert(raw, Resume)
    except UNDECODABLE as exc:
        logger.warning("%s cannot be read, so the answer begins anew: %s", RESUME_FIELD, exc)
        return (), None
    given, sizes = tuple(resume.token_ids), resume.group_sizes
    if max(given, default=0) >= vocab_size:
        logger.warning("%s has token ids that are not in the vocabulary", RESUME_FIELD)
        return (), None
    return given, sizes if sizes is not None and sum(sizes) == len(given) else None


def _extended(prompt: Any, given: tuple[int, ...]) -> Any:  # noqa: ANN401 - vLLM's
    """The prompt with an answer's first tokens."""
    if not given or not _is_tokens(prompt):
        return prompt
    return {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *given]}


def _cut(prompt: Any, params: Any) -> Any:  # noqa: ANN401 - vLLM's
    """The first tokens of the prompt, where its request wants no more of it to be computed."""
    transfer = (params.extra_args or {}).get("kv_transfer_params")
    num = transfer.pop(PREFIX_FIELD, None) if isinstance(transfer, dict) else None
    if not isinstance(num, int) or num <= 0 or not _is_tokens(prompt):
        return prompt
    return {**prompt, "prompt_token_ids": prompt["prompt_token_ids"][:num]}


def _is_tokens(prompt: Any) -> bool:  # noqa: ANN401 - vLLM's
    return isinstance(prompt, dict) and prompt.get("type") == "token"


@lru_cache(maxsize=1)
def _find_defaults(params: Any) -> Mapping[str, object]:  # noqa: ANN401 - vLLM's
    """The parameters that are not carried on → their values where none sets them."""
    blank = params()
    return {n: getattr(blank, n) for n in params.__struct_fields__ if n not in CARRIED_ON}
