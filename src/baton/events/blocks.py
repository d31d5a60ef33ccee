"""The events of a worker's prefix cache, whichever engine published them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NewType, Protocol, TypeAlias, assert_never

from baton.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.clock import UnixTime
    from baton.ids import StoreId

EventDomain = NewType("EventDomain", str)
"""Who computes the hashes and how, e.g. `vllm/sha256`: hashes of two domains never compare."""

ExternalHash: TypeAlias = int | bytes
"""An engine's name for a block, opaque here: vLLM's is 64 bits of a chained hash, or all of it.

It covers all tokens up to the block's end and what else the engine's KV depends on (adapter,
cache salt, images): token ids alone do not name a block."""

DEFAULT_MEDIUM: Final = "GPU"
"""The medium of the engine's own pool. vLLM reports it on CPUs, too."""

STORE_MEDIUM: Final = "STORE"
"""What a Baton worker loads from besides: the tiers of its store."""

ENTRY_NAME_BYTES: Final = 8


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32: in a third of the time that numpy takes for a list."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


class BlockStored(Record, frozen=True):
    """Blocks that follow `parent` (None: the sequence starts with them), in order.

    `packed_ids` (`pack_ids`) are those of the whole run of `block_size` tokens each. It may be
    longer than the hashes cover (blocks outside a sliding window have none), and is empty, with
    `block_size` 0, where a publisher does not know them. `salt` keeps sequences apart whose tokens
    are equal: the tenant's, as `hash_tenant` makes it, with the adapter's name (`salt_of_adapter`);
    given where a sequence begins. Into the hashes of the first `num_plain` blocks (None: of all)
    went nothing but tokens and `salt`; into the next one's an image, for instance.
    """

    domain: EventDomain
    hashes: tuple[ExternalHash, ...]
    parent: ExternalHash | None
    packed_ids: bytes
    block_size: int
    medium: str
    group: int
    salt: str = ""
    num_plain: int | None = None


class BlockRemoved(Record, frozen=True):
    """Blocks that are no longer in this medium and group."""

    domain: EventDomain
    hashes: tuple[ExternalHash, ...]
    medium: str
    group: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is cached any more, in any medium."""


class BlocksExpected(Record, frozen=True):
    """A prompt is queued whose blocks from `parent` on (None: all) are not cached yet.

    They are stored once they are computed; if the request ends before, they never are. So a gateway
    that did not place the request learns where its prompt will be cached. `packed_ids` (`pack_ids`)
    are those of full blocks; `salt` as in `BlockStored`.
    """

    parent: ExternalHash | None
    packed_ids: bytes
    block_size: int
    salt: str = ""


class EntriesStored(Record, frozen=True):
    """Entries of `block_size` tokens each are in a tier now.

    `tier` is where: workers that report the same one find each other's entries there. `names`
    (`pack_names`) are `PrefixNames` of the secret `naming`: each stands for all tokens of a
    sequence up to its entry's end, so that neither tokens nor parents are needed.
    """

    tier: StoreId
    naming: bytes
    block_size: int
    names: bytes


class EntriesRemoved(Record, frozen=True):
    """Entries that are not in the tier any more."""

    tier: StoreId
    naming: bytes
    block_size: int
    names: bytes


class TiersListed(Record, frozen=True):
    """The tiers from which the worker loads, the quickest first: in place of those before."""

    tiers: tuple[StoreId, ...]


def pack_names(names: Sequence[int]) -> bytes:
    """Names of entries as little-endian uint64."""
    return struct.pack(f"<{len(names)}Q", *names)


def unpack_names(packed: bytes) -> tuple[int, ...]:
    """The inverse of `pack_names`."""
    return struct.unpack(f"<{len(packed) // ENTRY_NAME_BYTES}Q", packed)


StoreEvent: TypeAlias = EntriesStored | EntriesRemoved | TiersListed
BlockEvent: TypeAlias = BlockStored | BlockRemoved | BlocksExpected | AllBlocksCleared | StoreEvent


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


class WorkerBlockIndex:
    """Sets of hashes, one for each medium and group. One owner thread.

    Of the store's tiers only the number of entries is kept.

    A set, not a count of copies: vLLM reports each copy of a block, and on request of blocks that
    it merely used again, so that counts would not return to zero. When one of two copies goes,
    the block counts as gone: a hit may be missed, none is made up.
    """

    def __init__(self, domain: EventDomain) -> None:
        self._domain = domain
        self._held: dict[tuple[str, int], set[ExternalHash]] = {}
        self._num_entries = 0

    @property
    def num_blocks(self) -> dict[tuple[str, int], int]:
        """Blocks held by (medium, group), of all that were ever reported. Any thread may ask.

        An entry that is in two tiers of the store counts twice.
        """
        held = {key: len(blocks) for key, blocks in list(self._held.items())}
        return held | {(STORE_MEDIUM, 0): self._num_entries} if self._num_entries else held

    def apply(self, event: FeedEvent) -> None:
        """Take up one event of the worker's feed. Those of another domain are ignored."""
        match event:
            case BlockStored():
                if event.domain == self._domain:
                    self._of(event.medium, event.group).update(event.hashes)
            case BlockRemoved():
                if event.domain == self._domain:
                    self._of(event.medium, event.group).difference_update(event.hashes)
            case EntriesStored():
                self._num_entries += len(event.names) // ENTRY_NAME_BYTES
            case EntriesRemoved():
                num_gone = len(event.names) // ENTRY_NAME_BYTES
                self._num_entries = max(0, self._num_entries - num_gone)
            case TiersListed() | BlocksExpected():
                pass
            case AllBlocksCleared() | Restarted() | Lost():
                self.clear()
            case _ as never:
                assert_never(never)

    def clear(self) -> None:
        """Forget every block."""
        self._num_entries = 0
        for held in self._held.values():
            held.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError if the sets cannot be.

        Raises:
            AssertionError: a key or a hash is of no kind that an event can carry.
        """
        for (medium, group), held in self._held.items():
            if not medium or group < 0:
                raise AssertionError(f"blocks in medium {medium!r}, group {group}")
            if not all(isinstance(block, int | bytes) for block in held):
                raise AssertionError(f"medium {medium!r}, group {group} holds what is no hash")

    def _of(self, medium: str, group: int) -> set[ExternalHash]:
        return self._held.setdefault((medium, group), set())
