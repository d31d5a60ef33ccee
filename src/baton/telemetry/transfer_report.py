"""What one worker has measured of KV transfers: `GET /baton/v1/transfers` (docs/wire).

Counted since the worker's start, so that two reports of one `epoch` can be subtracted. Times of a
handoff are the receiver's; those of a link, of the side that moves the bytes.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from baton.telemetry.log_histogram import BucketCounts

MAX_ENTRIES: Final = 256
"""Of each kind, in one report."""
MAX_REPORT_BYTES: Final = 8 << 20
DISTANCES: Final = ("same_device", "same_host", "same_rack", "same_zone", "cross_zone")
"""From near to far: the names of `router.topology.Distance`."""
UNKNOWN_DISTANCE: Final = "unknown"

MAX_TEXT_CHARS: Final = 256

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Total = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0)]


class TransportMismatch(msgspec.Struct, frozen=True):
    """The latest handoff that used another transport than expected, and how long ago it ended."""

    expected: Text
    used: Text
    s_ago: Seconds
    request_id: Text


class HandoffTransfers(msgspec.Struct, frozen=True, kw_only=True):
    """All handoffs from one peer over one transport, in one mode, by one operation.

    `transfer_s`: from the first layer computed to the last one here, so that in mode push it has
    the rest of prefill in it. `s_per_mib`: that time for each MiB. `exposed_share`: the part of
    that time that was after prefill's end, 0 to 1. `exposed_s` and `seconds` are sums.
    `num_mismatches`: those whose transport was not the expected one.
    """

    peer: Text
    distance: Text
    transport: Text
    mode: Text
    operation: Text
    num: Total
    num_bytes: Total
    seconds: Seconds
    exposed_s: Seconds
    transfer_s: BucketCounts
    s_per_mib: BucketCounts
    exposed_share: BucketCounts
    num_mismatches: Total = 0
    last_mismatch: TransportMismatch | None = None


class LinkDrift(msgspec.Struct, frozen=True, kw_only=True):
    """How a link's time for each size compares with what it was at first (`telemetry.drift`).

    `ratio`: recent median over the reference's, None while that is learned. `since_s`: for how long
    it has been in this state. `ranks`: between which two it is, "" in a rank's own report.
    """

    state: Literal["learning", "steady", "drifted"]
    ratio: float | None = None
    since_s: Seconds = 0.0
    ranks: Text = ""


class LinkTransfers(msgspec.Struct, frozen=True, kw_only=True):
    """What this worker moved to (WRITE) or from (READ) one peer over one transport.

    One value for each period in which the link was in use. `observed_ratio` is the time observed
    over the one predicted, of periods that measure the link. `num_rank_pairs`: those whose
    figures were added; 1 in a rank's own report.
    """

    peer: Text
    distance: Text
    transport: Text
    operation: Text
    num: Total
    num_bytes: Total
    predicted_s: Seconds
    observed_s: Seconds
    transfer_s: BucketCounts
    s_per_mib: BucketCounts
    observed_ratio: BucketCounts
    drift: LinkDrift | None = None
    num_rank_pairs: Total = 1


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `num_forgotten` entries were dropped for newer ones: those idle for longest.

    `num_digest_failures`: transfers into this worker that were not what their sender had.
    `num_lapsed_leases`: prompts computed here that no decode worker fetched in time.
    """

    epoch: Text
    handoffs: Annotated[tuple[HandoffTransfers, ...], Meta(max_length=MAX_ENTRIES)] = ()
    links: Annotated[tuple[LinkTransfers, ...], Meta(max_length=MAX_ENTRIES)] = ()
    num_forgotten: Total = 0
    num_digest_failures: Total = 0
    num_lapsed_leases: Total = 0
