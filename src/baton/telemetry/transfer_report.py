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
MAX_TIERS: Final = 16
MAX_REPORT_BYTES: Final = 8 << 20
DISTANCES: Final = ("same_device", "same_host", "same_rack", "same_zone", "cross_zone")
"""From near to far: the names of `router.topology.Distance`."""
UNKNOWN_DISTANCE: Final = "unknown"

MAX_TEXT_CHARS: Final = 256
MAX_IDLE_S: Final = 600.0
"""Without a transfer, after which nothing is known of a link's times: its peer may be gone for
good. So long that a fleet whose links are used once in some minutes still sees their drift."""

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
    A link that has been idle for `MAX_IDLE_S` has no `ratio`, and has not drifted.
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


class SegmentCounts(msgspec.Struct, frozen=True):
    """TCP segments with data, as the kernel of their sender counts them (`TCP_INFO` of Linux).

    `num` includes those that were sent again, `num_retransmitted`. Of these the receiver had
    `num_duplicates` already (it reports them, RFC 2883): they were late, not lost. `num_bytes` is
    what the segments carried, in sum.
    """

    num: Total = 0
    num_retransmitted: Total = 0
    num_duplicates: Total = 0
    num_bytes: Total = 0

    @property
    def num_lost(self) -> int:
        """Retransmitted segments that the receiver did not have."""
        return max(0, self.num_retransmitted - self.num_duplicates)

    @property
    def lost_share(self) -> float | None:
        """Of all segments; None where none was sent."""
        return self.num_lost / self.num if self.num else None

    def plus(self, more: SegmentCounts) -> SegmentCounts:
        """The sum of both."""
        return SegmentCounts(
            self.num + more.num,
            self.num_retransmitted + more.num_retransmitted,
            self.num_duplicates + more.num_duplicates,
            self.num_bytes + more.num_bytes,
        )

    def minus(self, earlier: SegmentCounts) -> SegmentCounts:
        """What came since earlier counts; these themselves where they began at 0 again."""
        if earlier.num > self.num or earlier.num_bytes > self.num_bytes:
            return self
        return SegmentCounts(
            self.num - earlier.num,
            max(0, self.num_retransmitted - earlier.num_retransmitted),
            max(0, self.num_duplicates - earlier.num_duplicates),
            self.num_bytes - earlier.num_bytes,
        )


class LinkSegments(msgspec.Struct, frozen=True, kw_only=True):
    """What this worker sent to one peer over one transport's TCP connections.

    KV that it writes there or that the peer reads from it, and the transport's own messages.
    """

    peer: Text
    distance: Text
    transport: Text
    sent: SegmentCounts


class StoreTier(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of this worker's store. Counts are this worker's, `used_bytes` is of all its users.

    A hit or a miss is an entry that was asked for here; what a higher tier has is not asked for in
    a lower one. Bytes read and written are of bodies. `capacity_bytes` is 0 where nothing is known
    to limit it. `is_available`: false for a server that has failed and is not asked now.
    """

    tier: Text
    used_bytes: Total
    capacity_bytes: Total
    num_hits: Total
    num_misses: Total
    read_bytes: Total
    written_bytes: Total
    is_available: bool = True


class StoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tiers, the quickest first; prompts that the store had something of, and those of which not.

    `num_prompts_missing` are in no tier's misses: no entry of theirs was asked for.
    """

    tiers: Annotated[tuple[StoreTier, ...], Meta(max_length=MAX_TIERS)] = ()
    num_prompts_found: Total = 0
    num_prompts_missing: Total = 0


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `num_forgotten` entries were dropped for newer ones: those idle for longest.

    `num_digest_failures`: transfers into this worker that were not what their sender had.
    `num_lapsed_leases`: prompts computed here that no decode worker fetched in time.
    `store` is None without one.
    """

    epoch: Text
    handoffs: Annotated[tuple[HandoffTransfers, ...], Meta(max_length=MAX_ENTRIES)] = ()
    links: Annotated[tuple[LinkTransfers, ...], Meta(max_length=MAX_ENTRIES)] = ()
    segments: Annotated[tuple[LinkSegments, ...], Meta(max_length=MAX_ENTRIES)] = ()
    num_forgotten: Total = 0
    num_digest_failures: Total = 0
    num_lapsed_leases: Total = 0
    store: StoreReport | None = None
