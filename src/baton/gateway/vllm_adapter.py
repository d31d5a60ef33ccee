"""vLLM's protocol: what its two legs are asked, and what of its answer a client gets.

vLLM knows no prefill leg: prefill is a completion of one token, whose text nobody reads. What it
hands to its connector, and what comes back from there, travels in `kv_transfer_params`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from baton.gateway.errors import ErrorAnswer
from baton.gateway.request import TRANSFER_FIELDS

if TYPE_CHECKING:
    from baton.gateway.request import CompletionBody

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

_ONE: Final = msgspec.Raw(b"1")
_encoder = msgspec.json.Encoder()
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def prefill_body(body: CompletionBody, ticket: str) -> bytes:
    """The body for vLLM as the ticket's prefill worker. `ticket` is base64url text."""
    fields = {name: raw for name, raw in body.fields.items() if name not in NOT_FOR_ONE_TOKEN}
    fields["max_tokens"] = _ONE
    if "max_completion_tokens" in fields:  # it would win
        fields["max_completion_tokens"] = _ONE
    fields["stream"] = msgspec.Raw(b"false")
    fields["kv_transfer_params"] = _transfer(ticket, "do_remote_decode")
    return _encoder.encode(fields)


def decode_body(body: CompletionBody, ticket: str) -> bytes:
    """The body for vLLM as the ticket's decode worker. `ticket` is base64url text."""
    transfer = _transfer(ticket, "do_remote_prefill")
    return _encoder.encode({**body.fields, "kv_transfer_params": transfer})


def client_answer(answer: bytes) -> bytes:
    """An answer in one piece without what its connector says; unchanged if it is not JSON."""
    try:
        fields = _fields_decoder.decode(answer)
    except msgspec.MsgspecError:
        return answer
    for name in TRANSFER_FIELDS:
        fields.pop(name, None)
    return _encoder.encode(fields)


def first_error(event: bytes) -> ErrorAnswer | None:
    """A stream's first event as the whole answer that it stands for; None if it is no 5xx."""
    text = event.partition(b"\n")[0].removeprefix(b"data: ")
    try:
        status = _error_decoder.decode(text).error.code
    except msgspec.MsgspecError:
        return None
    return ErrorAnswer(status, text, ((b"content-type", b"application/json"),))


class _Error(msgspec.Struct, frozen=True):
    """`code` is the status that it would have answered with."""

    code: Annotated[int, msgspec.Meta(ge=500, le=599)]


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


_error_decoder = msgspec.json.Decoder(_ErrorBody)


def _transfer(ticket: str, part: str) -> msgspec.Raw:
    return msgspec.Raw(f'{{"baton_ticket":"{ticket}","{part}":true}}'.encode())
