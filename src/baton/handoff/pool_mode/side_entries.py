"""Small entries by which workers send each other state through the store; read by polling.

**A heartbeat**: what a prefill worker's engine has yet to compute. The two workers of a handoff
through the store never meet, so this too is an entry, one for each incarnation of a prefill worker:
replaced now and then while its engine computes, with another number in it. What changes was written
after the last look, so no clocks are compared (docs/wire/store.md).

**A completion marker**: what the prefill worker leaves in the store beside the KV, that it is done,
and its first token. So a decode worker knows what to wait for: what is missing once the note is
there will not come. It is an entry like others, named by the ticket's id and the part of the heads
that its writer holds (docs/wire/store.md).

**An identity**: random bytes that the first worker puts into each tier (docs/wire/store.md).
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from typing import TYPE_CHECKING, Annotated, Final, Self, TypeVar

import msgspec

from baton.clock import Instant
from baton.errors import ProtocolError, StoreError
from baton.handoff.interface import SampledToken
from baton.handoff.messages import Tickets
from baton.net.framing import decode
from baton.store.interface import EntryLease, EntryName, LeasesNewest, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from baton.auth.ticket import Ticket
    from baton.ids import Epoch, TicketId

MAX_SIDE_ENTRY_BYTES: Final = 65_536

W = TypeVar("W")


def read_side_entry(store: Tier, name: EntryName, decoder: msgspec.msgpack.Decoder[W]) -> W | None:
    """An entry's content; None if it is not there, was damaged, or makes no sense.

    Looks before it asks: what is looked for often and has not come yet is no miss.
    """
    return _read(store.try_lease(name) if store.find((name,)) else None, decoder)


def _read(lease: EntryLease | None, decoder: msgspec.msgpack.Decoder[W]) -> W | None:
    if lease is None:
        return None
    with lease:
        if lease.num_bytes > MAX_SIDE_ENTRY_BYTES:
            return None
        body = bytearray(lease.num_bytes)
        if not lease.try_read(memoryview(body)):
            return None
    try:
        return decode(decoder, bytes(body))
    except ProtocolError:
        return None


logger = logging.getLogger(__name__)

MAX_TICKETS: Final = 1024
"""In one entry: those that come first are computed first."""
LOOKS_PER_HEARTBEAT: Final = 2
_HEARTBEAT_TAG: Final = b"baton/pool-heartbeat/2"


class HeartbeatEntry(msgspec.Struct, frozen=True):
    """These prompts are queued in the engine, or being computed. `number` is another each time."""

    number: Annotated[int, msgspec.Meta(ge=0)]
    tickets: Tickets


_heartbeat_decoder = msgspec.msgpack.Decoder(HeartbeatEntry)


class HeartbeatEntryWriter:
    """Prefill's side. Owner: the pool's thread."""

    def __init__(self, store: Tier, interval_s: float) -> None:
        self._store, self._interval_s = store, interval_s
        self._next_at = Instant(0.0)
        self._number = 0
        self._left: set[EntryName] = set()

    def write(self, prompts: Sequence[Ticket], at: Instant) -> None:
        """The engine computes, and has yet to compute these."""
        if at < self._next_at or not prompts:
            return
        self._next_at = Instant(at + self._interval_s)
        self._number += 1
        first = prompts[0].prefill.epoch
        tickets = [each.id for each in prompts if each.prefill.epoch == first]
        entry, name = (
            HeartbeatEntry(self._number, tuple(tickets[:MAX_TICKETS])),
            _heartbeat_name(first),
        )
        try:
            self._store.discard(name)
            self._store.put(name, memoryview(msgspec.msgpack.encode(entry)))
        except StoreError as exc:
            logger.debug("pool: no sign of life: %s", exc)
        self._left.add(name)

    def remove(self) -> None:
        """Nothing will be computed any more."""
        for name in self._left:
            self._store.discard(name)


class HeartbeatEntryReader:
    """Decode's side: looks now and then for what changed. Owner: the pool's thread."""

    def __init__(self, store: Tier, interval_s: float) -> None:
        self._store, self._interval_s = store, interval_s / LOOKS_PER_HEARTBEAT
        self._next_at = Instant(0.0)
        self._seen: dict[Epoch, int | None] = {}

    def poll(
        self, epochs: Iterable[Epoch], now: Instant, on_alive: Callable[[TicketId], None]
    ) -> None:
        """Report which prompts' engines have given a sign since the last look.

        `epochs` are those of the prefill workers that are waited for.
        """
        if now < self._next_at:
            return
        self._next_at = Instant(now + self._interval_s)
        before, self._seen = self._seen, {}
        for epoch in set(epochs):
            entry = self._read_newest(_heartbeat_name(epoch))
            number = None if entry is None else entry.number
            self._seen[epoch] = before.get(epoch) if number is None else number
            # What stood there at the first look may be old.
            if entry is not None and epoch in before and before[epoch] != number:
                for ticket in entry.tickets:
                    on_alive(ticket)

    def _read_newest(self, name: EntryName) -> HeartbeatEntry | None:
        """A copy in this worker's own memory would never change."""
        if isinstance(self._store, LeasesNewest):
            return _read(self._store.try_lease_newest(name), _heartbeat_decoder)
        return read_side_entry(self._store, name, _heartbeat_decoder)


def _heartbeat_name(epoch: Epoch) -> EntryName:
    return EntryName(hashlib.sha256(_HEARTBEAT_TAG + epoch.encode()).digest())


_MARKER_TAG: Final = b"baton/pool-completion-marker/2"


class CompletionMarker(msgspec.Struct, frozen=True):
    """Prefill of the prompt named by `prompt_hash` is over.

    KV of tokens `[0, num_tokens)` was put into the store; `reason` states why not of all.
    """

    prompt_hash: bytes
    num_tokens: int
    first_token: SampledToken | None
    reason: str = ""


_marker_decoder = msgspec.msgpack.Decoder(CompletionMarker)


def put_marker(store: Tier, ticket: TicketId, part: int, marker: CompletionMarker) -> None:
    """Put a note into the store.

    Raises:
        StoreError: there is no room for it.
    """
    store.put(_marker_name(ticket, part), memoryview(msgspec.msgpack.encode(marker)))


def find_marker(store: Tier, ticket: TicketId, part: int) -> CompletionMarker | None:
    """The note of a ticket, if it is there and makes sense."""
    return read_side_entry(store, _marker_name(ticket, part), _marker_decoder)


def remove_marker(store: Tier, ticket: TicketId, part: int) -> None:
    """It was read, and it has no other reader."""
    store.discard(_marker_name(ticket, part))


def _marker_name(ticket: TicketId, part: int) -> EntryName:
    return EntryName(hashlib.sha256(_MARKER_TAG + ticket + part.to_bytes(4, "little")).digest())


IDENTITY_BYTES: Final = 16
_IDENTITY_NAME: Final = EntryName(hashlib.sha256(b"baton/store-identity/1").digest())


class StoreIdentity(msgspec.Struct, frozen=True):
    """The content of the entry by which a place of the store is known."""

    random: Annotated[bytes, msgspec.Meta(min_length=IDENTITY_BYTES, max_length=IDENTITY_BYTES)]

    @classmethod
    def new(cls) -> Self:
        """A random one."""
        return cls(secrets.token_bytes(IDENTITY_BYTES))


_identity_decoder = msgspec.msgpack.Decoder(StoreIdentity)


def keep_identity(tier: Tier, identity: StoreIdentity) -> StoreIdentity | None:
    """The identity that is there, recently used now; `identity` is put there if there is none.

    None where none can be read, or put.
    """
    found = read_side_entry(tier, _IDENTITY_NAME, _identity_decoder)
    if found is not None:  # that was its last use
        return found
    try:
        tier.put(_IDENTITY_NAME, memoryview(msgspec.msgpack.encode(identity)))
    except StoreError as exc:
        logger.debug("store: an identity is not kept: %s", exc)
    return read_side_entry(tier, _IDENTITY_NAME, _identity_decoder)
