"""The streams that are under way, each at the worker that generates it: what can be moved."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import UNDECODABLE
from baton.gateway.errors import UpstreamError
from baton.router.rebalance import TYPICAL_ANSWER_TOKENS, StreamLoad

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from baton.clock import Instant
    from baton.gateway.request import CompletionBody
    from baton.gateway.request_context import RequestContext
    from baton.gateway.resumption import Resumption
    from baton.gateway.standby import Standby
    from baton.ids import WorkerId
    from baton.router.fleet import ModelWorkers, WorkerView
    from baton.router.placement import Placement
    from baton.router.prefixes import PromptMatch
    from baton.router.rebalance import MoveCause

REST_TOKENS: Final = 32
"""Left to be computed where a stream moves to: one step, hardly longer than one of few tokens."""
LIMIT_FIELDS: Final = ("max_completion_tokens", "max_tokens")

_count_decoder = msgspec.json.Decoder(int | None)


class StreamMovedError(UpstreamError):
    """No failure: the stream was cut behind a whole event, to go on as `placement` names.

    `standby` is the request that waits there for it, if there is one.
    """

    def __init__(
        self, placement: Placement, cause: MoveCause, standby: Standby | None = None
    ) -> None:
        super().__init__(f"the stream moves to {placement.decode.id} ({cause})")
        self.placement, self.cause, self.standby = placement, cause, standby


@dataclass(slots=True, eq=False)
class RunningStream:
    """One attempt's stream, from its request to `decode` to its end there.

    `write_headers` gives the header lines of a request on its behalf. `move_task` is the move that
    is under way; it ends with the stream, and so does `standby`, the request that waits for it at
    another worker. `num_too_slow`: moves that took too long, the latest ones in a row. Until
    `not_before` it is not moved again. `looked_at`: when it was looked at last, and how many tokens
    it had. Owner: the event loop's thread.
    """

    context: RequestContext
    body: CompletionBody
    resumption: Resumption
    decode: WorkerView
    num_prompt_tokens: int
    match: PromptMatch | None
    write_headers: Callable[[RequestContext], bytes]
    move_task: asyncio.Task[None] | None = None
    standby: Standby | None = None
    not_before: Instant | None = None
    num_too_slow: int = 0
    num_copies: int = 0
    looked_at: tuple[float, int] | None = None

    @property
    def can_move(self) -> bool:
        """Whether it flows here, its tokens so far are known exactly, and some are missing."""
        record = self.resumption.record
        return (
            self.move_task is None
            and record.has_ids
            and record.num_taken > self.resumption.num_before
            and record.failure is None
            and record.can_go_on
        )

    def can_go_to(self, worker: WorkerView) -> bool:
        """Whether a worker goes on with what this one began: both speak alike, and it has room."""
        if self.body.adapter and self.body.adapter not in worker.adapters:
            return False
        if worker.max_context_tokens < self.decode.max_context_tokens:
            num_prompt = self.resumption.num_prompt_tokens
            if worker.max_context_tokens < count_needed(self.body, num_prompt, self.decode):
                return False
        return worker.resumes_streams and worker.protocol == self.decode.protocol

    def is_due(self, now: float) -> bool:
        """Whether it can be moved now: not so soon after a move that failed."""
        return self.can_move and (self.not_before is None or self.not_before <= now)

    def count_since_look(self, now: float) -> tuple[float, int]:
        """Seconds since it was looked at last, and tokens that came since."""
        num = self.resumption.record.num_ids
        before, self.looked_at = self.looked_at, (now, num)
        return (0.0, 0) if before is None else (now - before[0], num - before[1])

    def load(
        self, key: int, limit_s: float, gap_limit_s: float, *, served: ModelWorkers
    ) -> StreamLoad:
        """What rebalancing looks at, with its limits; `served`: the workers of its model."""
        excluded: frozenset[WorkerId] = frozenset()
        if self.body.adapter or served.least_context_tokens < self.decode.max_context_tokens:
            excluded = frozenset(w.id for w in served.decodes if not self.can_go_to(w))
        return StreamLoad(
            key,
            self.decode.id,
            self.num_tokens,
            self.num_left,
            limit_s,
            self.resumption.num_moves,
            self.resumption.moved_at,
            gap_limit_s,
            excluded,
        )

    @property
    def num_tokens(self) -> int:
        """About as many as are to be handed over: its prompt's, and those of the answer so far."""
        return self.num_prompt_tokens + self.resumption.record.num_ids

    def count_cached(self, num_ids: int) -> int | None:
        """Tokens in the whole blocks that its worker has cached, once the client has `num_ids`.

        None: the worker has not reported its blocks' size, or the length of the prompt.
        """
        num_prompt, load = self.resumption.num_prompt_tokens, self.decode.load
        if num_prompt is None or load is None:
            return None
        num_computed = num_prompt + num_ids - 1  # not yet the last one, where it was sampled
        return num_computed - num_computed % load.block_size

    @property
    def num_left(self) -> int:
        """Tokens that the answer may still have."""
        most = find_most_tokens(self.body)
        if most is None:
            return TYPICAL_ANSWER_TOKENS
        return max(0, most - self.resumption.record.num_ids)

    def note_not_moved(self, *, was_too_slow: bool) -> None:
        """A move failed; its standby is the caller's now."""
        self.num_too_slow = self.num_too_slow + 1 if was_too_slow else 0
        self.move_task = self.standby = None

    def release_standby(self) -> None:
        """It does not move."""
        standby, self.standby = self.standby, None
        if standby is not None:
            standby.release()

    def cut(self, moved: StreamMovedError) -> None:
        """End it here with its next event: it goes on elsewhere."""
        self.resumption.record.failure = moved


def find_most_tokens(body: CompletionBody) -> int | None:
    """Tokens that an answer may have, where its client names a number."""
    for name in LIMIT_FIELDS:
        try:
            most: int | None = _count_decoder.decode(body.fields.get(name, b"null"))
        except UNDECODABLE:
            continue  # its worker refuses it
        if most is not None:
            return most
    return None


def count_needed(body: CompletionBody, num_prompt: int | None, began: WorkerView) -> float:
    """Tokens that a worker needs room for, so that the answer is no shorter than where it began."""
    most = find_most_tokens(body)
    if num_prompt is None or most is None:
        return began.max_context_tokens
    return min(num_prompt + most, began.max_context_tokens)


class RunningStreams:
    """All of one gateway. Owner: the event loop's thread."""

    def __init__(self) -> None:
        self._streams: dict[RunningStream, None] = {}

    def all(self) -> tuple[RunningStream, ...]:
        """Those under way, oldest first."""
        return tuple(self._streams)

    @contextmanager
    def hold(self, stream: RunningStream) -> Iterator[None]:
        """A stream is under way while the block runs; so is what moves it."""
        self._streams[stream] = None
        try:
            yield
        except StreamMovedError:
            stream.standby = None  # the error's now
            raise
        finally:
            del self._streams[stream]
            if stream.move_task is not None:
                stream.move_task.cancel()
            stream.release_standby()
