"""Several workers' answers → one answer with several choices. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final, TypeAlias

import msgspec

from baton.errors import UNDECODABLE
from baton.gateway.errors import AnswerError, ErrorAnswer, UpstreamError
from baton.protocol.worker_http import CHAT_COMPLETIONS_PATH, END_OF_STREAM

DATA: Final = b"data:"
END_OF_EVENT: Final = b"\n\n"

Fields: TypeAlias = "dict[str, msgspec.Raw]"
Usage: TypeAlias = "dict[str, object]"

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_choices_decoder = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_usage_decoder = msgspec.json.Decoder(dict[str, object] | None)
_encode: Final = msgspec.json.Encoder().encode


class EventSplitter:
    """Cuts one stream into events, however its bytes arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, chunk: bytes) -> list[bytes]:
        """The events that are complete now: what follows `data:` in each."""
        *events, self._rest = (self._rest + chunk).split(END_OF_EVENT)
        return [event[len(DATA) :].strip() for event in events if event.startswith(DATA)]


class AnswerMerger:
    """The answers to one request, `num_answers` to each prompt, numbered prompt by prompt."""

    def __init__(self, path: str, request_id: str, created: int, num_answers: int) -> None:
        prefix = "chatcmpl-" if path == CHAT_COMPLETIONS_PATH else "cmpl-"
        self._id = msgspec.Raw(_encode(prefix + request_id))
        self._created = msgspec.Raw(b"%d" % created)
        self._num_answers = num_answers
        self._usages: dict[int, Usage] = {}
        self._prompt_details: dict[int, object] = {}
        self._last_usage: Fields = {}

    def note_prefill(self, prompt: int, answer: bytes) -> None:
        """What the request reported that computed a prompt for all its answers.

        Of these each would report that its prompt was cached, which for the client it was not.
        """
        usage = _read_usage(_decode(answer))
        if usage is not None and "prompt_tokens_details" in usage:
            self._prompt_details[prompt] = usage["prompt_tokens_details"]

    def rewrite(self, index: int, event: bytes) -> bytes:
        """One event of the answer `index` as the client gets it; empty where it gets none.

        Raises:
            AnswerError: the event is an error.
            UpstreamError: it is no event of OpenAI's.
        """
        if event == b"[DONE]":
            return b""
        fields = _decode(event)
        if "error" in fields:
            raise AnswerError(ErrorAnswer(HTTPStatus.BAD_GATEWAY, event))
        choices = _choices(fields, index)
        if not choices:
            usage = _read_usage(fields)
            if usage is not None:
                self._usages[index], self._last_usage = usage, fields
            return b""
        self._name(fields)
        fields["choices"] = msgspec.Raw(_encode(choices))
        return b"data: " + _encode(fields) + END_OF_EVENT

    def end(self) -> bytes:
        """What ends the stream: the usage, if it was asked for, and the end's own event."""
        if not self._usages:
            return END_OF_STREAM
        fields = self._last_usage
        self._name(fields)
        fields["usage"] = msgspec.Raw(_encode(self._sum_usage()))
        return b"data: " + _encode(fields) + END_OF_EVENT + END_OF_STREAM

    def merge(self, answers: list[bytes]) -> bytes:
        """All answers, each in one piece, as one.

        Raises:
            UpstreamError: one is no answer of OpenAI's.
        """
        choices: list[Fields] = []
        whole: Fields = {}
        for index, answer in enumerate(answers):
            fields = _decode(answer)
            choices += _choices(fields, index)
            usage = _read_usage(fields)
            if usage is not None:
                self._usages[index] = usage
            whole = whole or fields
        self._name(whole)
        whole["choices"] = msgspec.Raw(_encode(choices))
        if self._usages:
            whole["usage"] = msgspec.Raw(_encode(self._sum_usage()))
        return _encode(whole)

    def _name(self, fields: Fields) -> None:
        fields["id"], fields["created"] = self._id, self._created

    def _sum_usage(self) -> Usage:
        """The tokens of each prompt once, those of all answers."""
        total: Usage = {}
        for index, usage in sorted(self._usages.items()):
            prompt, answer = divmod(index, self._num_answers)
            counted = dict(usage)
            if prompt in self._prompt_details:
                counted["prompt_tokens_details"] = self._prompt_details[prompt]
            if answer:
                counted = {n: v for n, v in counted.items() if not n.startswith("prompt_")}
            total = _add(total, counted)
        sums = (total.get(name) for name in ("prompt_tokens", "completion_tokens"))
        total["total_tokens"] = sum(num for num in sums if isinstance(num, int))
        return total


def _decode(text: bytes) -> Fields:
    try:
        return _fields_decoder.decode(text)
    except UNDECODABLE as exc:
        raise UpstreamError(f"a worker's answer does not decode: {exc}") from exc


def _choices(fields: Fields, index: int) -> list[Fields]:
    """The choices of the answer `index`, named so."""
    try:
        choices = _choices_decoder.decode(fields.get("choices", b"[]"))
    except UNDECODABLE as exc:
        raise UpstreamError(f"a worker's choices do not decode: {exc}") from exc
    for choice in choices:
        choice["index"] = msgspec.Raw(b"%d" % index)
    return choices


def _read_usage(fields: Fields) -> Usage | None:
    try:
        usage: Usage | None = _usage_decoder.decode(fields.get("usage", b"null"))
    except UNDECODABLE as exc:
        raise UpstreamError(f"a worker's usage does not decode: {exc}") from exc
    return usage


def _add(left: Usage, right: Usage) -> Usage:
    """Numbers added, objects as well; of anything else the first that is not null."""
    total = dict(left)
    for name, value in right.items():
        known = total.get(name)
        if isinstance(known, int) and isinstance(value, int):
            total[name] = known + value
        elif isinstance(known, dict) and isinstance(value, dict):
            total[name] = _add(known, value)
        elif known is None:
            total[name] = value
    return total
