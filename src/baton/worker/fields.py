"""OpenAI's two request bodies as far as Baton answers them: fields, refused fields, validation."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeAlias, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from baton.errors import UNDECODABLE, InvalidRequestError
from baton.protocol.engine_fields import ABSENT, is_off, unsupported
from baton.protocol.prompt_bounds import check_ids, check_messages, lists_ids

MAX_STOPS = 16
MAX_LOGPROBS = 20
_MAX_INT = 2**63 - 1

Temperature: TypeAlias = Annotated[
    float, Meta(ge=0, le=2, description="a number from 0 (greedy) to 2")
]
TopP: TypeAlias = Annotated[
    float, Meta(gt=0, le=1, description="a number above 0 and at most 1 (1 is off)")
]
TopK: TypeAlias = Annotated[
    int, Meta(ge=-1, le=_MAX_INT, description="a whole number of at least 1, or 0 or -1 for off")
]
MaxTokens: TypeAlias = Annotated[
    int, Meta(ge=1, le=_MAX_INT, description="a whole number of at least 1")
]
MinTokens: TypeAlias = Annotated[
    int, Meta(ge=0, le=_MAX_INT, description="a whole number of at least 0")
]
Seed: TypeAlias = Annotated[
    int, Meta(ge=-_MAX_INT - 1, le=_MAX_INT, description="a whole number that fits 64 bits")
]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
StopList: TypeAlias = Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
Stop: TypeAlias = Annotated[
    StopString | StopList | None,
    Meta(description=f"a non-empty string, or a list of at most {MAX_STOPS} of them"),
]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
StopTokenIds: TypeAlias = Annotated[
    list[TokenId], Meta(max_length=1024, description="a list of token ids")
]
NumLogprobs: TypeAlias = Annotated[
    int, Meta(ge=0, le=MAX_LOGPROBS, description=f"a whole number from 0 to {MAX_LOGPROBS}")
]
Prompt: TypeAlias = Annotated[
    str | list[int | str | list[int]],
    Meta(description="one prompt: a string, or a list of token ids"),
]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides its text."""

    include_usage: bool | None = None


class KVTransferParams(msgspec.Struct, frozen=True):
    """What the gateway adds: clients cannot send it (docs/wire/worker-http.md)."""

    baton_ticket: str | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both bodies share."""

    model: Annotated[str, Meta(description="the name of a model that /v1/models lists")]
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    stop: Stop = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(max_length=1024, description="a short string")] | None = None
    kv_transfer_params: KVTransferParams | None = None


class CompletionFields(GenerationFields, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Prompt
    logprobs: NumLogprobs | None = None


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message; only text is understood."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: Annotated[str, Meta(min_length=1, max_length=64, description="a role such as 'user'")]
    content: Annotated[
        str | list[TextPart] | None, Meta(description="a string, or a list of text parts")
    ] = None
    name: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")


Messages: TypeAlias = Annotated[
    list[ChatMessage],
    Meta(min_length=1, description="a list of at least one message with 'role' and 'content'"),
]


class ChatFields(GenerationFields, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    chat_template_kwargs: (
        Annotated[
            dict[str, str | int | float | bool | None],
            Meta(description="an object of plain values"),
        ]
        | None
    ) = None


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
