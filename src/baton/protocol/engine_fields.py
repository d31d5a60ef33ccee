"""Request fields that some engines serve and others do not, and the values that change nothing."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from baton.errors import UNDECODABLE, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

ABSENT: Final = msgspec.Raw(b"null")

Object: TypeAlias = dict[str, msgspec.Raw]
Choices: TypeAlias = Annotated[list[str], Meta(min_length=1)]


class StructuredOutputs(msgspec.Struct, frozen=True):
    """What an answer must be: one of these (vLLM's `StructuredOutputsParams`)."""

    json: str | Object | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's: `text`, `json_object`, or `json_schema` with a schema."""

    type: str
    json_schema: Object | None = None


class ToolFunction(msgspec.Struct, frozen=True):
    """What a tool is called by, and its arguments, a JSON schema."""

    name: str
    description: str | None = None
    parameters: Object | None = None


class Tool(msgspec.Struct, frozen=True):
    """OpenAI's; `type` is `function`."""

    function: ToolFunction
    type: str = "function"


class RepetitionDetection(msgspec.Struct, frozen=True):
    """Which repetition in an answer ends it (vLLM's `RepetitionDetectionParams`)."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


ExtraArgument: TypeAlias = bool | str | int | float | list[str | int | float]

VLLM_FIELDS: Final[Mapping[str, Any]] = MappingProxyType({
    "tools": list[Tool],
    "tool_choice": str | Object,
    "response_format": ResponseFormat,
    "structured_outputs": StructuredOutputs,
    "logit_bias": dict[str, float],
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "min_p": float,
    "bad_words": list[str],
    "allowed_token_ids": list[int],
    "include_stop_str_in_output": bool,
    "echo": bool,
    "use_beam_search": bool,
    "prompt_logprobs": int,
    "prompt_embeds": str | list[str],
    "truncate_prompt_tokens": int,
    "add_generation_prompt": bool,
    "continue_final_message": bool,
    "chat_template": str,
    "documents": list[Object],
    "return_token_ids": bool,
    "return_tokens_as_token_ids": bool,
    "return_prompt_text": bool,
    "logprob_token_ids": list[int],
    "thinking_token_budget": int,
    "repetition_detection": RepetitionDetection,
    "watermarking": bool,
    "include_reasoning": bool,
    "spaces_between_special_tokens": bool,
    "vllm_xargs": dict[str, ExtraArgument],
})
"""What vLLM serves and Baton's own engines do not, each with its type where it is not null."""

REMOVED_FIELDS: Final = frozenset({
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
})
"""vLLM's former names within `structured_outputs`: it ignores them, so nothing serves them."""

_OFF: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "add_generation_prompt": (True,),
    "thinking_token_budget": (-1,),
    "include_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "modalities": (["text"],),
}
_MAX_SHOWN_CHARS: Final = 40

_decoders: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    name: msgspec.json.Decoder(type_ | None) for name, type_ in VLLM_FIELDS.items()
}


def check_vllm_field(name: str, raw: msgspec.Raw) -> None:
    """Pass if a field of `VLLM_FIELDS` has its type, or is null.

    vLLM answers some others with a 500, and takes some for what they are not (text for numbers).

    Raises:
        InvalidRequestError: it has another.
    """
    try:
        _decoders[name].decode(raw)
    except UNDECODABLE as exc:
        raise InvalidRequestError(f"{name} cannot be read: {exc}", param=name) from exc


def is_off(name: str, raw: msgspec.Raw) -> bool:
    """Whether a field has a value with which no engine would answer otherwise.

    Raises:
        InvalidRequestError: the value is no JSON that could be read.
    """
    try:
        value = msgspec.json.decode(raw)
    except UNDECODABLE as exc:
        raise InvalidRequestError(f"{name} cannot be read: {exc}", param=name) from exc
    if value is None:
        return True
    if name in _OFF:
        return value in _OFF[name]
    return value is False or value in ("", [], {})


def unsupported(name: str, raw: msgspec.Raw) -> InvalidRequestError:
    """The error for a field that none of the workers that could answer serves."""
    if name in REMOVED_FIELDS:
        why = "no engine serves it any more; send response_format or structured_outputs instead"
    elif name in VLLM_FIELDS:
        why = (
            "the engine vllm can, and this model is not served by it here. Serve it with "
            f"--engine vllm, or leave {name} out"
        )
    else:
        why = f"Baton would have to ignore it, and the answer would not be yours. Leave {name} out"
    return InvalidRequestError(
        f"{name}={_shown(raw)} is not supported: {why}.", param=name, code="unsupported_parameter"
    )


def _shown(raw: msgspec.Raw) -> str:
    text = bytes(raw).decode()
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
