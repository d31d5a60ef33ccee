"""The contract between an engine and the handoff agent of its worker.

The engine's thread calls; the agent answers through `poll`, never by calling back (it only calls
`wake`, given to it at construction, when `poll` has something to return). Blocks named here belong
to the agent from the call until the event that gives them back:

    start_receive ──► KVLanded                      blocks are ready, all tokens verified
                  └─► KVFailed ──► BlocksQuiescent  quarantined in between
       (with `layers`: LayersLanding before these, once the first layer's KV is there)
    start_send    ──► KVSent | SendFailed           source blocks may change again
                  └─► KVExported ──► ExportReleased  the exported ones only then

By reference (a ticket of that mode, where both engines can) `KVLanded` names the blocks of the
peer in which the KV is: `SharedBlockPort` is how they go back.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final, Protocol, TypeAlias

import msgspec

from baton.clock import Instant
from baton.handoff.block_guard import BlockGuard

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.auth.ticket import Ticket
    from baton.errors import HandoffError
    from baton.ids import TicketId
    from baton.kv.copies import BlockTable
    from baton.kv.identity import Adapter
    from baton.telemetry.trace import RequestSpan


DECLINED_STAGE: Final = "declined"
"""Stage of the `HandoffError` that ends an offer which the decode worker did not need."""


MAX_TOKEN_ID: Final = 2**31 - 1
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token and its natural-log probability."""

    token_id: TokenId
    logprob: float


class SampledToken(msgspec.Struct, frozen=True):
    """One sampled token, as any worker would have sampled it (the seed decides, not the place).

    `logprob` is that of the token itself; `top` are the most likely ones, best first. Both are
    empty when the request asked for none.
    """

    token_id: TokenId
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class StreamPosition(Protocol):
    """A position in what an engine has given its GPU to do: a recorded event.

    A copy that comes after it begins, on the GPU, once all that was given before it has been done.
    None stands for it where all is done already (on CPUs).
    """

    def is_done(self) -> bool:
        """Whether the GPU has got there; does not wait. Thread-safe.

        Raises:
            TransferError: the GPU failed.
        """
        ...

    def wait(self) -> None:
        """Wait until it has: not on an agent's thread.

        Raises:
            TransferError: the GPU failed.
        """
        ...


class LandingLayers:
    """How many layers of a receive, from the first on, are in place and verified, all tokens.

    The agent's thread writes, the engine's reads and waits.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num = 0
        self._is_over = False

    @property
    def num(self) -> int:
        """Layers that are in place."""
        return self._num

    @property
    def is_over(self) -> bool:
        """Whether no other layer will be."""
        return self._is_over

    def advance(self, num: int) -> None:
        """So many are in place, unless it is over."""
        with self._changed:
            if not self._is_over:
                self._num = max(self._num, num)
                self._changed.notify_all()

    def end(self) -> None:
        """No other layer is counted from here on."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Wait for a layer; whether it is in place."""
        if layer < self._num:
            return True
        with self._changed:
            self._changed.wait_for(lambda: layer < self._num or self._is_over, timeout_s)
        return layer < self._num


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """Decode's side: get KV of tokens `[start, num_tokens)` into `blocks`.

    `prompt_hash` commits to all prompt tokens, the model and the tenant (`kv.identity`).
    `prompt_ids`, int32 `[num_tokens]`, and `adapter` are needed in mode pool alone: entries are
    named by them.
    Before `after` the engine's GPU may still use the blocks for what they held before. With
    `layers` the engine may read each layer as soon as it is counted there.
    """

    ticket: Ticket
    prompt_hash: bytes
    start: int
    num_tokens: int
    blocks: BlockTable
    deadline: Instant
    trace: RequestSpan
    prompt_ids: NDArray[np.int32] | None = None
    after: StreamPosition | None = None
    adapter: Adapter | None = None
    layers: LandingLayers | None = None


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Prefill's side: KV of tokens `[0, num_tokens)` will be computed, or is cached, in `blocks`.

    `num_ready_tokens` of them are already in place in every layer (a prefix-cache hit).
    `num_cached_tokens`, if more, need not be computed, and are reported with the first layers.
    `prompt_ids` and `adapter` as in a `ReceiveOrder`. In mode pool `guard` takes the blocks back
    before the send has ended.
    """

    ticket: Ticket
    prompt_hash: bytes
    num_tokens: int
    num_ready_tokens: int
    blocks: BlockTable
    deadline: Instant
    trace: RequestSpan
    prompt_ids: NDArray[np.int32] | None = None
    num_cached_tokens: int = 0
    adapter: Adapter | None = None
    guard: BlockGuard = field(default_factory=BlockGuard)


@dataclass(frozen=True, slots=True)
class LookupOrder:
    """Find how much of a prompt's beginning a load would put in place.

    `prompt_ids`, int32; tokens before `start` are in place already. `id` is the engine's own, and
    names the order as a ticket's does. Computing instead would take `token_s` a token; 0: unknown.
    `adapter`: with which the KV was computed.
    """

    id: TicketId
    tenant_salt: str
    prompt_ids: NDArray[np.int32]
    start: int
    token_s: float
    adapter: Adapter | None = field(default=None, kw_only=True)


@dataclass(slots=True, eq=False)
class LoadProgress:
    """When a load has put tokens in place last. The store's thread writes, the engine's reads."""

    last_at: Instant = field(default=Instant(0.0))


@dataclass(frozen=True, slots=True)
class LoadOrder(LookupOrder):
    """Load the beginning of a prompt from the store into `blocks`, as far as it is there and pays.

    `guard` takes the blocks back before the load has ended; while it makes `progress` it is not
    late. `trace` is the request's, if there is one yet: lossy entries are noted in it. `after`: as
    in a `ReceiveOrder`.
    """

    blocks: BlockTable
    guard: BlockGuard = field(default_factory=BlockGuard)
    progress: LoadProgress = field(default_factory=LoadProgress)
    trace: RequestSpan | None = None
    after: StreamPosition | None = None


@dataclass(frozen=True, slots=True)
class KeepOrder:
    """Keep KV of `token_ids`, int32, in the store: all of it is in `blocks`, which do not change.

    What is behind their last full block of the store's size is left out. `guard` takes the blocks
    back before all is kept. At `after` the engine's GPU has computed them, with `adapter`.
    """

    id: TicketId
    tenant_salt: str
    token_ids: NDArray[np.int32]
    blocks: BlockTable
    guard: BlockGuard = field(default_factory=BlockGuard)
    after: StreamPosition | None = None
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class LayersLanding:
    """The first layer of a receive is in place, and the others follow."""

    ticket: TicketId
    layers: LandingLayers


@dataclass(frozen=True, slots=True)
class KVLanded:
    """All KV is in place and verified; `first_token` was sampled by the prefill worker.

    Where it is None the engine computes the last prompt token itself, and samples. `num_tokens` is
    set where only tokens before it are in place (mode pool): the engine computes the others, too,
    and there is no first token.

    `imported` hold the first of the order's tokens, a block each, instead of the order's blocks:
    pages of `KVView.peer_mappings`, never to be written, until `SharedBlockPort.release_imported`.
    The block with the
    prompt's last token is never among them.
    """

    ticket: TicketId
    first_token: SampledToken | None
    num_tokens: int | None = None
    imported: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixFound:
    """The store has tokens before `num_tokens` of a prompt, and loading them pays.

    `num_tokens` is the order's `start` where there are none. `took_s` is from the order to here.
    `is_read`: all of it is in the store's memory (`ReadsPrefixes`).
    """

    ticket: TicketId
    num_tokens: int
    took_s: float = 0.0
    is_read: bool = False


@dataclass(frozen=True, slots=True)
class KVFailed:
    """The handoff ended without its KV: recompute. The blocks stay quarantined for now."""

    ticket: TicketId
    error: HandoffError


@dataclass(frozen=True, slots=True)
class BlocksQuiescent:
    """Nothing can land any more in the blocks of a failed or aborted handoff: free them."""

    ticket: TicketId


@dataclass(frozen=True, slots=True)
class KVSent:
    """The decode worker has everything it asked for: the source blocks may be released."""

    ticket: TicketId


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The handoff ended early; stop computing. The source blocks may be released."""

    ticket: TicketId
    error: HandoffError


@dataclass(frozen=True, slots=True)
class KVExported:
    """As `KVSent`, but the decode worker reads `blocks` in place until `ExportReleased`.

    The other source blocks may be released.
    """

    ticket: TicketId
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExportReleased:
    """No peer reads the blocks that were exported for this ticket: they may be released."""

    ticket: TicketId


@dataclass(frozen=True, slots=True)
class ImportRevoked:
    """The exporter wants its blocks back: copy them as soon as there is room, then release them."""

    ticket: TicketId


HandoffEvent: TypeAlias = (
    KVLanded
    | LayersLanding
    | PrefixFound
    | KVFailed
    | BlocksQuiescent
    | KVSent
    | SendFailed
    | KVExported
    | ExportReleased
    | ImportRevoked
)


class SharedBlockPort(Protocol):
    """Handing over by reference, as an engine with `KVView.peer_mappings` sees it. Thread-safe."""

    def release_imported(self, ticket: TicketId) -> None:
        """This engine will not read the blocks that it imported for this ticket any more."""
        ...

    def revoke_exported(self) -> None:
        """Room is short: revoke the exported blocks. `ExportReleased` follows for each ticket."""
        ...


@dataclass(slots=True)
class EngineSteps:
    """Steps that an engine has begun, and ended, since its start.

    Its thread counts, others read: they learn whether it computes without a call for each step.
    """

    num_begun: int = 0
    num_ended: int = 0


class PrefixStore(Protocol):
    """Prompts' beginnings in the store, as an engine sees it. Thread-safe, never blocks.

    An engine learns first what would be loaded, and finds room for it then.

    start_lookup ──► PrefixFound
    start_load ──► KVLanded     `num_tokens` of the prompt are in place: `start`, if none were there
               └─► (aborted) BlocksQuiescent
    start_keep ──► KVSent       the blocks may change again, whatever became of it
    """

    @property
    def block_size(self) -> int:
        """Tokens of an entry: shorter prompts are neither kept nor found."""
        ...

    @property
    def steps(self) -> EngineSteps:
        """Where the engine counts its steps: while it computes, less is kept at once."""
        ...

    def start_lookup(self, order: LookupOrder) -> None:
        """Begin to look; `PrefixFound` follows once. Nothing is loaded."""
        ...

    def start_load(self, order: LoadOrder) -> None:
        """Begin to load; `KVLanded` follows once.

        What a lookup of the same id has found is not looked for again.
        """
        ...

    def start_keep(self, order: KeepOrder) -> None:
        """Begin to keep; `KVSent` follows once."""
        ...

    def drop(self, num_tokens: int) -> None:
        """Count a request's tokens that the engine had no room to keep."""
        ...

    def abort_load(self, order: TicketId) -> None:
        """It is not wanted: `BlocksQuiescent` follows, unless `KVLanded` is on its way."""
        ...


class HandoffPort(SharedBlockPort, Protocol):
    """What an engine sees of the handoff agent. Thread-safe, never blocks."""

    @property
    def prefixes(self) -> PrefixStore | None:
        """Where prompts' beginnings are kept; None: nowhere."""
        ...

    def renew_lease(self, ticket: Ticket) -> None:
        """A decode request of this ticket is queued: its prefill worker is to hold the KV for it.

        Until `start_receive` or `decline`. No event follows; what was lost meanwhile fails at
        `start_receive`.
        """
        ...

    def start_receive(self, order: ReceiveOrder) -> None:
        """Ask the prefill worker for KV; `KVLanded` or `KVFailed` follows once."""
        ...

    def start_send(self, order: SendOrder) -> None:
        """Announce KV that is about to be computed; `KVSent` or `SendFailed` follows once."""
        ...

    def report_progress(self, prompts: Sequence[Ticket]) -> None:
        """The engine computes a step; `prompts` are all prefills that are not computed yet.

        Queued or begun, offered or not. Called at the beginning of each step in which anything is
        computed, and only by the thread that computes: it is the proof that the engine
        lives, for which decode workers wait longer than a handoff may take. Only takes note.
        """
        ...

    def layer_ready(
        self,
        tickets: Sequence[tuple[TicketId, int]],
        layer: int,
        after: StreamPosition | None = None,
    ) -> None:
        """For each `(ticket, stop)`: KV of tokens `[0, stop)` of `layer` is in place.

        On a GPU: it will be, at `after`, and so will be what was reported before.
        Called from the middle of a forward pass: only queues.
        """
        ...

    def prefill_done(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """Prefill of this ticket is done; `first_token` if this side sampled one to hand over."""
        ...

    def decline(self, ticket: Ticket, reason: str) -> None:
        """Decode's side wants nothing of this ticket (all is cached): the prefill worker may stop.

        Instead of `start_receive`; no event follows.
        """
        ...

    def abort(self, ticket: TicketId, reason: str) -> None:
        """End a handoff from this side (client left, engine failed).

        Receiving side: `BlocksQuiescent` follows once, and no `KVLanded` or `KVFailed`. Sending
        side: `SendFailed` follows once. After the handoff's end it does nothing.
        """
        ...

    def cancel_oldest_ungranted(self, tickets: Sequence[TicketId], reason: str) -> None:
        """End the first of these offers that was not granted, if there is one: `SendFailed`."""
        ...

    def poll(self) -> list[HandoffEvent]:
        """What happened since the last call, each thing once."""
        ...
