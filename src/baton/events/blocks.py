"""The events of a worker's prefix cache, whichever engine published them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NewType, Protocol, TypeAlias

if TYPE_CHECKING:
    from baton.clock import UnixTime

EventDomain = NewType("EventDomain", str)
"""Who computes the hashes and how, e.g. `vllm/sha256`: hashes of two domains never compare."""

ExternalHash: TypeAlias = int | bytes
"""An engine's name for a block, opaque here: vLLM's is 64 bits of a chained hash, or all of it.

It covers all tokens up to the block's end and what else the engine's KV depends on (adapter,
cache salt, images): token ids alone do not name a block."""

DEFAULT_MEDIUM: Final = "GPU"
"""The medium of the engine's own pool. vLLM reports it on CPUs, too."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that follow `parent` (None: the sequence starts with them), in order.

    `token_ids` are those of the whole run of `block_size` tokens each. It may be longer than the
    hashes cover (blocks outside a sliding window have none), and is empty, with `block_size` 0,
    where a publisher does not know them.
    """

    domain: EventDomain
    hashes: tuple[ExternalHash, ...]
    parent: ExternalHash | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str
    group: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that are no longer in this medium and group."""

    domain: EventDomain
    hashes: tuple[ExternalHash, ...]
    medium: str
    group: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is cached any more, in any medium."""


BlockEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one engine step. `num_unknown` were of a type that is not known here."""

    published_at: UnixTime
    events: tuple[BlockEvent, ...]
    num_unknown: int
    data_parallel_rank: int


@dataclass(frozen=True, slots=True)
class NumberedBatch:
    """A batch and its number in one epoch of its publisher.

    `digest` is of the message's bytes: two epochs use the same numbers for different messages.
    """

    seq: int
    digest: int
    batch: EventBatch


@dataclass(frozen=True, slots=True)
class Restarted:
    """The publisher restarted: whatever was known of it is void."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Events from number `missing` on can't be had any more: what was known is void.

    What follows is applied to an empty state. That state may lack blocks that the worker holds;
    it never has one that the worker is known to have dropped.
    """

    missing: int


FeedEvent: TypeAlias = BlockEvent | Restarted | Lost


@dataclass(frozen=True, slots=True)
class FeedHealth:
    """How well a feed follows its publisher; counts are since the feed was made.

    `last_seq` is None before the first event of this epoch. `lag_s` is how long after its
    publication the last live batch was taken up, by the two hosts' wall clocks.
    """

    connected: bool = False
    state: Literal["in_sync", "replaying"] = "in_sync"
    last_seq: int | None = None
    lag_s: float | None = None
    num_gaps: int = 0
    num_replays: int = 0
    num_lost: int = 0
    num_restarts: int = 0
    num_duplicates: int = 0
    num_unreadable: int = 0
    num_unknown_events: int = 0


class KVEventFeed(Protocol):
    """One worker's events, each once and in order."""

    def poll(self) -> list[FeedEvent]:
        """What has happened since the last call. Never blocks."""
        ...

    @property
    def health(self) -> FeedHealth:
        """A snapshot. Any thread may ask."""
        ...
