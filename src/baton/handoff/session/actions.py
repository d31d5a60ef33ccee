"""What a session asks its desk to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from baton.handoff.interface import HandoffEvent, SampledToken
    from baton.handoff.messages import Failed, Grant


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message to the peer over the link; lost if the link is gone."""

    message: Grant | Failed


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """Admit the peer's writes into the order's blocks."""


@dataclass(frozen=True, slots=True)
class CloseWindow:
    """Admit no more; `window_quiescent` must follow."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Write tokens `[start, stop)` of `layer`: then `submitted` for each part, or `fail`."""

    layer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SayFinished:
    """Tell the peer that no write will follow, with the token and the trace's stamps."""

    first_token: SampledToken


@dataclass(frozen=True, slots=True)
class Emit:
    """Tell the engine."""

    event: HandoffEvent


ReceiveAction: TypeAlias = Say | OpenWindow | CloseWindow | Emit
SendAction: TypeAlias = Say | Submit | SayFinished | Emit
