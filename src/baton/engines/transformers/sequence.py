"""The state of one request: its tokens, its blocks, and how far its KV is computed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from baton.engines.interface import (
    Colocated,
    DecodeRequest,
    FinishReason,
    PrefillRequest,
    RequestKind,
)
from baton.errors import BatonError
from baton.kv.copies import count_blocks
from baton.kv.identity import BlockHash, HashDomain, compute_block_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from numpy.typing import NDArray

    from baton.auth.ticket import Ticket
    from baton.clock import Instant
    from baton.engines.interface import EngineInfo, GenerationRequest
    from baton.handoff.interface import KVLanded, LandingLayers, SampledToken
    from baton.ids import RequestId, TicketId


class LayerLateError(BatonError):
    """A step waited for a layer that has not landed."""


class Status(Enum):
    """Where a sequence stands.

    waiting ──► running ──► ended          and back to waiting when preempted
       │           └──────► offered ──► ended    a prefill request until its KV is sent
       └──► awaiting_kv ──► running              a decode request until its KV has landed
                │ ▲
                ▼ │
              running                            while it lands: see `Sequence.landing`
    """

    WAITING = "waiting"
    RUNNING = "running"
    AWAITING_KV = "awaiting_kv"
    OFFERED = "offered"
    ENDED = "ended"


class PrefixState(Enum):
    """What the store does for a sequence's prompt.

    unasked ──► awaited ──answered──► found ──► loading ──► done
                   │                    ▲ └──nothing──► done
                   └──too long──► asked ┘

    A sequence is not computed while it is awaited or loading.
    """

    UNASKED = "unasked"
    AWAITED = "awaited"
    ASKED = "asked"
    FOUND = "found"
    LOADING = "loading"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """Blocks that follow one another from `parent` on, with their names and tokens."""

    blocks: list[int]
    hashes: list[BlockHash]
    parent: BlockHash | None
    token_ids: NDArray[np.int32]


class Sequence:  # noqa: PLR0904 - one for each thing that happens to it
    """One request's tokens and blocks. Owned by the engine's thread.

        tokens  [0, num_computed): KV is in `blocks` · [num_computed, num_tokens): to be computed

    `kind` becomes `Colocated` once nothing is to be received any more. `imported` are the places in
    `blocks` of those that are a peer's: full ones, never written here. Of layers with a window,
    tokens before `complete_from` may never have been received. Computing tokens from
    `num_prefill_tokens` on is decoding: they are the prompt's last one, whose KV was received, or
    tokens sampled here. `load_id` names the orders by which its beginning was asked of the store,
    which is done once; `num_stored_tokens` is what was found there. While `is_standby` no token is
    sampled: they are appended (`extend`).
    With `landing` the KV of a prompt's first tokens still arrives in `blocks`, and those after them
    are computed, each layer once its KV is there. What comes of it, `early_token` too, counts once
    all has landed.
    """

    def __init__(
        self, request: GenerationRequest, domain: HashDomain, seed: int, arrival: int
    ) -> None:
        self.request, self.seed, self.arrival = request, seed, arrival
        self.kind: RequestKind = request.kind
        self.status = Status.WAITING
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_tokens = self.num_prompt_tokens
        self.num_prefill_tokens = self.num_prompt_tokens
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.complete_from = 0
        self.blocks: list[int] = []
        self.imported = range(0)
        self.first_token: SampledToken | None = None
        self.load_id: TicketId | None = None
        self.prefix_state = PrefixState.UNASKED
        self.num_stored_tokens = 0
        self.is_standby = request.is_standby
        self.landing: LandingLayers | None = None
        self.early_token: SampledToken | None = None
        self._num_landing_at = 0
        self._domain = domain
        self._num_published = self._num_own_tokens = 0
        self._hashes: list[BlockHash] = []
        self._token_ids = np.empty(
            self.num_prompt_tokens + request.sampling.max_tokens, dtype=np.int32
        )
        self._token_ids[: self.num_prompt_tokens] = request.prompt_ids

    @property
    def ticket(self) -> Ticket | None:
        """The ticket of its request."""
        return find_ticket(self.request)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._domain.block_size

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is not computed; computing the last of them gives a new token."""
        return self.num_tokens - self.num_computed

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return count_blocks(num_tokens, self.block_size)

    def token_ids(self, start: int, stop: int) -> NDArray[np.int32]:
        """Tokens `[start, stop)`."""
        return self._token_ids[start:stop]

    def hashes(self, num_tokens: int) -> list[BlockHash]:
        """Names of the full blocks among tokens `[0, num_tokens)`."""
        num_full = num_tokens // self.block_size
        if num_full > len(self._hashes):
            known = len(self._hashes)
            parent = self._hashes[-1] if known else None
            fresh = self._token_ids[known * self.block_size : num_full * self.block_size]
            self._hashes += compute_block_hashes(self._domain, fresh, parent)
        return self._hashes[:num_full]

    def reusable_hashes(self) -> list[BlockHash]:
        """Names of the blocks that may come from the cache.

        At least the last known token is always computed: its logits give the next one.
        """
        return self.hashes(self.num_tokens - 1)

    def take_publishable(self) -> PublishedRun | None:
        """Blocks that became full and complete since the last call; None where there are none.

        None from the first imported one on: it may leave before the others do, and what follows it
        cannot be found without it.
        """
        if self.imported or self.landing is not None:
            return None
        hashes, size = self.hashes(self.num_computed), self.block_size
        first = max(self._num_published, -(-self.complete_from // size))
        self._num_published = len(hashes)
        if first >= len(hashes):
            return None
        return PublishedRun(
            blocks=self.blocks[first : len(hashes)],
            hashes=hashes[first:],
            parent=hashes[first - 1] if first else None,
            token_ids=self._token_ids[first * size : len(hashes) * size],
        )

    def admit(self, cached: list[int], fresh: list[int]) -> None:
        """Take blocks: the leading ones hold computed tokens already."""
        self.blocks = cached + fresh
        self._num_published = len(cached)
        self.num_computed = len(cached) * self.block_size
        if self.num_output_tokens == 0:
            self.num_cached_tokens = max(0, self.num_computed - self._num_own_tokens)

    def restart(self) -> list[int]:
        """Forget all KV: the tokens sampled so far become part of what is to be computed.

        Returns:
            The blocks that it held.
        """
        blocks, self.blocks = self.blocks, []
        if self.num_output_tokens == 0:  # what it finds in the cache later is its own
            num_full = self.num_computed // self.block_size * self.block_size
            own = num_full - self.num_cached_tokens
            self._num_own_tokens = max(self._num_own_tokens, own)
        self.num_computed = self._num_published = self.complete_from = 0
        self.imported = range(0)
        self.num_prefill_tokens = self.num_prompt_tokens
        return blocks

    def receive(
        self, blocks: list[int], num_to_compute: int, complete_from: int, *, num_imported: int = 0
    ) -> None:
        """The rest of the prompt's KV came from a peer, in `blocks`.

        The first `num_imported` of them are the peer's own. Of the KV, the last `num_to_compute`
        tokens are taken as not computed. More than the last one: not all had come.
        """
        self.imported = range(len(self.blocks), len(self.blocks) + num_imported)
        self.blocks += blocks
        self.num_computed = self.num_prompt_tokens - num_to_compute
        self.num_prefill_tokens = (
            self.num_computed if num_to_compute <= 1 else self.num_prompt_tokens
        )
        self.complete_from = complete_from
        self.kind = Colocated()

    def begin_landing(
        self, layers: LandingLayers, blocks: Many[int], num_landing: int, complete_from: int
    ) -> None:
        """Tokens before `num_landing` arrive in `blocks`; those after them can be computed."""
        self.landing, self._num_landing_at = layers, len(self.blocks)
        self.blocks += blocks
        self.num_computed, self.complete_from = num_landing, complete_from

    def stop_landing(self) -> None:
        """Forget what was computed on KV that has not landed, and the blocks it was to land in."""
        if self.landing is None:
            return
        self.landing = self.early_token = None
        del self.blocks[self._num_landing_at :]
        self.num_computed, self.complete_from = self._num_landing_at * self.block_size, 0

    def finish_landing(self) -> SampledToken | None:
        """All has landed: what was computed counts. The token that came of it, if there is one."""
        token, self.early_token, self.landing = self.early_token, None, None
        self.kind = Colocated()
        return token

    def make_loaded_run(self, blocks: list[int], start: int, stop: int) -> PublishedRun | None:
        """Full blocks of the prompt that came from the store, tokens `[start, stop)` in `blocks`.

        `start` is the first token of a block. None where no block is full.
        """
        first, hashes = start // self.block_size, self.hashes(stop)
        if first >= len(hashes):
            return None
        return PublishedRun(
            blocks=blocks[: len(hashes) - first],
            hashes=hashes[first:],
            parent=hashes[first - 1] if first else None,
            token_ids=self._token_ids[start : len(hashes) * self.block_size],
        )

    def append(self, token_id: int, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Add a sampled token; why it is the last one, if it is."""
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.num_output_tokens > self.request.sampling.min_tokens and self._ends(
            token_id, eos_token_ids
        ):
            return FinishReason.STOP
        if self.num_output_tokens >= self.request.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def extend(self, token_ids: Many[int], *, generates: bool) -> None:
        """Add tokens that another worker has sampled; with `generates` the next one is sampled."""
        stop = self.num_tokens + len(token_ids)
        self._token_ids[self.num_tokens : stop] = token_ids
        self.num_tokens = stop
        self.is_standby = not generates

    def banned_tokens(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens that must not be sampled next: those that would end the answer too early."""
        sampling = self.request.sampling
        if self.num_output_tokens >= sampling.min_tokens:
            return ()
        return sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids)

    def _ends(self, token_id: int, eos_token_ids: tuple[int, ...]) -> bool:
        sampling = self.request.sampling
        return token_id in sampling.stop_token_ids or (
            not sampling.ignore_eos and token_id in eos_token_ids
        )


def is_pulled(sequence: Sequence) -> bool:
    """Whether it is a prefill request whose KV is held until its decode worker has room."""
    kind = sequence.kind
    return isinstance(kind, PrefillRequest) and kind.ticket.mode == "pull"


def is_pushed_prefix(sequence: Sequence) -> bool:
    """Whether KV of a part of a prompt is to be pushed, and no token is wanted after it."""
    kind = sequence.kind
    if not isinstance(kind, PrefillRequest):
        return False
    return kind.ticket.num_prefix_tokens > 0 and kind.ticket.mode == "push"


def find_ticket(request: GenerationRequest) -> Ticket | None:
    """The ticket that a request came with."""
    match request.kind:
        case PrefillRequest(ticket) | DecodeRequest(ticket):
            return ticket
        case Colocated():
            return None


def count_landed(landed: KVLanded, sequence: Sequence) -> int:
    """How many of the prompt's first tokens are in place, cached ones included."""
    if landed.num_tokens is not None:
        return landed.num_tokens
    return count_handed_over(sequence)


def count_handed_over(sequence: Sequence) -> int:
    """How many of the prompt's first tokens its ticket promises."""
    num_prompt_tokens, ticket = sequence.num_prompt_tokens, sequence.ticket
    return num_prompt_tokens if ticket is None else ticket.count_handed_over(num_prompt_tokens)


def is_computed_while_landing(sequence: Sequence) -> bool:
    """Whether tokens after those that are handed over can be computed meanwhile."""
    num_landing = count_handed_over(sequence)
    # What lands and what is computed are in different blocks. A single token is no step of its own.
    is_apart = num_landing % sequence.block_size == 0
    return is_apart and sequence.num_prompt_tokens - num_landing > 1 and not sequence.is_standby


class SequenceTable:
    """Unfinished requests, by id and by ticket. Owned by the engine's thread."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._sequences: dict[RequestId, Sequence] = {}
        self._tickets: dict[TicketId, Sequence] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def all(self) -> list[Sequence]:
        """All of them, the oldest first."""
        return list(self._sequences.values())

    @property
    def next_deadline(self) -> Instant | None:
        """The earliest deadline; None if there are no requests."""
        return min((s.request.deadline for s in self._sequences.values()), default=None)

    def add(self, request: GenerationRequest) -> Sequence:
        """Make a request's sequence. Its seed is random unless the request sets one."""
        block_size, seed = self._info.layout.block_size, request.sampling.seed
        domain = HashDomain(self._info.fingerprint, request.tenant_salt, block_size)
        sequence = Sequence(
            request, domain, secrets.randbits(63) if seed is None else seed, self._num_arrived
        )
        self._num_arrived += 1
        if sequence.ticket is not None:
            self._tickets[sequence.ticket.id] = sequence
        request.trace.num_prompt_tokens = sequence.num_prompt_tokens
        self._sequences[request.id] = sequence
        return sequence

    def find(self, request: RequestId) -> Sequence | None:
        """A request's sequence, unless it has ended."""
        return self._sequences.get(request)

    def has_ticket(self, ticket: TicketId) -> bool:
        """Whether an unfinished request has this ticket."""
        return ticket in self._tickets

    def find_by_ticket(self, ticket: TicketId) -> Sequence | None:
        """The sequence of the unfinished request that has this ticket."""
        return self._tickets.get(ticket)

    def find_expired(self, now: Instant) -> list[Sequence]:
        """Requests whose deadline has passed."""
        return [s for s in self._sequences.values() if s.request.deadline <= now]

    def uncomputed_prefills(self) -> list[Ticket]:
        """Tickets of prefill requests that are queued here, or being computed."""
        return [
            sequence.kind.ticket
            for sequence in self._sequences.values()
            if isinstance(sequence.kind, PrefillRequest) and sequence.first_token is None
        ]

    def remove(self, sequence: Sequence) -> None:
        """Forget a request."""
        if sequence.ticket is not None:
            self._tickets.pop(sequence.ticket.id, None)
        del self._sequences[sequence.request.id]

    def clear(self) -> list[RequestId]:
        """Forget all requests; their ids."""
        requests = list(self._sequences)
        self._sequences.clear()
        self._tickets.clear()
        return requests
