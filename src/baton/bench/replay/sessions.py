"""A workload's conversations as sessions of a simulation.

Runs of tokens keep their names, so that what is equal in the trace is equal here. Of recorded
bodies (OpenAI batches) only their lengths are known, by `BYTES_PER_TOKEN`.
"""

from __future__ import annotations

from itertools import count, pairwise
from random import Random
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from baton.bench.replay.plan import Clients, Rate, Recorded, ReplayPlan
from baton.bench.workloads.requests import Conversation, GivenBody, Prompt, Request, Segments
from baton.sim.router.sessions import Session, TokenRun, Turn

if TYPE_CHECKING:
    from collections.abc import Iterator

BYTES_PER_TOKEN: Final = 4
DEFAULT_ANSWER_TOKENS: Final = 128
"""Where a recorded request names no limit."""


def make_sessions(plan: ReplayPlan) -> Iterator[Session]:
    """The plan's sessions, as many as have its number of requests."""
    arrivals = _arrivals(plan)
    num_left = plan.num_requests
    for number, conversation in enumerate(plan.workload.generate()):
        turns = _make_turns(conversation, number)
        if num_left is not None:
            turns = turns[:num_left]
            num_left -= len(turns)
        if not turns:
            return
        arrival_s = next(arrivals, None)
        if isinstance(plan.arrivals, Recorded):
            arrival_s = conversation.arrival_s
        yield Session(turns, arrival_s, conversation.pause_s)


def _arrivals(plan: ReplayPlan) -> Iterator[float]:
    match plan.arrivals:
        case Rate(per_s):
            return _at_random(per_s, Random(plan.seed))  # noqa: S311 - a load, no secret
        case Recorded() | Clients():
            return iter(())
        case _ as never:
            assert_never(never)


def _at_random(per_s: float, rng: Random) -> Iterator[float]:
    at = 0.0
    for _ in count():
        yield at
        at += rng.expovariate(per_s)


def _make_turns(conversation: Conversation, number: int) -> tuple[Turn, ...]:
    turns = [_make_turn(ask, number) for ask in conversation.turns]
    for at, (one, following) in enumerate(pairwise(turns)):
        turns[at] = _with_answer(one, following)
    return tuple(turns)


def _make_turn(ask: Request, number: int) -> Turn:
    return Turn(_make_runs(ask.prompt, number), ask.num_output_tokens or DEFAULT_ANSWER_TOKENS)


def _make_runs(prompt: Prompt, number: int) -> tuple[TokenRun, ...]:
    match prompt:
        case Segments(parts):
            return tuple(TokenRun(part.key, part.num_tokens) for part in parts)
        case GivenBody(fields=fields):
            text = msgspec.json.encode(fields.get("messages", fields.get("prompt")))
            return (TokenRun(f"body/{number}", max(1, len(text) // BYTES_PER_TOKEN)),)
        case _ as never:
            assert_never(never)


def _with_answer(one: Turn, following: Turn) -> Turn:
    """The answer is what the next prompt repeats after this one."""
    num = len(one.prompt)
    if following.prompt[:num] != one.prompt or len(following.prompt) <= num:
        return one
    answer = following.prompt[num]
    is_answer = answer.num_tokens == one.num_answer_tokens
    return Turn(one.prompt, one.num_answer_tokens, answer.key if is_answer else None)
