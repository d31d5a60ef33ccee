"""Identities: one type for each, so that the wrong one cannot be passed by accident."""

from __future__ import annotations

import secrets
from typing import NewType

TicketId = NewType("TicketId", bytes)
"""16 random bytes: one authorised handoff."""

WorkerId = NewType("WorkerId", str)
"""An operator's name for a worker, e.g. `prefill-0`. Survives a restart."""

Epoch = NewType("Epoch", str)
"""One life of a worker: 32 hex digits, random at each start."""

RequestId = NewType("RequestId", str)
"""What the client sees as `x-request-id`: printable ASCII, at most 128 characters."""

RegionHandle = NewType("RegionHandle", bytes)
"""16 random bytes that name registered memory to a peer: never an address."""


def new_ticket_id() -> TicketId:
    """A fresh random ticket id."""
    return TicketId(secrets.token_bytes(16))


def new_region_handle() -> RegionHandle:
    """A fresh random region handle."""
    return RegionHandle(secrets.token_bytes(16))


def new_epoch() -> Epoch:
    """A fresh random epoch."""
    return Epoch(secrets.token_hex(16))


def new_request_id() -> RequestId:
    """A fresh random request id."""
    return RequestId(f"req-{secrets.token_hex(12)}")
