"""Fields that would change the answer if they were silently ignored: refused, and named.

Each is accepted where its value says "off", since many clients always send it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from baton.errors import InvalidRequestError

Value = msgspec.Raw | None


class UnsupportedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Raw values of the fields that Baton does not serve; None where they are absent."""

    n: Value = None
    best_of: Value = None
    echo: Value = None
    suffix: Value = None
    tools: Value = None
    tool_choice: Value = None
    functions: Value = None
    function_call: Value = None
    response_format: Value = None
    structured_outputs: Value = None
    guided_json: Value = None
    guided_regex: Value = None
    guided_choice: Value = None
    guided_grammar: Value = None
    logit_bias: Value = None
    presence_penalty: Value = None
    frequency_penalty: Value = None
    repetition_penalty: Value = None
    min_p: Value = None
    use_beam_search: Value = None
    bad_words: Value = None
    allowed_token_ids: Value = None
    include_stop_str_in_output: Value = None
    prompt_logprobs: Value = None
    truncate_prompt_tokens: Value = None
    prompt_embeds: Value = None
    add_generation_prompt: Value = None
    continue_final_message: Value = None
    chat_template: Value = None
    documents: Value = None
    modalities: Value = None
    audio: Value = None
    prediction: Value = None
    web_search_options: Value = None


_MAX_SHOWN_CHARS: Final = 40
_EMPTY: Final = ("null", "false", "[]", "{}", '""')
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
_WHY: Final = {
    "n": "Baton gives one answer a request; send several requests",
    "best_of": "Baton samples one answer a request; send several requests and choose",
}


def refuse_unsupported(fields: UnsupportedFields) -> None:
    """Pass if every field is absent or off.

    Raises:
        InvalidRequestError: names the first field that is on; code `unsupported_parameter`.
    """
    for name in UnsupportedFields.__struct_fields__:
        raw: Value = getattr(fields, name)
        if raw is None or bytes(raw).decode() in _EMPTY:
            continue
        if msgspec.json.decode(raw) in _OFF.get(name, ()):
            continue
        why = _WHY.get(name, "Baton would have to ignore it, and the answer would not be yours")
        raise InvalidRequestError(
            f"{name}={_shown(raw)} is not supported: {why}. Leave {name} out.",
            param=name,
            code="unsupported_parameter",
        )


def _shown(raw: msgspec.Raw) -> str:
    text = bytes(raw).decode()
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
