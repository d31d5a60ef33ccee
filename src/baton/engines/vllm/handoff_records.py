"""One ended handoff as one rank saw it, in the form in which vLLM carries it to its API server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from baton.handoff.interface import DECLINED_STAGE
from baton.telemetry.trace import RequestSpan, Stamp

if TYPE_CHECKING:
    from baton.errors import HandoffError

NO_TRANSPORT: Final = "none"


class HandoffRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`wait_s` is how long its blocks were held; `transfer_s` from the first layer ready to landed.

    `failed_stage` is None where it ended well.
    """

    side: Literal["sent", "received"]
    transport: str
    expected_transport: str
    num_bytes: int
    num_pages: int
    wait_s: float
    transfer_s: float | None = None
    failed_stage: str | None = None


def record_sent(leg: RequestSpan, error: HandoffError | None, ended_at: float) -> HandoffRecord:
    """A prefill request's handoff. One that was declined did not fail: nothing of it was wanted."""
    failed = error is not None and error.stage != DECLINED_STAGE
    return HandoffRecord(
        side="sent",
        transport=leg.transport or NO_TRANSPORT,
        expected_transport=leg.expected_transport or NO_TRANSPORT,
        num_bytes=leg.num_bytes,
        num_pages=leg.num_pages,
        wait_s=max(0.0, ended_at - leg.stamps.get(Stamp.ADMITTED, ended_at)),
        failed_stage=error.stage if error is not None and failed else None,
    )


def record_received(leg: RequestSpan, error: HandoffError | None, ended_at: float) -> HandoffRecord:
    """A decode request's handoff."""
    landed = leg.stamps.get(Stamp.LAST_LAYER_LANDED)
    ready = leg.peer_stamps.get(Stamp.FIRST_LAYER_READY)
    done = error is None and landed is not None and ready is not None
    return HandoffRecord(
        side="received",
        transport=leg.transport or NO_TRANSPORT,
        expected_transport=leg.expected_transport or NO_TRANSPORT,
        num_bytes=leg.num_bytes if error is None else 0,
        num_pages=leg.num_pages if error is None else 0,
        wait_s=max(0.0, ended_at - leg.stamps.get(Stamp.PAGES_RESERVED, ended_at)),
        transfer_s=landed - ready if done and landed is not None and ready is not None else None,
        failed_stage=None if error is None else error.stage,
    )
