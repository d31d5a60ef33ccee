"""Workloads of fixed lengths: every prompt is new, all are equally long."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final

from baton.bench.workloads.asking import Ask, Conversation, Segment, Segments, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of every prompt and of every answer."""

    num_input_tokens: int
    num_output_tokens: int


PRESETS: Final[Mapping[str, Lengths]] = {
    "prefill-heavy": Lengths(2048, 32),
    "balanced": Lengths(512, 128),
    "decode-heavy": Lengths(128, 512),
}


def fixed_lengths(lengths: Lengths, name: str = "fixed") -> Workload:
    """Requests of one length, without end."""

    def generate() -> Iterator[Conversation]:
        return (Conversation((new_ask(f"fixed/{i}", lengths),)) for i in count())

    wanted = f"{lengths.num_input_tokens} tokens in, {lengths.num_output_tokens} out"
    return Workload(name, wanted, generate, largest=new_ask("fixed/probe", lengths))


def new_ask(key: str, lengths: Lengths) -> Ask:
    """A request whose prompt nobody else has."""
    return Ask(Segments((Segment(key, lengths.num_input_tokens),)), lengths.num_output_tokens)
