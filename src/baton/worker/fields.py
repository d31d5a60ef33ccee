"""Request bodies, read and validated; fields that are refused."""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar, get_type_hints

import msgspec

from baton.errors import UNDECODABLE, InvalidRequestError
from baton.protocol.engine_fields import ABSENT, is_off, unsupported
from baton.protocol.prompt_bounds import check_ids, check_messages, lists_ids
from baton.protocol.request_fields import (
    ChatFields,
    ChatMessage,
    CompletionFields,
    GenerationFields,
)


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
    return_token_ids: msgspec.Raw = ABSENT
    return_tokens_as_token_ids: msgspec.Raw = ABSENT
    return_prompt_text: msgspec.Raw = ABSENT
    logprob_token_ids: msgspec.Raw = ABSENT
    thinking_token_budget: msgspec.Raw = ABSENT
    repetition_detection: msgspec.Raw = ABSENT
    watermarking: msgspec.Raw = ABSENT
    include_reasoning: msgspec.Raw = ABSENT
    spaces_between_special_tokens: msgspec.Raw = ABSENT
    vllm_xargs: msgspec.Raw = ABSENT
    modalities: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    prediction: msgspec.Raw = ABSENT
    web_search_options: msgspec.Raw = ABSENT


_SEVERAL: Final = "a worker gives one answer; the gateway makes several requests of one"


def refuse_unsupported(fields: UnsupportedFields) -> None:
    """Pass if every field is absent or off.

    Raises:
        InvalidRequestError: names the first field that is on; code `unsupported_parameter`.
    """
    for name in UnsupportedFields.__struct_fields__:
        raw: msgspec.Raw = getattr(fields, name)
        if is_off(name, raw):
            continue
        if name in {"n", "best_of"}:
            raise InvalidRequestError(
                f"{name} is not supported: {_SEVERAL}", param=name, code="unsupported_parameter"
            )
        raise unsupported(name, raw)


class _Heads(msgspec.Struct, frozen=True):
    """What may be long, as JSON text."""

    prompt: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT


F = TypeVar("F", bound=GenerationFields)
S = TypeVar("S")

_AT: Final = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_MISSING: Final = re.compile(r"missing required field `(?P<field>[^`]+)`")

_heads: Final = msgspec.json.Decoder(_Heads)
_unsupported: Final = msgspec.json.Decoder(UnsupportedFields)
_completion: Final = msgspec.json.Decoder(CompletionFields)
_chat: Final = msgspec.json.Decoder(ChatFields)


def parse_completion(body: bytes, max_context_tokens: int) -> CompletionFields:
    """Decode the body of `POST /v1/completions`.

    Raises:
        InvalidRequestError: not JSON, a wrong type or value, or an unsupported field, or more token
            ids than `max_context_tokens`.
    """
    prompt = _decode(body, _heads).prompt
    if lists_ids(memoryview(prompt)):
        check_ids(bytes(prompt), max_context_tokens)
    return _parse(body, _completion)


def parse_chat(body: bytes) -> ChatFields:
    """Decode the body of `POST /v1/chat/completions`.

    Raises:
        InvalidRequestError: not JSON, a wrong type or value, or an unsupported field.
    """
    check_messages(bytes(_decode(body, _heads).messages))
    return _parse(body, _chat)


def _parse(body: bytes, decoder: msgspec.json.Decoder[F]) -> F:
    fields = _decode(body, decoder)
    refuse_unsupported(_decode(body, _unsupported))
    return fields


def _decode(body: bytes, decoder: msgspec.json.Decoder[S]) -> S:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise _explain(str(exc)) from exc
    except UNDECODABLE as exc:
        raise InvalidRequestError(
            f"the body is not valid JSON: {exc}. Send one JSON object with "
            "'content-type: application/json'.",
            code="invalid_json",
        ) from exc


def _explain(message: str) -> InvalidRequestError:
    """Turn msgspec's sentence into one with a parameter, a reason and a remedy."""
    found = _AT.match(message)
    what, path = (found["what"], found["path"]) if found else (message, None)
    missing = _MISSING.search(what)
    inside = path.removeprefix("$").removeprefix(".") if path else ""
    if missing:
        param = f"{inside}.{missing['field']}" if inside else missing["field"]
        what = "this field is required"
    else:
        param = inside
    if not param:
        return InvalidRequestError(f"the body is not what is expected here: {_lower(what)}.")
    remedy = _remedy(param)
    advice = f" Send {remedy}." if remedy else ""
    return InvalidRequestError(
        f"{param}: {_lower(what)}.{advice}", param=param, code="invalid_value"
    )


def _lower(what: str) -> str:
    return what[:1].lower() + what[1:]


def _remedy(param: str) -> str | None:
    """The description of the innermost described field on the path `a.b[0].c`."""
    names = [re.sub(r"\[.*?\]", "", part) for part in param.split(".")]
    return next((_DESCRIPTIONS[name] for name in reversed(names) if name in _DESCRIPTIONS), None)


def _described(*schemas: type[msgspec.Struct]) -> dict[str, str]:
    return {
        name: description
        for schema in schemas
        for name, hint in get_type_hints(schema, include_extras=True).items()
        if (description := _description(hint)) is not None
    }


def _description(hint: Any) -> str | None:  # noqa: ANN401 (a type annotation has no type)
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.description is not None:
            return meta.description
    for argument in getattr(hint, "__args__", ()):
        if (description := _description(argument)) is not None:
            return description
    return None


_DESCRIPTIONS: Final = _described(CompletionFields, ChatFields, ChatMessage)
