"""A completion request's body and headers: parsed, stripped, rewritten; facts read from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from baton.auth.ticket import bind_salt
from baton.errors import UNDECODABLE, ContextLengthError, InvalidRequestError
from baton.gateway.errors import UnsupportedMediaTypeError
from baton.ids import RequestId, new_request_id
from baton.protocol.engine_fields import (
    ABSENT,
    REMOVED_FIELDS,
    VLLM_FIELDS,
    check_vllm_field,
    is_off,
    unsupported,
)
from baton.protocol.prompt_bounds import (
    MAX_IDS,
    check_ids,
    check_messages,
    count_chars,
    lists_ids,
)
from baton.protocol.request_fields import Resume
from baton.protocol.worker_http import (
    CHAT_COMPLETIONS_PATH,
    COMPLETIONS_PATH,
    REQUEST_ID_HEADER,
)
from baton.router.placement import NonDisaggregableField

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


TICKET_FIELD: Final = "kv_transfer_params"
TRANSFER_FIELDS: Final = (TICKET_FIELD, "ec_transfer_params")
"""vLLM's fields for what servers hand to each other; ours is the first."""

EXTRA_ARGUMENTS_FIELD: Final = "vllm_xargs"
"""vLLM merges these into the same place as `kv_transfer_params` and its like."""

REPORT_CACHED: Final = {"kv_cache_report_mode": msgspec.Raw(b'"full"')}
"""An extra argument of vLLM 0.32 (`v1/request.py`); versions that do not know it ignore it."""

NOT_FOR_ONE_TOKEN: Final = frozenset({
    "stream_options",
    "stream_interval",
    "n",
    "best_of",
    "use_beam_search",
    "min_tokens",
    "echo",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_prompt_text",
    "response_format",
    "structured_outputs",
})
"""Refused together with one token or without a stream, or work for nothing.

What shapes the prompt must stay (`tools`, `tool_choice`, `truncate_prompt_tokens`, chat template
settings), and sampling does no harm.
"""

MAX_REQUEST_ID_CHARS: Final = 128
MAX_MODEL_CHARS: Final = 256
MAX_ESCAPED_CHAR_BYTES: Final = 12
"""Of one character outside Unicode's first plane, written as two escapes."""
ALWAYS_SENT_BYTES: Final = 1 << 16
"""Of a prompt: whether it fits, its worker finds out as quickly."""
_JSON: Final = b"application/json"
_JSON_TYPE: Final = re.compile(rb"\s*application/([a-z0-9.-]+\+)?json\s*(;|$)", re.IGNORECASE)
_PRINTABLE: Final = frozenset(range(0x21, 0x7F))

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_nested_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_text_decoder = msgspec.json.Decoder(str)
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class CompletionBody:
    """The top level of a body, without what clients may not send.

    Each field's value is the client's own JSON text. `resume` is the part of the answer that the
    client has, for a Baton worker that goes on from there; `prompt_ids` are the prompt's tokens, a
    JSON list, for Baton workers that would get the same. `adapter` is the LoRA adapter that the
    client has named as its model, `model` is then the one that it belongs to.
    """

    model: str
    stream: bool
    fields: dict[str, msgspec.Raw]
    resume: Resume | None = None
    prompt_ids: msgspec.Raw | None = None
    adapter: str = ""

    @property
    def cache_salt(self) -> str:
        """What keeps this client's KV apart from others'; empty where it names none, or no text."""
        try:
            return _text_decoder.decode(self.fields.get("cache_salt", b'""'))
        except UNDECODABLE:
            return ""  # its worker refuses the request, or ignores the field

    @property
    def gives_ids(self) -> bool:
        """Whether the prompt is a list of token ids, or of such lists."""
        prompt = self.fields.get("prompt")
        return prompt is not None and lists_ids(memoryview(prompt))

    def check_ids(self, max_context_tokens: Callable[[], int]) -> None:
        """Refuse more token ids than the model's workers have room for, or cut off.

        Raises:
            InvalidRequestError: the prompt has more.
        """
        prompt = self.fields.get("prompt")
        if prompt is not None and lists_ids(memoryview(prompt)):
            is_cut = "truncate_prompt_tokens" in self.fields
            check_ids(bytes(prompt), MAX_IDS if is_cut else max_context_tokens())

    def check_text(self, max_prompt_chars: Callable[[], int | None]) -> None:
        """Refuse a prompt that is a text and certainly too long for the model's workers.

        Of a chat, its worker decides: how much of its JSON is text, only its template shows.

        Raises:
            ContextLengthError: it is.
        """
        raw = self.fields.get("prompt", ABSENT)
        if len(memoryview(raw)) <= ALWAYS_SENT_BYTES or "truncate_prompt_tokens" in self.fields:
            return
        num_chars = count_chars(bytes(raw))
        limit = max_prompt_chars()
        if limit is not None and num_chars > limit:
            raise ContextLengthError(
                f"this model's context holds no text of more than {limit} characters; the prompt "
                f"has {num_chars} or more. Shorten the prompt.",
                code="context_length_exceeded",
            )

    def for_one_token(self) -> CompletionBody:
        """The same prompt, for one token of which nothing matters."""
        fields = {name: raw for name, raw in self.fields.items() if name not in NOT_FOR_ONE_TOKEN}
        _limit(fields, 1)
        fields["stream"] = msgspec.Raw(b"false")
        return CompletionBody(self.model, stream=False, fields=fields, adapter=self.adapter)

    def for_copy(self, ids: list[int]) -> CompletionBody:
        """The same prompt and the answer's first tokens, for one more of which nothing matters."""
        fields = {name: raw for name, raw in self.fields.items() if name not in NOT_FOR_ONE_TOKEN}
        _limit(fields, len(ids) + 1)
        resume = Resume(ids)
        return CompletionBody(
            self.model, stream=True, fields=fields, resume=resume, adapter=self.adapter
        )

    def for_end(self, ids: list[int]) -> CompletionBody:
        """The same, for what follows the answer's end: one token is sampled again, for nothing."""
        fields = dict(self.fields)
        _limit(fields, len(ids) + 1)
        return replace(self, fields=fields)

    def for_report(self) -> CompletionBody:
        """The same; a vLLM server reports which of the prompt's blocks it has cached.

        Otherwise its KV events give only blocks that it had not cached before.
        """
        given = self.fields.get(EXTRA_ARGUMENTS_FIELD, b"{}")
        extra = {**_fields_decoder.decode(given), **REPORT_CACHED}
        raw = msgspec.Raw(_encoder.encode(extra))
        return replace(self, fields={**self.fields, EXTRA_ARGUMENTS_FIELD: raw})

    def encode(self) -> bytes:
        """The body for a worker that prefills and decodes itself."""
        if self.resume is None and self.prompt_ids is None:
            return _encoder.encode(self.fields)
        return self._encode_with(None)

    def encode_with_ticket(self, ticket: str) -> bytes:
        """The body for Baton workers, prefill and decode alike. `ticket` is base64url text."""
        return self._encode_with(ticket)

    def _encode_with(self, ticket: str | None) -> bytes:
        params: dict[str, object] = {} if ticket is None else {"baton_ticket": ticket}
        if self.resume is not None:
            params["baton_resume"] = self.resume
        if self.prompt_ids is not None:
            params["baton_prompt"] = self.prompt_ids
        return _encoder.encode({**self.fields, TICKET_FIELD: params})


def _limit(fields: dict[str, msgspec.Raw], most: int) -> None:
    """Set how many tokens an answer may have."""
    raw = msgspec.Raw(b"%d" % most)
    fields["max_tokens"] = raw
    if "max_completion_tokens" in fields:  # it would win
        fields["max_completion_tokens"] = raw


def parse_body(body: bytes, tenant: str = "", path: str = "") -> CompletionBody:
    """Read the top level. A `tenant`'s requests share KV with no other's, whatever their salts.

    The prompt of the other kind of completion is left out, if `path` is one's: workers ignore it.

    Raises:
        InvalidRequestError: not a JSON object in UTF-8, or `model`, `stream`, `tools` or
            `tool_choice` has another type, or the model's name is too long.
    """
    try:
        if not body.isascii():
            body.decode()  # what is forwarded as it came is text, too
        fields = _fields_decoder.decode(body)
    except (UnicodeError, *UNDECODABLE) as exc:
        raise InvalidRequestError(f"the body is not a JSON object: {exc}") from exc
    for name in TRANSFER_FIELDS:
        fields.pop(name, None)
    if EXTRA_ARGUMENTS_FIELD in fields:
        _strip_nested(fields)
    _strip_no_tools(fields)
    if path == COMPLETIONS_PATH and "messages" in fields:
        del fields["messages"]
    elif path == CHAT_COMPLETIONS_PATH and "prompt" in fields:
        del fields["prompt"]
    if "messages" in fields:
        check_messages(bytes(fields["messages"]))
    if tenant:
        fields["cache_salt"] = _bind_salt(fields, tenant)
    return CompletionBody(_model(fields), _stream(fields), fields)


def _strip_no_tools(fields: dict[str, msgspec.Raw]) -> None:
    """Leave out an empty list of tools, which vLLM refuses, and how to choose from it."""
    for name in ("tools", "tool_choice"):
        if name in fields:
            check_vllm_field(name, fields[name])
    if "tools" in fields and is_off("tools", fields["tools"]):
        del fields["tools"]
    choice = fields.get("tool_choice")
    if choice is not None and "tools" not in fields and is_off("tool_choice", choice):
        del fields["tool_choice"]


def _bind_salt(fields: dict[str, msgspec.Raw], tenant: str) -> msgspec.Raw:
    """The client's salt within its tenant's."""
    try:
        own = msgspec.json.decode(fields.get("cache_salt", b"null"), type=str | None) or ""
    except UNDECODABLE as exc:
        raise InvalidRequestError("cache_salt must be a string", param="cache_salt") from exc
    return msgspec.Raw(_encoder.encode(bind_salt(tenant, own)))


def _strip_nested(fields: dict[str, msgspec.Raw]) -> None:
    try:
        nested = _nested_decoder.decode(fields[EXTRA_ARGUMENTS_FIELD]) or {}
    except UNDECODABLE as exc:
        raise InvalidRequestError(
            f"{EXTRA_ARGUMENTS_FIELD} must be an object", param=EXTRA_ARGUMENTS_FIELD
        ) from exc
    for name in TRANSFER_FIELDS:
        nested.pop(name, None)
    fields[EXTRA_ARGUMENTS_FIELD] = msgspec.Raw(_encoder.encode(nested))


def _model(fields: dict[str, msgspec.Raw]) -> str:
    if "model" not in fields:
        raise InvalidRequestError("you must name a model", param="model")
    raw = fields["model"]
    if len(memoryview(raw)) > MAX_ESCAPED_CHAR_BYTES * MAX_MODEL_CHARS + 2:
        raise _model_too_long()
    try:
        model = _text_decoder.decode(raw)
    except UNDECODABLE as exc:
        raise InvalidRequestError("model must be a string", param="model") from exc
    if len(model) > MAX_MODEL_CHARS:
        raise _model_too_long()
    return model


def _model_too_long() -> InvalidRequestError:
    return InvalidRequestError(
        f"the model's name has more than {MAX_MODEL_CHARS} characters", param="model"
    )


def _stream(fields: dict[str, msgspec.Raw]) -> bool:
    match bytes(fields["stream"]) if "stream" in fields else b"null":
        case b"true":
            return True
        case b"false" | b"null":
            return False
        case _:
            raise InvalidRequestError("stream must be true or false", param="stream")


def check_content_type(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Pass if the body may be JSON: the client named that, or nothing.

    Raises:
        UnsupportedMediaTypeError: it named something else.
    """
    for name, value in headers:
        if name == b"content-type" and value != _JSON and not _JSON_TYPE.match(value):
            raise UnsupportedMediaTypeError(
                f"a body of {value[:100].decode('latin-1')!r} cannot be read; send one JSON "
                "object with 'content-type: application/json'"
            )


def request_id_from(headers: Iterable[tuple[bytes, bytes]]) -> RequestId:
    """The client's `x-request-id` if it is fit to be logged and forwarded, else a fresh one."""
    for name, value in headers:
        if name == REQUEST_ID_HEADER.encode():
            if 0 < len(value) <= MAX_REQUEST_ID_CHARS and _PRINTABLE.issuperset(value):
                return RequestId(value.decode("ascii"))
            break
    return new_request_id()


BYTES_PER_TOKEN: Final = 4
"""Of JSON text: about right for English with the usual tokenizers, and for lists of token ids."""

PROMPT_FIELDS: Final = ("messages", "prompt", "tools")


def estimate_prompt_tokens(body: CompletionBody) -> int:
    """Tokens of a request's prompt, to within a factor of two or so."""
    sizes = (len(memoryview(body.fields[name])) for name in PROMPT_FIELDS if name in body.fields)
    return sum(sizes) // BYTES_PER_TOKEN


_FALSE: Final = frozenset({b"false", b"null"})
_NULL: Final = frozenset({b"null"})

HARMLESS: Final = {
    NonDisaggregableField.USE_BEAM_SEARCH: _FALSE,
    NonDisaggregableField.ECHO: _FALSE,
    NonDisaggregableField.PROMPT_LOGPROBS: _NULL,
    NonDisaggregableField.PROMPT_EMBEDS: _NULL,
}
"""The values with which a field changes nothing."""


def find_non_disaggregable_field(body: CompletionBody) -> NonDisaggregableField | None:
    """The first field that makes a request one of these; None for nearly all requests."""
    fields = body.fields
    if not HARMLESS.keys().isdisjoint(fields):
        for field, harmless in HARMLESS.items():
            if field in fields and bytes(fields[field]) not in harmless:
                return field
    return None


_CHECKED_FIELDS: Final = frozenset(REMOVED_FIELDS) | VLLM_FIELDS.keys()


def find_vllm_field(body: CompletionBody) -> str | None:
    """The first field that is on and that only vLLM serves; None for nearly all requests.

    Raises:
        InvalidRequestError: a field is on that nothing serves, or has another type than it may.
    """
    if _CHECKED_FIELDS.isdisjoint(body.fields):
        return None
    for name in REMOVED_FIELDS & body.fields.keys():
        if not is_off(name, body.fields[name]):
            raise unsupported(name, body.fields[name])
    named = VLLM_FIELDS.keys() & body.fields.keys()
    for name in sorted(named):
        check_vllm_field(name, body.fields[name])
    return next((name for name in sorted(named) if not is_off(name, body.fields[name])), None)
