"""The same answer from its start, by another worker: what the client has is left out. Pure.

Compared is what the events hold, not their bytes: text, tool calls' arguments and the rest of what
an answer's events add to each other. Another worker may send the same tokens in other pieces, names
tool calls anew, and computes log-probabilities whose last digits may differ. Once it has sent all
that the client has, its events are passed on as they are, under the name of the first ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from baton.errors import UNDECODABLE
from baton.gateway.errors import ReplayDiffersError
from baton.gateway.stream_record import DATA, DONE, END_OF_EVENT
from baton.protocol.worker_http import END_OF_STREAM

if TYPE_CHECKING:
    from collections.abc import Iterator

Fields: TypeAlias = "dict[str, Any]"
Key: TypeAlias = "tuple[object, ...]"

ONCE_IN_CHOICE: Final = frozenset({"finish_reason", "stop_reason", "prompt_token_ids"})
ONCE_IN_DELTA: Final = frozenset({"role"})
ONCE_IN_CALL: Final = frozenset({"id", "type"})
KEPT_EMPTY: Final = frozenset({"text"})
COMPARED_LISTS: Final = frozenset({"tokens", "token_ids"})
"""Of others only the number of items is compared, and of each, where it has one, its `token`."""

_decoder = msgspec.json.Decoder(dict[str, Any])
_encode: Final = msgspec.json.Encoder().encode


class Replay:
    """`sent` are the events that the client has, whole ones."""

    def __init__(self, sent: bytes) -> None:
        self._sent: dict[Key, list[Any] | str] = {}
        self._at: dict[Key, int] = {}
        self._once: dict[Key, object] = {}
        self._head: Fields = {}
        self._has_usage = False
        self._renamed: list[tuple[bytes, bytes]] | None = None
        parts: dict[Key, list[Any]] = {}
        for event in sent.split(END_OF_EVENT):
            self._note(event, parts)
        for key, pieces in parts.items():
            is_text = isinstance(pieces[0], str)
            self._sent[key] = "".join(pieces) if is_text else [i for piece in pieces for i in piece]
        choices = {key[0] for key in (*self._sent, *self._once)}
        ended = all((choice, "finish_reason") in self._once for choice in choices)
        self._has_all = bool(choices) and ended
        self._awaited = set(self._once)

    def take(self, events: bytes) -> bytes:
        """Of the next events of the other worker's stream, whole ones: what the client lacks.

        Raises:
            ReplayDiffersError: it is another answer.
        """
        if self._renamed is None:
            left = b"".join(map(self._left_of, events.split(END_OF_EVENT)))
            if self.is_caught_up and not (self._awaited or self._has_all or self._has_usage):
                self._renamed = self._find_renamed(events)
            return left
        for theirs, ours in self._renamed:
            events = events.replace(theirs, ours)
        return events

    @property
    def is_caught_up(self) -> bool:
        """Whether all that the client has was found again, or it lacks only what ends a stream.

        Then it does not matter whether the last token is sampled again as the same one.
        """
        return self._has_all or all(
            self._at.get(key, 0) == len(value) for key, value in self._sent.items()
        )

    def _find_renamed(self, events: bytes) -> list[tuple[bytes, bytes]] | None:
        """What is replaced in all events that follow these; None: not found in the first of these.

        Nothing else is: within a text the quotes would be escaped.
        """
        first = events.partition(END_OF_EVENT)[0]
        fields, found = _read(first), []
        if fields is None:
            return None
        for name, value in self._head.items():
            key, theirs = b'"%b":' % name.encode(), _encode(fields.get(name))
            if key + theirs not in first:
                key += b" "
            if key + theirs not in first:
                return None
            if fields[name] != value:
                found.append((key + theirs, key + _encode(value)))
        self._sent.clear()
        self._at.clear()
        return found

    def _note(self, event: bytes, parts: dict[Key, list[Any]]) -> None:
        fields = _read(event)
        if fields is None:
            return
        self._head = self._head or {n: fields[n] for n in ("id", "created") if n in fields}
        if not fields.get("choices"):
            self._has_usage = self._has_usage or fields.get("usage") is not None
        for index, choice in _choices_of(fields):
            for key, holder, name in _grown_in(index, choice):
                pieces = parts.setdefault(key, [type(holder[name])()])
                if isinstance(holder[name], type(pieces[0])):
                    pieces.append(holder[name])
            for key, holder, name in _once_in(index, choice):
                if holder[name] is not None:
                    self._once[key] = holder[name]

    def _left_of(self, event: bytes) -> bytes:
        if event == DONE:
            self._check_caught_up()
            return END_OF_STREAM
        fields = _read(event)
        if fields is None:
            return b""
        choices = list(_choices_of(fields))
        if choices:
            if self._has_all:
                return b""
            fields["choices"] = left = [c for index, c in choices if self._has_news(index, c)]
            is_news = bool(left)
        else:
            is_news = not self._has_usage and fields.get("usage") is not None
        if not is_news:
            return b""
        self._check_caught_up()
        fields.update(self._head)
        return DATA + _encode(fields) + END_OF_EVENT

    def _has_news(self, index: int, choice: Fields) -> bool:
        """Leave out of a choice what was sent; whether something is left."""
        has_news = False
        for key, holder, name in list(_grown_in(index, choice)):
            left = self._left_in(key, name, holder[name])
            has_news = has_news or bool(left)
            if left or name in KEPT_EMPTY or "logprobs" in key:
                holder[name] = left
            elif holder[name]:
                del holder[name]
        for key, holder, name in list(_once_in(index, choice)):
            if holder[name] is not None:
                self._awaited.discard(key)
            if key not in self._once:
                has_news = has_news or holder[name] is not None
                continue
            if name == "finish_reason" and holder[name] not in (None, self._once[key]):
                raise ReplayDiffersError
            if name in ONCE_IN_CHOICE:
                holder[name] = None
            else:
                del holder[name]
        _leave_out_empty_calls(choice)
        return has_news

    def _left_in(self, key: Key, name: str, value: list[Any] | str) -> list[Any] | str:
        sent, at = self._sent.get(key, ""), self._at.get(key, 0)
        num = min(len(sent) - at, len(value))
        if num <= 0:
            return value
        if _compared(name, sent[at : at + num]) != _compared(name, value[:num]):
            raise ReplayDiffersError
        self._at[key] = at + num
        return value[num:]

    def _check_caught_up(self) -> None:
        if not self.is_caught_up:
            raise ReplayDiffersError


def _read(event: bytes) -> Fields | None:
    """An event's fields; None where it has none."""
    if not event.startswith(DATA):
        return None
    try:
        return _decoder.decode(event[len(DATA) :])
    except UNDECODABLE:
        return None


def _choices_of(fields: Fields) -> Iterator[tuple[int, Fields]]:
    choices = fields.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            yield _index(choice), choice


def _calls_of(choice: Fields) -> Iterator[tuple[int, Fields]]:
    calls = _fields(choice.get("delta")).get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            yield _index(call), call


def _index(item: Fields) -> int:
    index = item.get("index")
    return index if isinstance(index, int) else 0


def _leave_out_empty_calls(choice: Fields) -> None:
    calls = [call for _, call in _calls_of(choice) if any(call[n] for n in call.keys() - {"index"})]
    delta = _fields(choice.get("delta"))
    if calls:
        delta["tool_calls"] = calls
    else:
        delta.pop("tool_calls", None)


def _fields(value: object) -> Fields:
    return value if isinstance(value, dict) else {}


def _grown_in(index: int, choice: Fields) -> Iterator[tuple[Key, Fields, str]]:
    """What a choice's events add to each other: its name, the object it is in, its field there."""
    delta = _fields(choice.get("delta"))
    holders: list[tuple[Key, Fields, frozenset[str]]] = [
        ((index,), choice, ONCE_IN_CHOICE),
        ((index, "delta"), delta, ONCE_IN_DELTA | {"tool_calls"}),
        ((index, "function"), _fields(delta.get("function_call")), frozenset()),
        ((index, "logprobs"), _fields(choice.get("logprobs")), frozenset()),
    ]
    for number, call in _calls_of(choice):
        holders.append(((index, "call", number), _fields(call.get("function")), frozenset()))
    for prefix, holder, others in holders:
        for name, value in holder.items():
            if isinstance(value, str | list) and name not in others:
                yield (*prefix, name), holder, name


def _once_in(index: int, choice: Fields) -> Iterator[tuple[Key, Fields, str]]:
    """What comes once in a choice's events."""
    holders: list[tuple[Key, Fields, frozenset[str]]] = [
        ((index,), choice, ONCE_IN_CHOICE),
        ((index, "delta"), _fields(choice.get("delta")), ONCE_IN_DELTA),
    ]
    for number, call in _calls_of(choice):
        holders.append(((index, "call", number), call, ONCE_IN_CALL))
    for prefix, holder, names in holders:
        for name in names & holder.keys():
            yield (*prefix, name), holder, name


def _compared(name: str, value: list[Any] | str) -> object:
    if isinstance(value, str) or name in COMPARED_LISTS:
        return value
    return [item.get("token") if isinstance(item, dict) else None for item in value]
