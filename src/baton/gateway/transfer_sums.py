"""Sums and differences of what workers report of transfers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from baton.telemetry.log_histogram import BucketCounts, LogHistogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.telemetry.transfer_report import (
        HandoffTransfers,
        LinkSegments,
        LinkTransfers,
        TransferReport,
    )


def subtract_handoffs(
    latest: TransferReport, baseline: TransferReport
) -> list[tuple[HandoffTransfers, HandoffTransfers]]:
    """Each of the latest entries, and what was added to it since the baseline."""
    before = {(e.peer, e.distance, e.transport, e.mode, e.operation): e for e in baseline.handoffs}
    pairs = []
    for each in latest.handoffs:
        key = each.peer, each.distance, each.transport, each.mode, each.operation
        earlier, recent = before.get(key), each
        if earlier is not None and earlier.num <= each.num:  # else it was dropped in between
            recent = msgspec.structs.replace(
                each,
                num=each.num - earlier.num,
                num_bytes=each.num_bytes - earlier.num_bytes,
                seconds=each.seconds - earlier.seconds,
                exposed_s=each.exposed_s - earlier.exposed_s,
                transfer_s=each.transfer_s.minus(earlier.transfer_s),
                s_per_mib=each.s_per_mib.minus(earlier.s_per_mib),
                exposed_share=each.exposed_share.minus(earlier.exposed_share),
                num_mismatches=each.num_mismatches - earlier.num_mismatches,
            )
        pairs.append((each, recent))
    return pairs


def subtract_links(
    latest: TransferReport, baseline: TransferReport
) -> list[tuple[LinkTransfers, LinkTransfers]]:
    """Each of the latest entries, and what was added to it since the baseline."""
    before = {(e.peer, e.distance, e.transport, e.operation): e for e in baseline.links}
    pairs = []
    for each in latest.links:
        earlier = before.get((each.peer, each.distance, each.transport, each.operation))
        recent = each
        if earlier is not None and earlier.num <= each.num:
            recent = msgspec.structs.replace(
                each,
                num=each.num - earlier.num,
                num_bytes=each.num_bytes - earlier.num_bytes,
                predicted_s=each.predicted_s - earlier.predicted_s,
                observed_s=each.observed_s - earlier.observed_s,
                transfer_s=each.transfer_s.minus(earlier.transfer_s),
                s_per_mib=each.s_per_mib.minus(earlier.s_per_mib),
                observed_ratio=each.observed_ratio.minus(earlier.observed_ratio),
            )
        pairs.append((each, recent))
    return pairs


def subtract_segments(
    latest: Iterable[LinkSegments], baseline: Iterable[LinkSegments]
) -> list[tuple[LinkSegments, LinkSegments]]:
    """Each of the latest entries, and what was added to it since the baseline."""
    before = {(each.peer, each.transport): each.sent for each in baseline}
    pairs = []
    for each in latest:
        earlier = before.get((each.peer, each.transport))
        recent = each.sent if earlier is None else each.sent.minus(earlier)
        pairs.append((each, msgspec.structs.replace(each, sent=recent)))
    return pairs


def add_handoffs(parts: Sequence[HandoffTransfers]) -> HandoffTransfers:
    """The sum, with the labels of the first one.

    Raises:
        IndexError: there is none.
    """
    return msgspec.structs.replace(
        parts[0],
        num=sum(part.num for part in parts),
        num_bytes=sum(part.num_bytes for part in parts),
        seconds=sum(part.seconds for part in parts),
        exposed_s=sum(part.exposed_s for part in parts),
        transfer_s=_add([part.transfer_s for part in parts]),
        s_per_mib=_add([part.s_per_mib for part in parts]),
        exposed_share=_add([part.exposed_share for part in parts]),
        num_mismatches=sum(part.num_mismatches for part in parts),
    )


def add_links(parts: Sequence[LinkTransfers]) -> LinkTransfers:
    """The sum, with the labels of the first one.

    Raises:
        IndexError: there is none.
    """
    return msgspec.structs.replace(
        parts[0],
        num=sum(part.num for part in parts),
        num_bytes=sum(part.num_bytes for part in parts),
        predicted_s=sum(part.predicted_s for part in parts),
        observed_s=sum(part.observed_s for part in parts),
        transfer_s=_add([part.transfer_s for part in parts]),
        s_per_mib=_add([part.s_per_mib for part in parts]),
        observed_ratio=_add([part.observed_ratio for part in parts]),
    )


def _add(counts: Sequence[BucketCounts]) -> BucketCounts:
    return counts[0] if len(counts) == 1 else LogHistogram.of(counts).counts()
