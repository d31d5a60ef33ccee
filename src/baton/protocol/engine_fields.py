"""Request fields that some engines serve and others do not, and the values that change nothing."""

from __future__ import annotations

from typing import Final

import msgspec

from baton.errors import UNDECODABLE, InvalidRequestError

ABSENT: Final = msgspec.Raw(b"null")

VLLM_FIELDS: Final = frozenset({
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_p",
    "bad_words",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "echo",
    "use_beam_search",
    "prompt_logprobs",
    "prompt_embeds",
    "truncate_prompt_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "documents",
})
"""What vLLM serves and Baton's own engines do not."""

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
    "modalities": (["text"],),
}
_MAX_SHOWN_CHARS: Final = 40


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
