"""Identities: one type for each, so that the wrong one cannot be passed by accident."""

from __future__ import annotations

import os
import secrets
from typing import Final, NewType

TicketId = NewType("TicketId", bytes)
"""16 random bytes: one authorised handoff."""

WorkerId = NewType("WorkerId", str)
"""An operator's name for a worker, e.g. `prefill-0`. Survives a restart."""

Epoch = NewType("Epoch", str)
"""One incarnation of a worker: 32 hex digits, random at each start."""

StoreId = NewType("StoreId", str)
"""32 hex digits: workers that report the same one find each other's entries in their store."""

RequestId = NewType("RequestId", str)
"""What the client sees as `x-request-id`: printable ASCII, at most 128 characters."""

RegionHandle = NewType("RegionHandle", bytes)
"""16 random bytes that name registered memory to a peer: never an address."""


ID_BYTES: Final = 16
BATCH: Final = 256
_random_ids: list[bytes] = []
"""Not handed out yet. The system is asked for many at once: that costs the same as for one."""

os.register_at_fork(after_in_child=_random_ids.clear)


def _random_id() -> bytes:
    """16 random bytes. Thread-safe: a list's `pop` and `extend` each happen at once."""
    try:
        return _random_ids.pop()
    except IndexError:
        many = os.urandom(ID_BYTES * BATCH)
        ids = [many[i : i + ID_BYTES] for i in range(0, len(many), ID_BYTES)]
        own = ids.pop()
        _random_ids.extend(ids)
        return own


def new_ticket_id() -> TicketId:
    """A fresh random ticket id."""
    return TicketId(_random_id())


def new_region_handle() -> RegionHandle:
    """A fresh random region handle."""
    return RegionHandle(secrets.token_bytes(16))


def new_epoch() -> Epoch:
    """A fresh random epoch."""
    return Epoch(secrets.token_hex(16))


def new_request_id() -> RequestId:
    """A fresh random request id."""
    return RequestId(f"req-{_random_id()[:12].hex()}")


def new_trace_id() -> str:
    """A fresh random id of a W3C trace: 32 hex digits."""
    return _random_id().hex()


def new_span_id() -> str:
    """A fresh random id of a W3C span: 16 hex digits."""
    return _random_id()[:8].hex()
