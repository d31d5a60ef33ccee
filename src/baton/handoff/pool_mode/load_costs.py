"""What loading takes in each tier of a store, and how much of a prompt's beginning is loaded. Pure.

A tier's cost is a line, `fixed + each * tokens` seconds for what one load takes from it, learned
from loads; older ones count less. A prompt's beginning may lie in several tiers, in runs: it is
loaded up to the end of the run where most time is saved against computing the same tokens. So a
slow tier costs neither what is before its entries in a quick one, nor, where it pays, what is
behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LEARNING: Final = 0.2
"""Weight of the latest load in what is expected of the next."""
FORGETTING: Final = 0.9
"""What remains of a tier's expected time whenever it was too long: it is tried again some time."""
PROPORTIONAL: Final = 0.03
"""Weight of a line without fixed time beside what is seen: where all loads have about one size,
noise would decide what the others take."""


class TierTokens(NamedTuple):
    """Adjacent tokens of a prompt that lie in one tier."""

    tier: str
    num_tokens: int


class TierTime(NamedTuple):
    """What was loaded from a tier, and the seconds that it took."""

    tier: str
    num_tokens: int
    seconds: float


@dataclass(slots=True)
class TierCost:
    """Of one tier, from at least one load: weighted means over loads of tokens and seconds.

    `discount`: the share of it that is expected now, less whenever the tier was found too slow.
    """

    tokens: float
    seconds: float
    squares: float
    products: float
    discount: float = 1.0

    def predict(self, num_tokens: int) -> float:
        """Seconds for a load of so many tokens, at least one."""
        size, seconds = self.tokens, self.seconds
        spread = self.squares - (1 - PROPORTIONAL) * size * size
        each = max(0.0, self.products - (1 - PROPORTIONAL) * size * seconds) / spread
        fixed = seconds - each * size
        if fixed < 0:
            fixed, each = 0.0, self.products / self.squares
        return self.discount * (fixed + each * num_tokens)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A load took so long. The discount ends; it stays in the line if the load was as quick."""
        if seconds < self.predict(num_tokens):
            self.seconds *= self.discount
            self.products *= self.discount
        self.discount = 1.0
        self.tokens += LEARNING * (num_tokens - self.tokens)
        self.seconds += LEARNING * (seconds - self.seconds)
        self.squares += LEARNING * (num_tokens * num_tokens - self.squares)
        self.products += LEARNING * (num_tokens * seconds - self.products)

    def forget(self) -> None:
        """Expect less."""
        self.discount *= FORGETTING


@dataclass(slots=True)
class LoadCosts:
    """Of all tiers that something was loaded from. Owner: the pool's thread."""

    tiers: dict[str, TierCost] = field(default_factory=dict)

    def predict(self, tier: str, num_tokens: int) -> float | None:
        """Seconds for so many tokens, at least one; None: nothing was loaded from this tier yet."""
        cost = self.tiers.get(tier)
        return None if cost is None else cost.predict(num_tokens)

    def choose(
        self,
        runs: Sequence[TierTokens],
        computed_token_s: float,
        times: Mapping[str, TierTime] | None = None,
    ) -> int:
        """How many leading tokens to load: those that save most; of equal savings, the more.

        A tier that nothing is known of costs nothing: it is tried. All, where it is not known what
        computing takes (0). `times`: what this load has taken so far; a tier's remainder takes as
        long for each token.
        """
        if computed_token_s <= 0:
            return sum(run.num_tokens for run in runs)
        best = at = 0
        most_s = cost_s = 0.0
        loaded: dict[str, int] = {}
        for tier, num_tokens in runs:
            before = loaded.get(tier, 0)
            loaded[tier] = before + num_tokens
            cost_s += self._expect(tier, loaded[tier], times)
            cost_s -= self._expect(tier, before, times) if before else 0.0
            at += num_tokens
            saved_s = computed_token_s * at - cost_s
            if saved_s >= most_s:
                best, most_s = at, saved_s
        return best

    def _expect(self, tier: str, num_tokens: int, times: Mapping[str, TierTime] | None) -> float:
        seen = None if times is None else times.get(tier)
        if seen is not None:
            return num_tokens * seen.seconds / seen.num_tokens
        return self.predict(tier, num_tokens) or 0.0

    def forget_slow(self, refused: Iterable[TierTokens], computed_token_s: float) -> None:
        """These were not loaded: of the tiers that are slower than computing, expect less."""
        num_refused: dict[str, int] = {}
        for tier, num_tokens in refused:
            num_refused[tier] = num_refused.get(tier, 0) + num_tokens
        for tier, num_tokens in num_refused.items():
            cost = self.tiers.get(tier)
            if cost is not None and cost.predict(num_tokens) > computed_token_s * num_tokens:
                cost.forget()

    def observe(self, time: TierTime) -> None:
        """What a load took in one tier, without its lookup, and without waits for other loads."""
        cost, (tier, num, seconds) = self.tiers.get(time.tier), time
        if cost is None:
            self.tiers[tier] = TierCost(num, seconds, num * num, num * seconds)
        else:
            cost.observe(num, seconds)


def cut(runs: Sequence[TierTokens], start: int, stop: int | None = None) -> list[TierTokens]:
    """Tokens `[start, stop)` of them; None: to the end."""
    left: list[TierTokens] = []
    at = 0
    for tier, num_tokens in runs:
        end = at + num_tokens if stop is None else min(stop, at + num_tokens)
        if end > max(start, at):
            left.append(TierTokens(tier, end - max(start, at)))
        at += num_tokens
    return left


def add_times(times: dict[str, TierTime], latest: Sequence[TierTime], more_s: float = 0.0) -> None:
    """Add a batch's times to a load's; `more_s` are of all its tokens alike."""
    token_s = more_s / max(1, sum(each.num_tokens for each in latest))
    for tier, num_tokens, seconds in latest:
        before = times.get(tier, TierTime(tier, 0, 0.0))
        times[tier] = TierTime(
            tier,
            before.num_tokens + num_tokens,
            before.seconds + seconds + token_s * num_tokens,
        )
