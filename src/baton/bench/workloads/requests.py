"""The types of a workload: one request, a conversation, the workload."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a prompt's tokens. Equal keys (of one seed) begin with equal tokens."""

    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Segments:
    """A prompt that is given by lengths: its tokens are generated."""

    parts: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(part.num_tokens for part in self.parts)


@dataclass(frozen=True, slots=True)
class GivenBody:
    """A recorded request: all its fields, and its endpoint."""

    endpoint: Endpoint
    fields: Mapping[str, object] = field(hash=False)


Prompt: TypeAlias = Segments | GivenBody


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `num_output_tokens` None: the server decides."""

    prompt: Prompt
    num_output_tokens: int | None

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens of its prompt, where they are known beforehand."""
        match self.prompt:
            case Segments() as segments:
                return segments.num_tokens
            case GivenBody():
                return None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests in sequence: each is sent after the answer to the one before.

    `arrival_s`: when the first is sent, in seconds since the workload's beginning (None: not
    recorded). `pause_s` lies between an answer and the next request.
    """

    turns: tuple[Request, ...]
    arrival_s: float | None = None
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A source of requests.

    `generate` yields the same at each call; it may have no end. `largest` needs as many tokens as
    any request, or nearly: a server that accepts it accepts all. `num_requests` None: without end.
    `has_arrivals`: conversations have arrival times. `block_tokens`: prompts are given by blocks of
    so many tokens, and what is shared within a block is not known.
    """

    name: str
    description: str
    generate: Callable[[], Iterator[Conversation]] = field(hash=False)
    largest: Request
    num_requests: int | None = None
    has_arrivals: bool = False
    block_tokens: int | None = None
    warnings: tuple[str, ...] = ()


def count_context(ask: Request) -> int | None:
    """Tokens of prompt and answer together, where both are known."""
    if ask.num_prompt_tokens is None or ask.num_output_tokens is None:
        return None
    return ask.num_prompt_tokens + ask.num_output_tokens
