"""Whether to ask a store for a prompt's beginning, and how long to wait for its answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.clock import Instant

LOAD_TIMEOUT_S: Final = 2.0
"""Then a prompt whose beginning the store was asked for is computed."""
LEAST_LEARNED_TOKENS: Final = 32
LEARNING: Final = 0.2
"""Weight of the latest observation in what is expected of the next."""
WAIT_GUESS_S: Final = 0.001
"""From the order to the answer."""
FORGOTTEN_AFTER_S: Final = 30.0
"""Then a wait that was long is not believed: it may have kept every prompt since from asking."""
PROPORTIONAL: Final = 0.03
"""Weight of a step without fixed time beside those that were seen: where all are of about one size,
noise would decide what a token takes."""
TOLERATED_SHARE: Final = 0.05
"""Of what a prompt takes: so much may be lost by asking for what is not there."""
HELD_SHARE: Final = 0.04
"""Of what a prompt takes to be computed: so long it is held for an answer that may be a miss."""


@dataclass(slots=True)
class LookupCost:
    """Owned by the engine's thread, whose clock it is given.

    `token_s`: what a token of a prompt adds to the step that computes it; 0: unknown.
    """

    answered_at: Instant
    token_s: float = 0.0
    wait_s: float = WAIT_GUESS_S
    found_share: float = 0.0
    _step_means: list[float] = field(default_factory=lambda: [0.0] * 4)
    """Of steps: tokens, seconds, squares of tokens, tokens times seconds."""

    def count_worth_asking(self, now: Instant, entry_tokens: int) -> int:
        """How many tokens a prompt must lack, where it is held until the answer has come.

        Asking costs what may be lost, or is usually found. `entry_tokens`: of a full entry, below
        which nothing is found.
        """
        if self.is_forgotten(now):
            self.wait_s = min(self.wait_s, WAIT_GUESS_S)
        return self._count_worth(entry_tokens, max(TOLERATED_SHARE, self.found_share))

    def is_forgotten(self, now: Instant) -> bool:
        """Whether nothing was asked for so long that it is not known what it takes now."""
        return now - self.answered_at > FORGOTTEN_AFTER_S

    def count_answered_in_time(self, entry_tokens: int) -> int:
        """How many tokens a prompt must lack, where it is held for `compute_held_s` at most.

        The answer is expected by then.
        """
        return self._count_worth(entry_tokens, self._held_share)

    def compute_held_s(self, num_missing: int) -> float:
        """How long a prompt that lacks so many tokens is held for the answer."""
        return self.token_s * num_missing * self._held_share if self.token_s else LOAD_TIMEOUT_S

    def compute_s(self, num_tokens: int) -> float:
        """How long so many tokens of a prompt take to be computed."""
        return self.token_s * num_tokens if self.token_s else LOAD_TIMEOUT_S

    def observe_answer(
        self, now: Instant, *, num_found: int, num_missing: int, waited_s: float | None
    ) -> None:
        """The store had `num_found` of `num_missing` tokens; the answer took `waited_s`.

        None: it came while the prompt waited for something else.
        """
        self.found_share += LEARNING * (num_found / num_missing - self.found_share)
        if waited_s is None:
            return
        known_s = waited_s if self.is_forgotten(now) else self.wait_s
        self.wait_s = known_s + LEARNING * (waited_s - known_s)
        self.answered_at = now

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step that computed prompts' tokens for the most part; short ones are ignored."""
        if num_tokens < LEAST_LEARNED_TOKENS:
            return
        seen = num_tokens, seconds, num_tokens**2, num_tokens * seconds
        share = LEARNING if self.token_s else 1.0
        means = [mean + share * (x - mean) for mean, x in zip(self._step_means, seen, strict=True)]
        self._step_means = means
        # The slope of a line: a step takes some time whatever its tokens.
        size, step_s, squares, products = means
        slope = products - (1 - PROPORTIONAL) * size * step_s
        slope /= squares - (1 - PROPORTIONAL) * size * size
        self.token_s = min(max(slope, PROPORTIONAL * step_s / size), step_s / size)

    @property
    def _held_share(self) -> float:
        """Of a prompt's time, for the wait: it pays for itself where most tokens are found."""
        return max(HELD_SHARE, 2 * self.found_share - 1)

    def _count_worth(self, entry_tokens: int, share: float) -> int:
        saved_s = self.token_s * share
        return max(entry_tokens, int(self.wait_s / saved_s) if saved_s else 0)
