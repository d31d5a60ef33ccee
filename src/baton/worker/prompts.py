"""A request's fields → one `Generation`: token ids, how to sample, how to answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from baton.engines.interface import EngineInfo, SamplingDefaults, SamplingParams
from baton.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from baton.protocol.request_fields import ChatFields
from baton.tokenizer.chat_template import ChatTemplate, TemplateMessage, template_variables
from baton.tokenizer.long_texts import is_too_long

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from baton.protocol.request_fields import (
        ChatMessage,
        CompletionFields,
        GenerationFields,
        KVTransferParams,
        Resume,
    )
    from baton.tokenizer.tokenizer import Tokenizer

NUM_INLINE_CHARS: Final = 4096
"""Texts up to here are handled on the event loop: handing them to a thread would cost more."""
MAX_BYTES_PER_CHAR: Final = 6
MAX_OTHER_BYTES: Final = 1 << 20
"""Of a body: its other fields, and what surrounds each of many messages."""
NUM_THREADS: Final = 2
"""For longer ones: how many are rendered or tokenized at once."""
DEFAULT_COMPLETION_TOKENS: Final = 16
"""OpenAI's default for completions."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Generation:
    """One checked request. `prompt_ids` has shape `[num_tokens]`, at least one token.

    `resume`: the client has a part of the answer. At most `sampling.max_tokens` tokens, fewer
    unless that is all.
    """

    prompt_ids: NDArray[np.int32]
    sampling: SamplingParams
    stops: tuple[str, ...]
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    cache_salt: str
    ticket: str | None
    resume: Resume | None = None


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Knows one model: its name, tokenizer, template and limits. `threads` has `NUM_THREADS`."""

    served_model_name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    info: EngineInfo
    max_default_tokens: int
    threads: Executor

    @property
    def max_prompt_tokens(self) -> int:
        """What fits the model's context and this worker's blocks."""
        return min(self.info.max_context_tokens, self.info.num_blocks * self.info.layout.block_size)

    @property
    def max_prompt_chars(self) -> int:
        """No longer text can fit: each of its tokens would be the longest there is."""
        return self.max_prompt_tokens * self.tokenizer.longest_token_chars

    @property
    def max_body_bytes(self) -> int:
        """No longer body can have a prompt that fits: every character escaped, and all else."""
        return self.max_prompt_chars * MAX_BYTES_PER_CHAR + MAX_OTHER_BYTES

    async def read_completion(self, fields: CompletionFields) -> Generation:
        """Check and tokenize a completion request.

        Raises:
            ModelNotFoundError: another model.
            ContextLengthError: prompt and answer cannot fit.
            InvalidRequestError: anything else that is wrong.
        """
        self._check_model(fields.model)
        if (known := self._known_prompt(fields)) is not None:
            prompt = known
        elif isinstance(fields.prompt, str):
            special = fields.add_special_tokens is not False
            prompt = await self._encode(fields.prompt, add_special_tokens=special)
        else:
            prompt = self._one_prompt(fields.prompt)
        max_tokens = self._max_tokens(len(prompt), fields.max_tokens, DEFAULT_COMPLETION_TOKENS)
        return self._generation(fields, prompt, max_tokens, fields.logprobs)

    async def read_chat(self, fields: ChatFields) -> Generation:
        """Check, render and tokenize a chat request.

        Raises:
            ModelNotFoundError: another model.
            ContextLengthError: prompt and answer cannot fit.
            InvalidRequestError: anything else that is wrong.
        """
        self._check_model(fields.model)
        if self.template is None:
            raise InvalidRequestError(
                f"the model {self.served_model_name} has no chat template, so it cannot chat; "
                "use /v1/completions",
                code="no_chat_template",
            )
        messages = [_template_message(i, m) for i, m in enumerate(fields.messages)]
        prompt = self._known_prompt(fields)
        if prompt is None:
            variables = template_variables(
                fields.chat_template_kwargs or {}, fields.reasoning_effort
            )
            num_chars = sum(len(message.content or "") for message in messages)
            text = await self._run(num_chars, partial(self.template.render, messages, variables))
            # The template writes the special tokens itself.
            special = fields.add_special_tokens is True
            prompt = await self._encode(text, add_special_tokens=special)
        wanted = _wanted_tokens(fields)
        max_tokens = self._max_tokens(len(prompt), wanted, self.max_default_tokens)
        return self._generation(fields, prompt, max_tokens, _chat_logprobs(fields))

    def _known_prompt(self, fields: GenerationFields) -> NDArray[np.int32] | None:
        """The prompt's tokens, where a gateway with the same tokenizer has sent them."""
        params = fields.kv_transfer_params
        if params is None or params.baton_prompt is None:
            return None
        return self._as_prompt(params.baton_prompt)

    def _check_model(self, model: str) -> None:
        if model != self.served_model_name:
            raise ModelNotFoundError(
                f"the model {model[:200]!r} is not served here; served: {self.served_model_name}",
                param="model",
                code="model_not_found",
            )

    async def _encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        limit = self.max_prompt_tokens
        if await is_too_long(self.tokenizer, text, limit, self.threads):
            raise _too_long(limit, f"more than {limit}", None)
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._run(len(text), encode)

    async def _run(self, num_chars: int, work: Callable[[], T]) -> T:
        """Off the event loop, except for what is short; not at all if the client leaves first."""
        if num_chars <= NUM_INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def _one_prompt(self, prompt: list[int | str | list[int]]) -> NDArray[np.int32]:
        ids = [item for item in prompt if isinstance(item, int)]
        if len(ids) != len(prompt):
            raise InvalidRequestError(
                "prompt is neither a string nor a flat list of token ids; lists of prompts are for "
                "the gateway, which makes several requests of them",
                param="prompt",
                code="invalid_value",
            )
        return self._as_prompt(ids)

    def _as_prompt(self, ids: list[int]) -> NDArray[np.int32]:
        vocab_size = self.info.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            outside = next(token for token in ids if not 0 <= token < vocab_size)
            raise InvalidRequestError(
                f"prompt has the token id {outside}; this model's ids are 0 to {vocab_size - 1}",
                param="prompt",
                code="invalid_value",
            )
        return np.asarray(ids, dtype=np.int32)

    def _generation(
        self,
        fields: GenerationFields,
        prompt: NDArray[np.int32],
        max_tokens: int,
        num_logprobs: int | None,
    ) -> Generation:
        stop = fields.stop
        options = fields.stream_options
        params = fields.kv_transfer_params
        return Generation(
            prompt_ids=prompt,
            sampling=_sampling(fields, max_tokens, num_logprobs, self.info.sampling_defaults),
            stops=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            skip_special_tokens=fields.skip_special_tokens is not False,
            stream=fields.stream is True,
            include_usage=options is not None and options.include_usage is True,
            cache_salt=fields.cache_salt or "",
            ticket=None if params is None else params.baton_ticket,
            resume=None if params is None else self._resume(params, max_tokens),
        )

    def _resume(self, params: KVTransferParams, max_tokens: int) -> Resume | None:
        resume = params.baton_resume
        if resume is None:
            return None
        num_tokens, vocab_size = len(resume.token_ids), self.info.vocab_size
        if num_tokens > max_tokens - (not resume.is_complete):
            raise _not_a_part(f"has {num_tokens} tokens, the whole may have {max_tokens}")
        if any(token >= vocab_size for token in resume.token_ids):
            raise _not_a_part(f"has token ids outside 0 to {vocab_size - 1}")
        return resume

    def _max_tokens(self, num_prompt: int, wanted: int | None, most_unasked: int) -> int:
        """How many tokens the answer may have: what was asked for, as far as there is room.

        As in vLLM, more than the whole context is refused whatever the prompt. More than there is
        KV for is not: the other worker of a handoff gets the same fields, and may have more KV.
        """
        if num_prompt == 0:
            raise InvalidRequestError(
                "the prompt has no tokens; send at least one",
                param="prompt",
                code="invalid_value",
            )
        limit = self.max_prompt_tokens
        room = limit - num_prompt
        if room < 1:
            raise _too_long(limit, f"{num_prompt}", wanted)
        context = self.info.model_context_tokens or self.info.max_context_tokens
        if (wanted or 0) > context:
            raise _too_long(context, f"{num_prompt}", wanted, has_room=True)
        return min(room, wanted or most_unasked)


def _not_a_part(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the part of the answer that is to go on {reason}",
        param="kv_transfer_params",
        code="invalid_value",
    )


def _too_long(
    limit: int, num_prompt: str, wanted: int | None, *, has_room: bool = False
) -> ContextLengthError:
    asked = f" and {wanted} tokens for the answer" if wanted else ""
    may_lower = bool(wanted and has_room)
    return ContextLengthError(
        f"this model's context holds {limit} tokens; the prompt has {num_prompt}{asked}. "
        "Shorten the prompt" + (" or lower max_tokens." if may_lower else "."),
        param="max_tokens" if may_lower else None,
        code="context_length_exceeded",
    )


def _wanted_tokens(fields: GenerationFields) -> int | None:
    """How long the answer may be at most, as the request has it."""
    newer = fields.max_completion_tokens if isinstance(fields, ChatFields) else None
    return newer or fields.max_tokens


def _sampling(
    fields: GenerationFields, max_tokens: int, num_logprobs: int | None, defaults: SamplingDefaults
) -> SamplingParams:
    min_tokens, wanted = fields.min_tokens or 0, _wanted_tokens(fields) or max_tokens
    if min_tokens > wanted:
        raise InvalidRequestError(
            f"min_tokens is {min_tokens}, above max_tokens, which is {wanted}",
            param="min_tokens",
            code="invalid_value",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),  # cut to the room, as the answer is
        temperature=defaults.temperature if fields.temperature is None else fields.temperature,
        top_p=defaults.top_p if fields.top_p is None else fields.top_p,
        top_k=max(defaults.top_k if fields.top_k is None else fields.top_k, 0),
        seed=None if fields.seed is None else fields.seed & (2**63 - 1),
        num_logprobs=num_logprobs,
        ignore_eos=fields.ignore_eos is True,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
    )


def _chat_logprobs(fields: ChatFields) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise InvalidRequestError(
            "top_logprobs needs logprobs: send logprobs=true too",
            param="top_logprobs",
            code="invalid_value",
        )
    return None


def _template_message(index: int, message: ChatMessage) -> TemplateMessage:
    where = f"messages[{index}]"
    if message.tool_calls:
        raise InvalidRequestError(
            f"{where}.tool_calls: tools are not supported by this engine; vllm can",
            param=f"{where}.tool_calls",
            code="unsupported_parameter",
        )
    # OpenAI's newer name for the same role; templates know the older one.
    role = "system" if message.role == "developer" else message.role
    return TemplateMessage(role=role, content=_text_of(where, message), name=message.name)


def _text_of(where: str, message: ChatMessage) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequestError(
            f"{where}.content: this field is required. Send a string, or a list of text parts.",
            param=f"{where}.content",
            code="invalid_value",
        )
    for at, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidRequestError(
                f"{where}.content[{at}]: a part of type {part.type[:40]!r} is not supported, or "
                "has no text; send parts of the form {'type': 'text', 'text': …}",
                param=f"{where}.content[{at}]",
                code="unsupported_parameter" if part.type != "text" else "invalid_value",
            )
    return "\n".join(part.text or "" for part in content)
