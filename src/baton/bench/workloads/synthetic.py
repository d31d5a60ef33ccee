"""Generated workloads: fixed lengths, shared prefixes, conversations of several turns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final

from baton.bench.workloads.requests import Conversation, Request, Segment, Segments, Workload
from baton.errors import ConfigError

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
        return (Conversation((new_request(f"fixed/{i}", lengths),)) for i in count())

    wanted = f"{lengths.num_input_tokens} tokens in, {lengths.num_output_tokens} out"
    return Workload(name, wanted, generate, largest=new_request("fixed/probe", lengths))


def new_request(key: str, lengths: Lengths) -> Request:
    """A request with a prompt of its own."""
    return Request(Segments((Segment(key, lengths.num_input_tokens),)), lengths.num_output_tokens)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """`num_prefixes` system prompts of `num_prefix_tokens`, round robin, and a part of its own.

    `lengths`: of that part, and of the answer.
    """

    num_prefixes: int
    num_prefix_tokens: int
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """`num_turns` requests; each repeats all before it, answers included, and adds `lengths`.

    Repeated answers are generated like the questions, so that every server receives the same
    requests: a cache finds the earlier prompts, not the earlier answers.
    """

    num_turns: int
    num_first_tokens: int
    lengths: Lengths
    pause_s: float = 0.0


def shared_prefix(shape: SharedPrefix) -> Workload:
    """Requests without end."""

    def ask(i: int, suffix: str) -> Request:
        parts = (
            Segment(f"prefix/{i % shape.num_prefixes}", shape.num_prefix_tokens),
            Segment(suffix, shape.lengths.num_input_tokens),
        )
        return Request(Segments(parts), shape.lengths.num_output_tokens)

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


def _probe(num_tokens: int, lengths: Lengths) -> Request:
    """As large as the largest, without a prefix that a cache could have."""
    return Request(Segments((Segment("probe", num_tokens),)), lengths.num_output_tokens)


def _turns(conversation: int, shape: MultiTurn) -> tuple[Request, ...]:
    name = f"talk/{conversation}"
    parts = [Segment(f"{name}/first", shape.num_first_tokens)]
    turns = []
    for turn in range(shape.num_turns):
        parts.append(Segment(f"{name}/question/{turn}", shape.lengths.num_input_tokens))
        prompt = Segments(tuple(part for part in parts if part.num_tokens))
        turns.append(Request(prompt, shape.lengths.num_output_tokens))
        parts.append(Segment(f"{name}/answer/{turn}", shape.lengths.num_output_tokens))
    return tuple(turns)


NAMES: Final = ("fixed", *PRESETS, "shared-prefix", "multi-turn")
MAX_TOKENS: Final = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """The flags; None is the workload's own default."""

    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    num_prefixes: int | None = None
    num_prefix_tokens: int | None = None
    num_turns: int | None = None
    pause_s: float | None = None


def choose_workload(name: str, options: WorkloadOptions) -> Workload:
    """The workload with this name.

    Raises:
        ConfigError: the name is unknown, or a number is out of bounds.
    """
    _check(options)
    if name in PRESETS or name == "fixed":
        _refuse_reuse(name, options)
        return fixed_lengths(_lengths(options, PRESETS.get(name, PRESETS["balanced"])), name)
    if name == "shared-prefix":
        return shared_prefix(
            SharedPrefix(
                options.num_prefixes or 8,
                options.num_prefix_tokens or 1024,
                _lengths(options, Lengths(128, 64)),
            )
        )
    if name == "multi-turn":
        return multi_turn(
            MultiTurn(
                options.num_turns or 4,
                options.num_prefix_tokens or 256,
                _lengths(options, Lengths(64, 64)),
                options.pause_s or 0.0,
            )
        )
    raise ConfigError(f"--workload {name}: not one of {', '.join(NAMES)}")


def _lengths(options: WorkloadOptions, default: Lengths) -> Lengths:
    return Lengths(
        options.num_input_tokens or default.num_input_tokens,
        options.num_output_tokens or default.num_output_tokens,
    )


def _check(options: WorkloadOptions) -> None:
    given = {
        "--input-len": options.num_input_tokens,
        "--output-len": options.num_output_tokens,
        "--prefixes": options.num_prefixes,
        "--prefix-len": options.num_prefix_tokens,
        "--turns": options.num_turns,
    }
    for flag, number in given.items():
        if number is not None and not 1 <= number <= MAX_TOKENS:
            raise ConfigError(f"{flag}: {number} is not in [1, {MAX_TOKENS}]")
    if options.pause_s is not None and options.pause_s < 0:
        raise ConfigError("--pause: not below 0")


def _refuse_reuse(name: str, options: WorkloadOptions) -> None:
    given = (options.num_prefixes, options.num_prefix_tokens, options.num_turns, options.pause_s)
    if any(each is not None for each in given):
        raise ConfigError(
            f"--workload {name} shares nothing: --prefixes, --prefix-len, --turns and --pause are "
            "for shared-prefix and multi-turn"
        )
