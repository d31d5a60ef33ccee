"""What a session asks its context to do; its plan; and until when it waits for the other side.

    decode   ├ expected ── timeout_s ──┤
    prefill's engine:  ● sign of life ── timeout_s ──┤
                            ● another ── timeout_s ──┤
                                 ▲ Keepalive: it has this prompt queued, or computes it

`handoff.timeout_s` is for what a handoff does itself. For as long as the prefill worker's engine
shows that it computes, and has the prompt in its queue or under way, both sides wait until
`timeout_s` after its last sign of life, but never beyond the deadline of the request. An engine
without progress, be it stopped, stuck or gone, is waited for no longer than that, even if other
threads of its process still send. Once the prompt is computed, engine heartbeats no longer move the
deadline: its transfer has `timeout_s`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from baton.clock import Instant
from baton.encodings.interface import RAW
from baton.record import Record

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
        GrantOp,
        ReceivingCosts,
        RetransmitRequest,
        TransportFailed,
    )
    from baton.kv.copies import BlockTable
    from baton.transfer.interface import TransferId


class SendMessage(Record, frozen=True):
    """Send a message to the peer over the link; lost if the link is gone."""

    message: PeerMessage


class SendTransferAck(Record, frozen=True):
    """Report to the peer that all is here and verified, and which transports carried it.

    `closes_grant`: and that the write grant is closed without asking (`CloseWriteGrant`).
    """

    closes_grant: bool = False


class OpenWriteGrant(Record, frozen=True):
    """Admit the peer's writes into the granted pages."""


class CloseWriteGrant(Record, frozen=True):
    """Admit no more; `grant_quiescent` must follow.

    `writer_is_done`: all has arrived, and nothing failed on the way, so that the writer has nothing
    left to write.
    """

    writer_is_done: bool = False


class Fence(Record, frozen=True):
    """Admit no more over one transport, which failed; `fenced` must follow.

    Not before nothing can land over it any more: what it brought and was not counted by then is
    not counted at all.
    """

    transport: str


class ReadPages(Record, frozen=True):
    """Read what the peer announced as available: then `reading`, or `fail`."""

    available: Available


class WriteLayers(Record, frozen=True):
    """Write tokens `[start, stop)` of `layer`: then `submitted` for each part, or `fail`.

    By any transport that has not failed this session (`SendSession.excluded`). Of `num_layers`
    layers from `layer` on.
    """

    layer: int
    start: int
    stop: int
    num_layers: int = 1


class GatherPages(Record, frozen=True):
    """Copy tokens `[start, stop)` of `layer` from the engine's blocks into the view's pages.

    Where these are the same, wait until the engine's GPU has computed them. In one part or more:
    `gathering` for each as it begins, then `gathered`; or `fail`. Of `num_layers` layers from
    `layer` on.
    """

    layer: int
    start: int
    stop: int
    num_layers: int = 1


class AnnounceReadable(Record, frozen=True):
    """Announce that tokens `[start, stop)` of `layer` can be read: then `announced`, or `fail`.

    Of `num_layers` layers from `layer` on.
    """

    layer: int
    start: int
    stop: int
    num_layers: int = 1


class ImportBlocks(Record, frozen=True):
    """Check the blocks that the peer exports, copy the last one: then `imported`, or `fail`."""

    exported: BlocksExported


class ExportBlocks(Record, frozen=True):
    """Export tokens `[start, num_tokens)`, send BlocksExported with the token (if any), and end."""

    start: int
    first_token: SampledToken | None


class SendFinished(Record, frozen=True):
    """Send Finished: nothing will follow; with the token (if any) and the trace's stamps."""

    first_token: SampledToken | None


class Emit(Record, frozen=True):
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
    SendMessage | GatherPages | WriteLayers | AnnounceReadable | ExportBlocks | SendFinished | Emit
)


def extend(deadline: Instant, wanted: Instant, limit: Instant) -> Instant:
    """The later of a deadline and what is wanted, as far as the limit allows. Never earlier."""
    return Instant(max(deadline, min(wanted, limit)))


class TransferHandle(Record, frozen=True, order=True):
    """A transfer's id is its transport's own: two transports give the same ones."""

    transport: str
    transfer: TransferId


class TransferPlan(Record, frozen=True):
    """Who moves the bytes (neither side, by reference), into which pages of this worker's KV view.

    `staged`: the pages are staging memory, so that only the engine accesses its own blocks.
    Else the pages are the engine's blocks. Over `no_digest_transports` no digests are
    wanted. With `plain_digests` the peer is on this host, so that digests need no key. KV comes
    in `encoding`, which was chosen by `costs`.
    """

    op: GrantOp
    pages: BlockTable
    staged: bool
    no_digest_transports: tuple[str, ...] = ()
    plain_digests: bool = False
    encoding: str = RAW
    costs: ReceivingCosts | None = None
