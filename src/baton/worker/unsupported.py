"""Fields that would change the answer if they were silently ignored: refused, and named.

Each is accepted where its value says "off", since many clients always send it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from baton.errors import InvalidRequestError

ABSENT: Final = msgspec.Raw(b"null")


class UnsupportedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Raw values of the fields that Baton does not serve."""

    n: msgspec.Raw = ABSENT
    best_of: msgspec.Raw = ABSENT
    echo: msgspec.Raw = ABSENT
    suffix: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    functions: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    response_format: msgspec.Raw = ABSENT
    structured_outputs: msgspec.Raw = ABSENT
    guided_json: msgspec.Raw = ABSENT
    guided_regex: msgspec.Raw = ABSENT
    guided_choice: msgspec.Raw = ABSENT
    guided_grammar: msgspec.Raw = ABSENT
    logit_bias: msgspec.Raw = ABSENT
    presence_penalty: msgspec.Raw = ABSENT
    frequency_penalty: msgspec.Raw = ABSENT
    repetition_penalty: msgspec.Raw = ABSENT
    min_p: msgspec.Raw = ABSENT
    use_beam_search: msgspec.Raw = ABSENT
    bad_words: msgspec.Raw = ABSENT
    allowed_token_ids: msgspec.Raw = ABSENT
    include_stop_str_in_output: msgspec.Raw = ABSENT
    prompt_logprobs: msgspec.Raw = ABSENT
    truncate_prompt_tokens: msgspec.Raw = ABSENT
    prompt_embeds: msgspec.Raw = ABSENT
    add_generation_prompt: msgspec.Raw = ABSENT
    continue_final_message: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    modalities: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    prediction: msgspec.Raw = ABSENT
    web_search_options: msgspec.Raw = ABSENT


_MAX_SHOWN_CHARS: Final = 40
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
        raw: msgspec.Raw = getattr(fields, name)
        if _is_off(name, msgspec.json.decode(raw)):
            continue
        why = _WHY.get(name, "Baton would have to ignore it, and the answer would not be yours")
        raise InvalidRequestError(
            f"{name}={_shown(raw)} is not supported: {why}. Leave {name} out.",
            param=name,
            code="unsupported_parameter",
        )


def _is_off(name: str, value: object) -> bool:
    if value is None:
        return True
    if name in _OFF:
        return value in _OFF[name]
    return value is False or value in ("", [], {})


def _shown(raw: msgspec.Raw) -> str:
    text = bytes(raw).decode()
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
