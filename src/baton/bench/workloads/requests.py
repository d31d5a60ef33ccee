"""The words of a workload: what one request asks for, and which requests belong together."""

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
    """A prompt that is known by its lengths: its tokens are made up."""

    parts: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(part.num_tokens for part in self.parts)


@dataclass(frozen=True, slots=True)
class GivenBody:
    """A prompt that somebody wrote: the fields of a whole request, of an endpoint of its own."""

    endpoint: Endpoint
    fields: Mapping[str, object] = field(hash=False)


Prompt: TypeAlias = Segments | GivenBody


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `num_output_tokens` None: as many as the server likes."""

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
    """Requests that follow each other: each is sent after the answer to the one before.

    `arrival_s`: when the first is sent, in seconds since the workload's beginning, where the
    workload says that itself. `pause_s` lies between an answer and the next request.
    """

    turns: tuple[Request, ...]
    arrival_s: float | None = None
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Something to ask of a server.

    `generate` begins anew at each call and yields the same; it may have no end. `largest` is a
    request that needs as many tokens as any, or nearly: a server that takes it takes all.
    `num_requests` None: without end. `has_arrivals`: conversations say when they are sent.
    """

    name: str
    description: str
    generate: Callable[[], Iterator[Conversation]] = field(hash=False)
    largest: Request
    num_requests: int | None = None
    has_arrivals: bool = False
    warnings: tuple[str, ...] = ()


def count_context(ask: Request) -> int | None:
    """Tokens that prompt and answer need together, where both are known."""
    if ask.num_prompt_tokens is None or ask.num_output_tokens is None:
        return None
    return ask.num_prompt_tokens + ask.num_output_tokens
