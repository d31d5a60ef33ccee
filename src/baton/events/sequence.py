"""One publisher's messages in order: each is delivered once, or the consumer is told to forget.

Messages carry a number, and nothing that says in which life of the publisher it was given. So a
number alone proves nothing: after each new connection, and whenever one is missing, the publisher
is asked to repeat everything from the last delivered message *on, that one included*. Its digest
proves that the publisher is still the one that was followed.

    in sync ── a number is missing, or a new connection ──► replaying ── answered ──► in sync
                                                                │
              Restarted, ask from 0 ◄── another digest ─────────┤
              Lost, go on from what there is ◄── out of reach ──┘

Pure: the caller reads sockets and clocks. No step is taken but in reply to one of the verbs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.events.blocks import Lost, NumberedBatch, Restarted

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_HELD: Final = 10_000
"""Live messages that wait for an answer. Those beyond are dropped, and asked for again."""

NUM_REMEMBERED: Final = 16_384
"""Digests of delivered messages, to tell a late copy from another life's message. A copy older
than these counts as a restart, which costs a replay, never a wrong state."""

MAX_ATTEMPTS: Final = 3
"""How often a question that brought nothing is asked again."""


class ReplayCause(StrEnum):
    """Why a replay is asked for."""

    CONNECTED = "connected"
    GAP = "gap"
    RESTART = "restart"
    AUDIT = "audit"


@dataclass(frozen=True, slots=True)
class Deliver:
    """The next batch of this life."""

    batch: NumberedBatch


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask for everything from this number on. An answer to an earlier question is void now."""

    start: int
    cause: ReplayCause


SequencerAction: TypeAlias = Deliver | RequestReplay | Restarted | Lost


@dataclass(slots=True)
class SequenceCounts:
    """Since the sequencer was made. Audits do not count as replays."""

    gaps: int = 0
    replays: int = 0
    lost: int = 0
    restarts: int = 0
    duplicates: int = 0


@dataclass(slots=True)
class _PendingReplay:
    """A replay that was asked for and is not finished.

    `for_gap`: something was known to be missing when it was asked for. An answer may have been
    given before what shows a gap only now was published, so that it says nothing about that.
    """

    start: int
    cause: ReplayCause
    for_gap: bool
    attempts: int = 1
    answered: bool = False
    progressed: bool = False


class Sequencer:
    """The order of one publisher's messages. One owner thread.

    Every verb returns the steps that it causes, in order. `Deliver` runs without a hole within
    one life, from number 0 or from the last `Lost` on.
    """

    def __init__(self, max_held: int = MAX_HELD, num_remembered: int = NUM_REMEMBERED) -> None:
        self.counts = SequenceCounts()
        self._max_held, self._num_remembered = max_held, num_remembered
        self._last: NumberedBatch | None = None
        self._expected: int | None = 0  # None: whatever comes next, after a loss
        self._unproven = False
        self._pending: _PendingReplay | None = None
        self._held: dict[int, NumberedBatch] = {}
        self._dropped: int | None = None  # the highest number that found no room in `_held`
        self._remembered: dict[int, int] = {}
        self._steps: list[SequencerAction] = []

    @property
    def last_seq(self) -> int | None:
        """The number of the last batch delivered in this life."""
        return None if self._last is None else self._last.seq

    @property
    def is_replaying(self) -> bool:
        """Whether an answer is awaited."""
        return self._pending is not None

    def connected(self) -> list[SequencerAction]:
        """There is a new connection: messages of an earlier one will not come any more."""
        self._held.clear()
        self._dropped = None
        self._unproven = self._last is not None
        return self._collect(lambda: self._request_replay(ReplayCause.CONNECTED))

    def live(self, message: NumberedBatch) -> list[SequencerAction]:
        """A message came over the live connection."""
        return self._collect(lambda: self._take_live(message))

    def replayed(self, message: NumberedBatch) -> list[SequencerAction]:
        """A message came in answer to the latest question. Ignored if none is open."""
        pending = self._pending
        if pending is None:
            return []
        return self._collect(lambda: self._take_replayed(pending, message))

    def replay_ended(self) -> list[SequencerAction]:
        """The answer to the latest question is complete."""
        pending = self._pending
        if pending is None:
            return []
        return self._collect(lambda: self._settle(pending))

    def replay_timed_out(self) -> list[SequencerAction]:
        """The latest question was not answered, or not to its end, in time."""
        pending = self._pending
        if pending is None:
            return []
        if pending.progressed or pending.attempts < MAX_ATTEMPTS:
            attempts = 1 if pending.progressed else pending.attempts + 1
            return self._collect(lambda: self._request_replay(pending.cause, attempts))
        return self._collect(self._abandon_replay)

    def replay_impossible(self) -> list[SequencerAction]:
        """There is nobody to ask: the publisher keeps no messages."""
        return self._collect(self._abandon_replay)

    def audit(self) -> list[SequencerAction]:
        """Ask whether anything was missed after the last message. Nothing while replaying."""
        return (
            [] if self._pending else self._collect(lambda: self._request_replay(ReplayCause.AUDIT))
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if the state cannot be.

        Raises:
            AssertionError: what is known contradicts itself.
        """
        if self._last is not None and self._expected != self._last.seq + 1:
            raise AssertionError(f"after {self._last.seq}, {self._expected} is expected")
        if self._pending is None and (self._held or self._unproven or self._dropped is not None):
            raise AssertionError("something is missing and nothing was asked")
        if len(self._held) > self._max_held or len(self._remembered) > self._num_remembered:
            raise AssertionError("more is kept than there is room for")
        if self._steps:
            raise AssertionError("steps were not returned")

    # ── live ───────────────────────────────────────────────────────────────────────────────────

    def _take_live(self, message: NumberedBatch) -> None:
        if self._pending is not None:
            self._hold(message)
            return
        self._place(message)
        if self._has_unasked_gap():
            self.counts.gaps += 1
            self._request_replay(ReplayCause.GAP)

    def _place(self, message: NumberedBatch) -> None:
        """Deliver, hold or drop a message by its number."""
        if self._expected is None or message.seq == self._expected:
            self._deliver(message)
        elif message.seq > self._expected:
            self._hold(message)
        elif self._remembered.get(message.seq) == message.digest:
            self.counts.duplicates += 1
        else:
            self._restart()
            self._hold(message)

    def _hold(self, message: NumberedBatch) -> None:
        if len(self._held) < self._max_held or message.seq in self._held:
            self._held[message.seq] = message
        else:
            self._dropped = max(message.seq, self._dropped or 0)

    def _deliver(self, message: NumberedBatch) -> None:
        self._steps.append(Deliver(message))
        self._last, self._expected = message, message.seq + 1
        self._remembered[message.seq] = message.digest
        self._remembered.pop(message.seq - self._num_remembered, None)
        if self._pending is not None:
            self._pending.progressed = True

    # ── answers ────────────────────────────────────────────────────────────────────────────────

    def _take_replayed(self, pending: _PendingReplay, message: NumberedBatch) -> None:
        """An answer begins with the number asked for, unless the publisher has it no more."""
        if pending.answered:
            self._place(message)
        elif message.seq >= pending.start:  # else: not what was asked for
            pending.answered = True
            self._take_first_replayed(pending, message)

    def _take_first_replayed(self, pending: _PendingReplay, message: NumberedBatch) -> None:
        if message.seq > pending.start:
            self._lose(before=message.seq)
        self._unproven = False
        self._place(message)  # where it is the last one, its digest tells whose answer this is

    def _settle(self, pending: _PendingReplay) -> None:
        """The answer is over: go on with what came in the meantime."""
        if self._last is not None and not pending.answered:
            self._restart()  # this publisher has not come as far as the one that was followed
            return
        self._place_held()
        if self._pending is not pending:
            return  # what was held told of another life
        if not self._is_missing():
            self._pending = None
        elif pending.progressed or not pending.for_gap:
            self._request_replay(ReplayCause.GAP)
        else:
            self._abandon_replay()

    def _abandon_replay(self) -> None:
        """What is missing stays missing: go on with what there is."""
        self._pending = None
        if not self._unproven:
            self._place_held()
        if not (self._unproven or self._has_unasked_gap()):
            return
        self._lose(before=min(self._held, default=None))
        self._dropped = None
        self._place_held()
        if self._has_unasked_gap():
            self._request_replay(ReplayCause.GAP)

    def _place_held(self) -> None:
        for seq in sorted(self._held):
            message = self._held.pop(seq, None)
            if message is None:
                return  # the one before told of another life
            self._place(message)
        if self._dropped is not None and self._expected is not None:
            self._dropped = self._dropped if self._dropped >= self._expected else None

    # ── both ───────────────────────────────────────────────────────────────────────────────────

    def _is_missing(self) -> bool:
        return bool(self._held) or self._dropped is not None

    def _has_unasked_gap(self) -> bool:
        return self._pending is None and self._is_missing()

    def _request_replay(self, cause: ReplayCause, attempts: int = 1) -> None:
        start = 0 if self._last is None else self._last.seq
        self._pending = _PendingReplay(start, cause, self._is_missing(), attempts)
        self.counts.replays += cause is not ReplayCause.AUDIT
        self._steps.append(RequestReplay(start, cause))

    def _restart(self) -> None:
        """Another life: its messages are asked for from the first on, held ones are of no use."""
        self.counts.restarts += 1
        self._steps.append(Restarted())
        self._held, self._dropped = {}, None
        self._forget(0)
        self._request_replay(ReplayCause.RESTART)

    def _lose(self, before: int | None) -> None:
        """Go on from number `before`; None: from whatever comes next."""
        self.counts.lost += 1
        self._steps.append(Lost(self._expected or 0))
        self._held = {s: m for s, m in self._held.items() if before is None or s >= before}
        self._forget(before)

    def _forget(self, expected: int | None) -> None:
        self._last, self._expected, self._unproven = None, expected, False
        self._remembered = {}

    def _collect(self, take: Callable[[], None]) -> list[SequencerAction]:
        take()
        steps, self._steps = self._steps, []
        return steps
