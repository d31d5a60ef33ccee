"""What a session asks its desk to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from baton.handoff.interface import HandoffEvent, SampledToken
    from baton.handoff.messages import (
        Available,
        Avoid,
        Declined,
        Failed,
        Grant,
        Lent,
        Missing,
        Rerouted,
        Reversed,
    )


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message to the peer over the link; lost if the link is gone."""

    message: Sayable


@dataclass(frozen=True, slots=True)
class SayTaken:
    """Tell the peer that all was read and verified, and what carried it."""


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """Admit the peer's writes into the granted pages."""


@dataclass(frozen=True, slots=True)
class CloseWindow:
    """Admit no more; `window_quiescent` must follow."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Admit no more over one transport, which failed; `fenced` must follow.

    Not before nothing can land over it any more: what it brought and was not counted by then is
    not counted at all.
    """

    transport: str


@dataclass(frozen=True, slots=True)
class Read:
    """Read what the peer says is available: then `reading`, or `fail`."""

    available: Available


@dataclass(frozen=True, slots=True)
class Submit:
    """Write tokens `[start, stop)` of `layer`: then `submitted` for each part, or `fail`.

    By any transport that has not failed this session (`SendSession.avoids`). Of several layers at
    once where `join_submits` says so.
    """

    layer: int
    start: int
    stop: int
    num_layers: int = 1


@dataclass(frozen=True, slots=True)
class Announce:
    """Say that tokens `[start, stop)` of `layer` can be read: then `announced`, or `fail`."""

    layer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Borrow:
    """Check what the peer lends, and copy the last block of it: then `borrowed`, or `fail`."""

    lent: Lent


@dataclass(frozen=True, slots=True)
class Lend:
    """Lend tokens `[start, num_tokens)` and say so, with the token (if any): nothing follows."""

    start: int
    first_token: SampledToken | None


@dataclass(frozen=True, slots=True)
class SayFinished:
    """Tell the peer that nothing will follow, with the token (if any) and the trace's stamps."""

    first_token: SampledToken | None


@dataclass(frozen=True, slots=True)
class Emit:
    """Tell the engine."""

    event: HandoffEvent


Sayable: TypeAlias = "Grant | Declined | Failed | Rerouted | Missing | Avoid | Reversed"
ReceiveAction: TypeAlias = Say | SayTaken | OpenWindow | CloseWindow | Fence | Read | Borrow | Emit
SendAction: TypeAlias = Say | Submit | Announce | Lend | SayFinished | Emit
