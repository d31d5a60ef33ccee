"""The scheduler's orders to each worker in a step. Plain values, pickled by vLLM itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np

from baton.auth.ticket import Ticket
from baton.clock import Instant
from baton.kv.identity import Adapter

if TYPE_CHECKING:
    from numpy.typing import NDArray

VllmRequestId: TypeAlias = str
"""vLLM's internal id of a request: unlike the ticket's, it is another one on each server."""


class Occupancy(msgspec.Struct, frozen=True):
    """vLLM's queue and KV blocks, of `block_size` tokens each.

    `max_running`: its `max_num_seqs`, None where that is not known. `why_no_handoffs`: why it
    refuses them until it is restarted, None where it does not.
    """

    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    block_size: int
    max_running: int | None = None
    why_no_handoffs: str | None = None


class Prompt(msgspec.Struct, frozen=True):
    """A prompt whose KV is to be handed over under `ticket`; `received_at` on this host's clock.

    Its first `num_tokens`, to which `prompt_hash` commits, where the ticket is for a prefix.
    `packed_ids` are its token ids as int32, in mode pool alone. `adapter` computes it.
    """

    ticket: Ticket
    prompt_hash: bytes
    num_tokens: int
    received_at: Instant
    packed_ids: bytes | None = None
    adapter: Adapter | None = None

    @property
    def token_ids(self) -> NDArray[np.int32] | None:
        """`[num_tokens]`, in mode pool alone."""
        return None if self.packed_ids is None else np.frombuffer(self.packed_ids, np.int32)


class StartSend(msgspec.Struct, frozen=True):
    """Prefill begins, after `num_cached_tokens` that vLLM's prefix cache has.

    `num_loaded_tokens` of them were loaded from the store.

    None of them is ready before this step's layers are: another prompt of the same step may be
    about to compute them, since vLLM lists blocks in its cache when it plans to fill them.
    """

    request: VllmRequestId
    prompt: Prompt
    num_cached_tokens: int
    num_loaded_tokens: int = 0


class Progress(msgspec.Struct, frozen=True):
    """This step computes an offered prompt's tokens up to `stop`.

    `blocks` are those that joined its table, from logical block `first_block` on.
    """

    request: VllmRequestId
    first_block: int
    blocks: tuple[int, ...]
    stop: int
    is_last: bool


class StartReceive(msgspec.Struct, frozen=True):
    """Receive KV of tokens `[start, num_tokens)` into `blocks`, all of them."""

    request: VllmRequestId
    prompt: Prompt
    start: int
    first_block: int
    blocks: tuple[int, ...]


class Decline(msgspec.Struct, frozen=True):
    """Nothing of this prompt's KV is wanted: its prefill worker may stop."""

    prompt: Prompt
    reason: str


class Withdraw(msgspec.Struct, frozen=True):
    """This prompt's KV will never be offered: its decode worker should not wait."""

    prompt: Prompt
    reason: str


class Abort(msgspec.Struct, frozen=True):
    """This handoff is not needed any more; its blocks are held until it has ended."""

    request: VllmRequestId
    reason: str


class Finished(msgspec.Struct, frozen=True):
    """A request with a handoff is over: how, and after how many tokens."""

    request: VllmRequestId
    outcome: str
    num_output_tokens: int


class LookUp(msgspec.Struct, frozen=True):
    """Find what the store has of a prompt, from token `start` on.

    `packed_ids`: its token ids as int32. Computing instead takes `token_s` a token; 0: unknown.
    `adapter` computes the prompt.
    """

    request: VllmRequestId
    tenant_salt: str
    packed_ids: bytes
    start: int
    token_s: float
    adapter: Adapter | None

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """`[num_tokens]`."""
        return np.frombuffer(self.packed_ids, np.int32)


class StartLoad(LookUp, frozen=True):
    """Load tokens from `start` to the end of `packed_ids` into `blocks`, all of them.

    The request has waited `lookup_s` for the answer to its lookup.
    """

    first_block: int
    blocks: tuple[int, ...]
    lookup_s: float = 0.0


class Keep(msgspec.Struct, frozen=True):
    """Keep a request's tokens, all of them in `blocks`, which are held until it is reported."""

    request: VllmRequestId
    tenant_salt: str
    packed_ids: bytes
    blocks: tuple[int, ...]
    adapter: Adapter | None = None

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """`[num_tokens]`, a multiple of the store's block size."""
        return np.frombuffer(self.packed_ids, np.int32)


class PrefixOrders(msgspec.Struct, frozen=True):
    """What a step asks of the store. `aborted` are loads that their requests do not wait for.

    `read_loads` are loads whose KV the ranks have read: it is in place before this step computes
    the rest of their prompts. What was read of `released` is not needed.
    Of requests that ended, `num_dropped_tokens` are not kept: too many blocks are held already.
    """

    lookups: tuple[LookUp, ...] = ()
    loads: tuple[StartLoad, ...] = ()
    read_loads: tuple[StartLoad, ...] = ()
    released: tuple[VllmRequestId, ...] = ()
    aborted: tuple[VllmRequestId, ...] = ()
    keeps: tuple[Keep, ...] = ()
    num_dropped_tokens: int = 0


class StepOrders(msgspec.Struct, frozen=True):
    """One step.

    `preempted` lose their blocks before this step's forward, and so have
    `preempted_while_held`, which finished since and are held until their handoffs have ended;
    `started` are received prompts whose
    decoding begins with it. `arrived` are prefills that wait in vLLM's queue, until `offers` or
    `withdrawn` name them; `queued` wait there for what `expected` will ask for.
    `is_stalled`: requests timed out waiting for blocks of computed KV that has no grant.
    `occupancy` is vLLM's as it planned the step; None where it is as the workers know it.
    `prefixes`: None where nothing is asked of the store.
    """

    preempted: tuple[VllmRequestId, ...] = ()
    preempted_while_held: tuple[VllmRequestId, ...] = ()
    offers: tuple[StartSend, ...] = ()
    progress: tuple[Progress, ...] = ()
    arrived: tuple[Prompt, ...] = ()
    queued: tuple[Prompt, ...] = ()
    expected: tuple[StartReceive, ...] = ()
    declined: tuple[Decline, ...] = ()
    withdrawn: tuple[Withdraw, ...] = ()
    aborted: tuple[Abort, ...] = ()
    started: tuple[VllmRequestId, ...] = ()
    finished: tuple[Finished, ...] = ()
    is_stalled: bool = False
    occupancy: Occupancy | None = None
    prefixes: PrefixOrders | None = None


NO_ORDERS: Final = StepOrders()
"""Of a step with nothing to do: known by its identity."""


class StepReport(msgspec.Struct, frozen=True):
    """Ranks' report to the scheduler.

    `failed_sends` failed while they were still computed, with the reason. `found`: each rank's
    answer to a lookup, how many of the prompt's tokens are in place or can be loaded. `read`: those
    that are in a rank's memory. `kept` need their blocks no more. A request once for each rank.
    """

    failed_sends: tuple[tuple[VllmRequestId, str], ...] = ()
    found: tuple[tuple[VllmRequestId, int], ...] = ()
    kept: tuple[VllmRequestId, ...] = ()
    read: tuple[VllmRequestId, ...] = ()

    def merge(self, other: StepReport) -> StepReport:
        """Both ranks' reports."""
        return StepReport(
            self.failed_sends + other.failed_sends,
            self.found + other.found,
            self.kept + other.kept,
            self.read + other.read,
        )
