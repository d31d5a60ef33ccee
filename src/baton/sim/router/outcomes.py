"""What clients of a simulation have seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.ids import WorkerId


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One request, in virtual seconds. `prefill` None: one worker served all of it.

    `num_saved` of its `num_tokens` were cached where the prompt was computed, or loaded there:
    `num_loaded` were, and what came before them. `num_predicted` were to be, when it was placed.
    `tpot_s` is 0 for an answer of one token. `itl_s`: the p99 of the gaps between its tokens, None
    where they are few.
    """

    began_at: float
    ended_at: float
    ttft_s: float
    tpot_s: float
    itl_s: float | None
    num_tokens: int
    num_predicted: int
    num_saved: int
    num_loaded: int
    prefill: WorkerId | None
    decode: WorkerId

    def is_good(self, ttft_s: float, tpot_s: float, itl_s: float | None = None) -> bool:
        """Whether it was within these limits."""
        if itl_s is not None and self.itl_s is not None and self.itl_s > itl_s:
            return False
        return self.ttft_s <= ttft_s and self.tpot_s <= tpot_s


class Percentiles(msgspec.Struct, frozen=True):
    """In seconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Of at least one value."""
        p50, p99 = np.percentile(np.array(values), (50, 99))
        return cls(round(float(p50), 6), round(float(p99), 6))


class Summary(msgspec.Struct, frozen=True):
    """All requests of a run. `num_good` were within the limits.

    `tpot_s` is of answers of two tokens or more, 0 where there are none. `saved_tokens` of prompts
    were cached or loaded, `predicted_tokens` were to be, when their requests were placed.
    `loaded_requests` loaded some of their prompt, from a store or another worker. `decisions`: how
    many were served by one worker, and how many were handed over. `prefills` and `answers` count by
    worker.
    """

    num_requests: int
    seconds: float
    requests_per_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    num_good: int
    prompt_tokens: int
    predicted_tokens: int
    saved_tokens: int
    loaded_requests: int
    decisions: dict[str, int]
    prefills: dict[str, int]
    answers: dict[str, int]


def summarize(
    outcomes: Sequence[RequestOutcome], ttft_s: float, tpot_s: float, itl_s: float | None = None
) -> Summary:
    """Figures of at least one request; a good one is within the limits."""
    seconds = max(each.ended_at for each in outcomes) - min(each.began_at for each in outcomes)
    num_pairs = sum(each.prefill is not None for each in outcomes)
    return Summary(
        num_requests=len(outcomes),
        seconds=round(seconds, 3),
        requests_per_s=round(len(outcomes) / seconds, 4) if seconds else 0.0,
        ttft_s=Percentiles.of([each.ttft_s for each in outcomes]),
        tpot_s=Percentiles.of([each.tpot_s for each in outcomes if each.tpot_s] or [0.0]),
        num_good=sum(each.is_good(ttft_s, tpot_s, itl_s) for each in outcomes),
        prompt_tokens=sum(each.num_tokens for each in outcomes),
        predicted_tokens=sum(each.num_predicted for each in outcomes),
        saved_tokens=sum(each.num_saved for each in outcomes),
        loaded_requests=sum(each.num_loaded > 0 for each in outcomes),
        decisions={"one worker": len(outcomes) - num_pairs, "handed over": num_pairs},
        prefills=_count([each.prefill or each.decode for each in outcomes]),
        answers=_count([each.decode for each in outcomes]),
    )


def _count(workers: Sequence[WorkerId]) -> dict[str, int]:
    return {str(worker): num for worker, num in sorted(Counter(workers).items())}
