"""A request's body → its schema, or an error that says what, why and what to do."""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar, get_type_hints

import msgspec

from baton.errors import InvalidRequestError
from baton.worker.fields import ChatFields, ChatMessage, CompletionFields, GenerationFields
from baton.worker.unsupported import UnsupportedFields, refuse_unsupported

F = TypeVar("F", bound=GenerationFields)

_AT: Final = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_MISSING: Final = re.compile(r"missing required field `(?P<field>[^`]+)`")

_unsupported: Final = msgspec.json.Decoder(UnsupportedFields)
_completion: Final = msgspec.json.Decoder(CompletionFields)
_chat: Final = msgspec.json.Decoder(ChatFields)


def parse_completion(body: bytes) -> CompletionFields:
    """Decode the body of `POST /v1/completions`.

    Raises:
        InvalidRequestError: not JSON, a wrong type or value, or an unsupported field.
    """
    return _parse(body, _completion)


def parse_chat(body: bytes) -> ChatFields:
    """Decode the body of `POST /v1/chat/completions`.

    Raises:
        InvalidRequestError: not JSON, a wrong type or value, or an unsupported field.
    """
    return _parse(body, _chat)


def _parse(body: bytes, decoder: msgspec.json.Decoder[F]) -> F:
    try:
        fields = decoder.decode(body)
        refuse_unsupported(_unsupported.decode(body))
    except msgspec.ValidationError as exc:
        raise _explain(str(exc)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequestError(
            f"the body is not valid JSON: {exc}. Send one JSON object with "
            "'content-type: application/json'.",
            code="invalid_json",
        ) from exc
    return fields


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
