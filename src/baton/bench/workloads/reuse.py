"""Workloads whose prompts begin alike: what a prefix cache, and a router that knows it, live on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from baton.bench.workloads.asking import Ask, Conversation, Segment, Segments, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.bench.workloads.lengths import Lengths


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """`num_prefixes` system prompts of `num_prefix_tokens`, in turns; the rest is each one's own.

    `lengths` are those of the part of its own, and of the answer.
    """

    num_prefixes: int
    num_prefix_tokens: int
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """`num_turns` requests; each repeats all before it, answers included, and adds `lengths`.

    The answers that are repeated are made up, like the questions: so every server is asked the
    same, whatever it answers; a cache finds the earlier prompts, not the earlier answers.
    """

    num_turns: int
    num_first_tokens: int
    lengths: Lengths
    pause_s: float = 0.0


def shared_prefix(shape: SharedPrefix) -> Workload:
    """Requests without end."""

    def ask(i: int, suffix: str) -> Ask:
        parts = (
            Segment(f"prefix/{i % shape.num_prefixes}", shape.num_prefix_tokens),
            Segment(suffix, shape.lengths.num_input_tokens),
        )
        return Ask(Segments(parts), shape.lengths.num_output_tokens)

    def generate() -> Iterator[Conversation]:
        return (Conversation((ask(i, f"suffix/{i}"),)) for i in count())

    wanted = (
        f"{shape.num_prefixes} prefixes of {shape.num_prefix_tokens} tokens, "
        f"{shape.lengths.num_input_tokens} of its own in, {shape.lengths.num_output_tokens} out"
    )
    probe = _probe(shape.num_prefix_tokens + shape.lengths.num_input_tokens, shape.lengths)
    return Workload("shared-prefix", wanted, generate, largest=probe)


def multi_turn(shape: MultiTurn) -> Workload:
    """Conversations without end."""

    def generate() -> Iterator[Conversation]:
        return (Conversation(_turns(i, shape), pause_s=shape.pause_s) for i in count())

    added = shape.lengths.num_input_tokens + shape.lengths.num_output_tokens
    wanted = (
        f"{shape.num_turns} turns, {shape.num_first_tokens} tokens first, then "
        f"{shape.lengths.num_input_tokens} in and {shape.lengths.num_output_tokens} out a turn"
    )
    num_longest = shape.num_first_tokens + (shape.num_turns - 1) * added
    probe = _probe(num_longest + shape.lengths.num_input_tokens, shape.lengths)
    return Workload("multi-turn", wanted, generate, largest=probe)


def _probe(num_tokens: int, lengths: Lengths) -> Ask:
    """As large as the largest, and without a prefix that a cache could keep from it."""
    return Ask(Segments((Segment("probe", num_tokens),)), lengths.num_output_tokens)


def _turns(conversation: int, shape: MultiTurn) -> tuple[Ask, ...]:
    name = f"talk/{conversation}"
    parts = [Segment(f"{name}/first", shape.num_first_tokens)]
    turns = []
    for turn in range(shape.num_turns):
        parts.append(Segment(f"{name}/question/{turn}", shape.lengths.num_input_tokens))
        prompt = Segments(tuple(part for part in parts if part.num_tokens))
        turns.append(Ask(prompt, shape.lengths.num_output_tokens))
        parts.append(Segment(f"{name}/answer/{turn}", shape.lengths.num_output_tokens))
    return tuple(turns)
