"""What the prefill worker leaves in the store beside the KV: that it is done, and its first token.

So a decode worker knows what to wait for: what is missing once the note is there will not come. It
is an entry like others, named by the ticket's id and the part of the heads that its writer holds
(docs/wire/store.md).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

from baton.handoff.interface import SampledToken
from baton.handoff.pool_mode.side_entry import read_side_entry
from baton.store.interface import EntryName

if TYPE_CHECKING:
    from baton.ids import TicketId
    from baton.store.interface import Tier

_TAG: Final = b"baton/pool-completion-marker/2"


class CompletionMarker(msgspec.Struct, frozen=True):
    """Prefill of the prompt named by `prompt_hash` is over.

    KV of tokens `[0, num_tokens)` was put into the store; `reason` states why not of all.
    """

    prompt_hash: bytes
    num_tokens: int
    first_token: SampledToken | None
    reason: str = ""


_decoder = msgspec.msgpack.Decoder(CompletionMarker)


def put_marker(store: Tier, ticket: TicketId, part: int, marker: CompletionMarker) -> None:
    """Put a note into the store.

    Raises:
        StoreError: there is no room for it.
    """
    store.put(_entry_name(ticket, part), memoryview(msgspec.msgpack.encode(marker)))


def find_marker(store: Tier, ticket: TicketId, part: int) -> CompletionMarker | None:
    """The note of a ticket, if it is there and makes sense."""
    return read_side_entry(store, _entry_name(ticket, part), _decoder)


def remove_marker(store: Tier, ticket: TicketId, part: int) -> None:
    """It was read, and it has no other reader."""
    store.discard(_entry_name(ticket, part))


def _entry_name(ticket: TicketId, part: int) -> EntryName:
    return EntryName(hashlib.sha256(_TAG + ticket + part.to_bytes(4, "little")).digest())
