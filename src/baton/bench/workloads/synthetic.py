"""Generated workloads (fixed lengths, shared prefixes, conversations), and their prompts.

Prompts are token ids or words; equal seeds give equal prompts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import count
from math import inf
from random import Random
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.bench.workloads.requests import Conversation, Request, Segment, Segments, Workload
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

FIRST_TOKEN_ID: Final = 256
END_TOKEN_ID: Final = 2048
"""Ids `[256, 2048)` are ordinary text in nearly every vocabulary: special tokens are before or far
after them."""

_TEXT: Final = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city name team minute idea body back parent face level office door health "
    "person art war history party result change morning reason research moment air teacher"
)
WORDS: Final = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The range of token ids in prompts: `[first, end)`."""

    first: int = FIRST_TOKEN_ID
    end: int = END_TOKEN_ID


@dataclass(frozen=True, slots=True)
class Calibration:
    """How a server's tokenizer counts words: `overhead_tokens + tokens_per_word * num_words`."""

    tokens_per_word: float
    overhead_tokens: float


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Generates prompts. Immutable; the seed is any text."""

    seed: str

    def write_ids(self, prompt: Segments, ids: TokenIds) -> list[int]:
        """As many token ids as the prompt has tokens."""
        drawn = [self._draw(part, part.num_tokens, ids.end - ids.first) for part in prompt.parts]
        tokens: list[int] = (np.concatenate(drawn) + ids.first).tolist()
        return tokens

    def write_words(self, prompt: Segments, calibration: Calibration) -> str:
        """Words that make about this many tokens, the server's own tokens included."""
        missing = calibration.overhead_tokens
        words: list[str] = []
        for part in prompt.parts:
            num_tokens = max(0.0, part.num_tokens - missing)
            missing = max(0.0, missing - part.num_tokens)
            num_words = max(1, round(num_tokens / calibration.tokens_per_word))
            words += [WORDS[i] for i in self._draw(part, num_words, len(WORDS))]
        return " ".join(words)

    def _draw(self, part: Segment, num_draws: int, num_choices: int) -> NDArray[np.int64]:
        name = hashlib.blake2b(f"{self.seed}\0{part.key}".encode(), digest_size=16).digest()
        rng = np.random.default_rng(int.from_bytes(name, "big"))
        return rng.integers(num_choices, size=num_draws)


def calibrate(num_words: tuple[int, int], num_tokens: tuple[int, int]) -> Calibration | None:
    """The line through two measured prompts; None where it does not rise."""
    slope = (num_tokens[1] - num_tokens[0]) / (num_words[1] - num_words[0])
    if slope <= 0:
        return None
    return Calibration(slope, max(0.0, num_tokens[0] - slope * num_words[0]))


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
    """`num_prefixes` system prompts of `num_prefix_tokens`, and a part of its own.

    All of them are used before one is used again, in another order each time: in one fixed order,
    a router that takes turns would send a prefix to one worker wherever the number of prefixes is a
    multiple of that of workers. `lengths`: of the own part, and of the answer.
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

    def ask(prefix: int, suffix: str) -> Request:
        parts = (
            Segment(f"prefix/{prefix}", shape.num_prefix_tokens),
            Segment(suffix, shape.lengths.num_input_tokens),
        )
        return Request(Segments(parts), shape.lengths.num_output_tokens)

    def generate() -> Iterator[Conversation]:
        rng, order = Random("shared-prefix"), [*range(shape.num_prefixes)]  # noqa: S311
        for i in count():
            at = i % shape.num_prefixes
            if at == 0:
                rng.shuffle(order)
            yield Conversation((ask(order[at], f"suffix/{i}"),))

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
        + (f", {shape.pause_s:g} s apart" if shape.pause_s else "")
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
REUSING: Final = ("--prefixes", "--prefix-len", "--turns", "--pause")
UNUSED: Final = {"shared-prefix": ("--turns", "--pause"), "multi-turn": ("--prefixes",)}
"""Flags of other workloads; without an entry: all that reuse something."""


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
    _check(name, options)
    if name in PRESETS or name == "fixed":
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


def _check(name: str, options: WorkloadOptions) -> None:
    given: dict[str, float | None] = {
        "--input-len": options.num_input_tokens,
        "--output-len": options.num_output_tokens,
        "--prefixes": options.num_prefixes,
        "--prefix-len": options.num_prefix_tokens,
        "--turns": options.num_turns,
    }
    for flag, number in given.items():
        if number is not None and not 1 <= number <= MAX_TOKENS:
            raise ConfigError(f"{flag}: {number} is not in [1, {MAX_TOKENS}]")
    if options.pause_s is not None and not 0 <= options.pause_s < inf:
        raise ConfigError("--pause: a number of seconds, not below 0")
    given |= {"--pause": options.pause_s}
    unused = [flag for flag in UNUSED.get(name, REUSING) if given[flag] is not None]
    if unused:
        raise ConfigError(f"--workload {name} has no use for {', '.join(unused)}")
