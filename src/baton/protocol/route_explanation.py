"""The answer to `POST /debug/route`: who could serve a request, and what the policy compares."""

from __future__ import annotations

from typing import Literal

import msgspec


class RouteCandidate(msgspec.Struct, frozen=True):
    """One way to serve a request, or one of its parts where the policy chooses them one by one.

    Of a whole request `prefill` None is the decode worker alone. `figures` by name, units in the
    names: the first is compared, the least is best. `why_not`: why it cannot be chosen now.
    """

    part: Literal["request", "prefill", "decode"]
    prefill: str | None
    decode: str | None
    figures: dict[str, float]
    is_chosen: bool
    why_not: str | None = None


class RouteExplanation(msgspec.Struct, frozen=True):
    """Nothing was placed. `candidates` from the best on, those that cannot be chosen last.

    `num_prompt_tokens` is exact where the prompt `is_tokenized`; `cached_tokens` of it, and
    `stored_tokens` that are in its store, by worker. `num_answers` that the request asks for: what
    is explained is the first prompt's. `mode` and
    the workers are those that would be chosen, None if no worker can serve it; `why` gives the
    policy's lines.
    """

    model: str
    policy: str
    num_prompt_tokens: int
    is_tokenized: bool
    cached_tokens: dict[str, int]
    num_answers: int
    mode: str | None
    prefill: str | None
    decode: str | None
    why: tuple[str, ...]
    candidates: tuple[RouteCandidate, ...]
    stored_tokens: dict[str, int] = {}
