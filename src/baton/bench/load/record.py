"""One request, as it is saved."""

from __future__ import annotations

from typing import Literal

import msgspec

from baton.bench.load.stream import Failure, Tokens

Phase = Literal["warm-up", "measured"]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. All times in seconds since the run's beginning.

    `scheduled_s`: its scheduled time (None: no schedule). `held_s`: how long it then waited because
    `max_in_flight` was reached. `token_s`: when each chunk with tokens arrived. `ended_s`: when the
    last chunk arrived, or the failure. `is_cut`: it was still running when the run ended; neither
    complete nor failed. `tokens`: the server's counts; `asked_*`: what was requested.
    """

    index: int
    conversation: int
    turn: int = 0
    phase: Phase = "measured"
    scheduled_s: float | None = None
    held_s: float = 0.0
    sent_s: float
    first_byte_s: float | None = None
    token_s: tuple[float, ...] = ()
    ended_s: float
    tokens: Tokens = Tokens()
    asked_prompt_tokens: int | None = None
    asked_output_tokens: int | None = None
    status: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    is_cut: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether it has a complete answer."""
        return self.failure is None and not self.is_cut

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer: the server's count, else a token for each chunk."""
        counted = self.tokens.num_output
        return len(self.token_s) if counted is None else counted

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt: the server's count, else the requested number."""
        return self.tokens.num_prompt or self.asked_prompt_tokens or 0

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token."""
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def e2e_s(self) -> float:
        """From sending to the last chunk of the answer."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None without a second token."""
        if not self.token_s or self.num_output_tokens < 2:  # noqa: PLR2004 - the first and one more
            return None
        return (self.ended_s - self.token_s[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> tuple[float, ...]:
        """The gaps between chunks, whatever number of tokens a chunk carries."""
        return tuple(b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False))

    @property
    def late_s(self) -> float | None:
        """How late this client sent it, after its scheduled time and `held_s`."""
        return None if self.scheduled_s is None else self.sent_s - self.scheduled_s - self.held_s
