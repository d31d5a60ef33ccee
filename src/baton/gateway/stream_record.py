"""What a client has of one stream, as far as another worker needs it to go on. Pure.

    chunk ─► whole events only ─► to the client
                  └─► kept: the tokens' ids, where the worker adds them; the events themselves,
                      where another worker's are compared with them (vLLM's)

A worker that is asked to (`TOKEN_IDS_HEADER`) puts a comment before each event that has text, with
the ids of the tokens that it ends: `:17,18`. The client does not get it. vLLM's servers begin it
before the event is there, and write a space between tokens that were one output of the engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import UNDECODABLE
from baton.gateway.cached_tokens import replace_cached_tokens
from baton.gateway.errors import ReplayDiffersError, UpstreamError, WorkerReportedError

if TYPE_CHECKING:
    from baton.gateway.stream_replay import Replay

MAX_RECORD_BYTES: Final = 4 << 20
"""Of one stream: what is longer ends with its worker."""
RESERVED_BYTES: Final = 64 << 10
"""Taken at a time of what all streams may keep."""
CHUNK_OVERHEAD_BYTES: Final = 64
END_OF_EVENT: Final = b"\n\n"
DATA: Final = b"data: "
DONE: Final = b"data: [DONE]"
FINISH: Final = b'"finish_reason"'
NO_FINISH: Final = b'"finish_reason":null'
USAGE: Final = b'"usage"'
NO_USAGE: Final = b'"usage":null'
ERROR_EVENT: Final = b'data: {"error"'
COMMENT: Final = b":"


class RecordBudget:
    """Bytes that the records of all streams keep. Owner: the event loop's thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Take some more; False where so much is not there."""
        if self.num_bytes + num_bytes > self._max_bytes:
            return False
        self.num_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Nothing is kept there any more."""
        self.num_bytes -= num_bytes


class StreamRecord:
    """One stream's. `max_event_bytes` bounds an event that has not come to its end.

    `num_taken` counts what was passed on. `failure` is why the stream that is read cannot go on,
    though its connection may: for example, the worker reported an error, which is not passed on.
    `num_cached`: the cached tokens that usage is to show; None: those of the worker that answers.
    """

    def __init__(self, budget: RecordBudget, max_event_bytes: int) -> None:
        self._budget, self._max_event_bytes = budget, max_event_bytes
        self._num_reserved = self._num_kept_bytes = 0
        self._ids, self._ids_before = bytearray(), bytearray()
        self._counted = self._ids, 0, 0  # up to where, and how many there are
        self._chunks: list[bytes] = []
        self._rest = self._last = b""
        self._replay: Replay | None = None
        self.has_ids = self._has_events = False
        self.is_kept = True
        self.num_taken = 0
        self.num_cached: int | None = None
        self.failure: UpstreamError | None = None

    def begin(
        self, *, has_ids: bool, has_events: bool = False, replay: Replay | None = None
    ) -> None:
        """A worker's stream begins. It goes on from what was taken, or is a `replay` of it.

        Of one that `has_events`, or without ids, they are kept, since only a replay follows it: the
        ids in a replay are those of the whole answer, again. Until it has named as many, those
        before it count: its worker may be lost before that. Where nothing was taken, it is another
        answer, of other tokens.
        """
        self._rest, self.failure, self._replay = b"", None, replay
        has_events = has_events or not has_ids
        if self.num_taken and has_events != self._has_events:
            self._drop()
        if replay is not None or not self.num_taken:
            known = self._known_ids if self.num_taken else bytearray()
            self._num_kept_bytes -= len(self._ids) + len(self._ids_before) - len(known)
            self._ids_before, self._ids = known, bytearray()
        self.has_ids, self._has_events = has_ids, has_events

    def take(self, chunk: bytes) -> bytes:
        """What of it goes to the client now; the hot path.

        An event that is not complete waits for its end: where its worker dies before that, the
        client has got none of it.
        """
        if self._rest or not chunk.endswith(END_OF_EVENT):
            chunk = self._complete(chunk)
        if ERROR_EVENT in chunk:
            chunk = self._cut(chunk)
        if self.has_ids:
            chunk = self._strip(chunk)
            if self._rest and self._has_events:
                self._note_begun()
        if self._replay is not None:
            chunk = self._skip_sent(chunk, self._replay)
        if not chunk:
            return b""
        if self._has_events:
            self._chunks.append(chunk)
            self._num_kept_bytes += len(chunk) + CHUNK_OVERHEAD_BYTES
        if self._num_kept_bytes > self._num_reserved:
            self._reserve()
        self._last = chunk
        self.num_taken += 1
        return chunk

    def read_token_ids(self) -> list[int] | None:
        """The tokens that the client has; None where a worker wrote what are no ids."""
        try:
            return _ids_decoder.decode(b"[%b]" % bytes(self._known_ids[:-1]))
        except UNDECODABLE:
            return None

    def read_group_sizes(self) -> list[int] | None:
        """How many tokens each of a vLLM engine's outputs had; None: one."""
        groups = bytes(self._known_ids[:-1]).replace(b", ", b" ").split(b",")
        sizes = [group.count(b" ") + 1 for group in groups]
        return sizes if max(sizes) > 1 else None

    @property
    def num_ids(self) -> int:
        """How many tokens the client has, as far as their ids are kept.

        It is read for each stream all the time: only what was added since is looked at.
        """
        ids, (counted, end, num) = self._known_ids, self._counted
        if counted is not ids:
            end = num = 0
        num += ids.count(b",", end)
        self._counted = ids, len(ids), num
        return num

    @property
    def _known_ids(self) -> bytearray:
        return max(self._ids, self._ids_before, key=len)

    @property
    def events(self) -> bytes:
        """All that was passed on."""
        return b"".join(self._chunks)

    @property
    def is_finished(self) -> bool:
        """Whether the client has got the reason for which the answer ends, or what follows it.

        It is read for each stream all the time: events with `null` in these fields are not decoded.
        """
        last = self._last
        if (
            DONE not in last
            and last.count(FINISH) == last.count(NO_FINISH)
            and last.count(USAGE) == last.count(NO_USAGE)
        ):
            return False
        return any(map(_has_finish, last.split(END_OF_EVENT)))

    @property
    def has_usage(self) -> bool:
        """Whether the last that the client has got is usage: nothing follows it but `[DONE]`."""
        return any(map(_is_usage, self._last.split(END_OF_EVENT)))

    @property
    def can_go_on(self) -> bool:
        """Whether another worker could go on with it, and has something to compute."""
        return self.is_kept and not self.is_finished

    def close(self) -> None:
        """Give back what it keeps."""
        self._drop()

    def _complete(self, chunk: bytes) -> bytes:
        whole, end, self._rest = (self._rest + chunk).rpartition(END_OF_EVENT)
        if len(self._rest) > self._max_event_bytes:
            self.failure = UpstreamError(
                f"a worker sent an event of more than {self._max_event_bytes} bytes"
            )
        return whole + end

    def _note_begun(self) -> None:
        """Those of a comment whose event is yet to come count, too: a replay brings that.

        There may be any number of them: what waits for its end is to stay short.
        """
        comment, line_end, event = self._rest.partition(b"\n")
        if not comment.startswith(COMMENT):
            return
        ids, comma, last = comment[1:].rpartition(b",")
        self._ids += ids + comma
        self._num_kept_bytes += len(ids + comma)
        self._rest = COMMENT + last + line_end + event
        if self._num_kept_bytes > self._num_reserved:
            self._reserve()

    def _cut(self, chunk: bytes) -> bytes:
        before, event, after = chunk.partition(ERROR_EVENT)
        error = (event + after).partition(END_OF_EVENT)[0]
        self.failure = WorkerReportedError(error[len(DATA) :])
        return before

    def _skip_sent(self, chunk: bytes, replay: Replay) -> bytes:
        try:
            return replay.take(chunk)
        except ReplayDiffersError as exc:  # raised here, it would reach no task
            self.failure = exc
            return b""

    def _strip(self, chunk: bytes) -> bytes:
        """Without the comments; the ids in them are noted."""
        if chunk.startswith(COMMENT) and chunk.find(END_OF_EVENT) == len(chunk) - 2:
            ids, _, event = chunk.partition(b"\n")
            self._ids += ids[1:] + b","
            self._num_kept_bytes += len(ids)
            return event
        events = []
        for event in chunk.split(END_OF_EVENT):
            if event.startswith(COMMENT):
                ids, _, rest = event.partition(b"\n")
                self._ids += ids[1:] + b","
                self._num_kept_bytes += len(ids)
                events.append(rest)
            elif self.num_cached is not None:  # usage has no token of its own
                events.append(replace_cached_tokens(event, self.num_cached))
            else:
                events.append(event)
        return END_OF_EVENT.join(events)

    def _reserve(self) -> None:
        wanted = self._num_kept_bytes - self._num_reserved + RESERVED_BYTES
        if self.is_kept and self._num_kept_bytes <= MAX_RECORD_BYTES and self._budget.take(wanted):
            self._num_reserved += wanted
        else:
            self._drop()

    def _drop(self) -> None:
        self.is_kept = False
        self._chunks.clear()
        self._ids, self._ids_before = bytearray(), bytearray()
        self._budget.give_back(self._num_reserved)
        self._num_reserved = self._num_kept_bytes = 0


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: msgspec.Raw = msgspec.Raw()


_ids_decoder = msgspec.json.Decoder(list[int])
_event_decoder = msgspec.json.Decoder(_Event)


def _has_finish(event: bytes) -> bool:
    """Whether an event has the reason, or is one of those that follow it: usage, `[DONE]`."""
    choices = _decode(event).choices
    has_reason = any(choice.finish_reason is not None for choice in choices)
    return has_reason or event == DONE or _is_usage(event)


def _is_usage(event: bytes) -> bool:
    decoded = _decode(event)
    return not decoded.choices and bytes(decoded.usage) not in {b"", b"null"}


def _decode(event: bytes) -> _Event:
    """An event; an empty one for what is none."""
    try:
        return _event_decoder.decode(event.removeprefix(DATA))
    except UNDECODABLE:
        return _Event()
