"""What a session asks its context to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from baton.handoff.interface import HandoffEvent, SampledToken
    from baton.handoff.messages import (
        Available,
        BlocksExported,
        Declined,
        ExcludeTransport,
        Failed,
        FallbackToWrite,
        Grant,
        RetransmitRequest,
        TransportFailed,
    )


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to the peer over the link; lost if the link is gone."""

    message: PeerMessage


@dataclass(frozen=True, slots=True)
class SendTransferAck:
    """Report to the peer that all was read and verified, and which transports carried it."""


@dataclass(frozen=True, slots=True)
class OpenWriteGrant:
    """Admit the peer's writes into the granted pages."""


@dataclass(frozen=True, slots=True)
class CloseWriteGrant:
    """Admit no more; `grant_quiescent` must follow."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Admit no more over one transport, which failed; `fenced` must follow.

    Not before nothing can land over it any more: what it brought and was not counted by then is
    not counted at all.
    """

    transport: str


@dataclass(frozen=True, slots=True)
class ReadPages:
    """Read what the peer announced as available: then `reading`, or `fail`."""

    available: Available


@dataclass(frozen=True, slots=True)
class WriteLayers:
    """Write tokens `[start, stop)` of `layer`: then `submitted` for each part, or `fail`.

    By any transport that has not failed this session (`SendSession.excluded`). Of several layers at
    once where `merge_writes` allows it.
    """

    layer: int
    start: int
    stop: int
    num_layers: int = 1


@dataclass(frozen=True, slots=True)
class AnnounceReadable:
    """Announce that tokens `[start, stop)` of `layer` can be read: then `announced`, or `fail`."""

    layer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ImportBlocks:
    """Check the blocks that the peer exports, copy the last one: then `imported`, or `fail`."""

    exported: BlocksExported


@dataclass(frozen=True, slots=True)
class ExportBlocks:
    """Export tokens `[start, num_tokens)`, send BlocksExported with the token (if any), and end."""

    start: int
    first_token: SampledToken | None


@dataclass(frozen=True, slots=True)
class SendFinished:
    """Send Finished: nothing will follow; with the token (if any) and the trace's stamps."""

    first_token: SampledToken | None


@dataclass(frozen=True, slots=True)
class Emit:
    """Emit an event to the engine."""

    event: HandoffEvent


PeerMessage: TypeAlias = (
    "Grant | Declined | Failed | TransportFailed | RetransmitRequest | ExcludeTransport "
    "| FallbackToWrite"
)
ReceiveAction: TypeAlias = (
    SendMessage
    | SendTransferAck
    | OpenWriteGrant
    | CloseWriteGrant
    | Fence
    | ReadPages
    | ImportBlocks
    | Emit
)
SendAction: TypeAlias = (
    SendMessage | WriteLayers | AnnounceReadable | ExportBlocks | SendFinished | Emit
)
