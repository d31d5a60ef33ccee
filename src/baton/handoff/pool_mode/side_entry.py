"""Small entries by which workers send each other state through the store; read by polling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from baton.errors import ProtocolError
from baton.transfer.messages import decode

if TYPE_CHECKING:
    import msgspec

    from baton.store.interface import EntryName, Tier

MAX_SIDE_ENTRY_BYTES: Final = 65_536

W = TypeVar("W")


def read_side_entry(store: Tier, name: EntryName, decoder: msgspec.msgpack.Decoder[W]) -> W | None:
    """An entry's content; None if it is not there, was damaged, or makes no sense.

    Looks before it asks: what is looked for often and has not come yet is no miss.
    """
    lease = store.try_lease(name) if store.find((name,)) else None
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
