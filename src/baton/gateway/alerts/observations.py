"""What alerts are decided by: what a gateway knows of its fleet at one time. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.router.topology import Distance
    from baton.telemetry.transfer_report import SegmentCounts


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """One direction between two workers, over one transport.

    `ratio` is what transfers take now, over what they took when the link was new; None while that
    is being learned, and of a link that is idle.
    """

    source: str
    target: str
    transport: str
    distance: str
    ratio: float | None
    is_drifted: bool


@dataclass(frozen=True, slots=True)
class LinkSegments:
    """TCP segments sent by one worker to another, since the sender's start (`SegmentCounts`)."""

    source: str
    target: str
    transport: str
    distance: str
    sent: SegmentCounts


@dataclass(frozen=True, slots=True)
class HandoffPath:
    """What carried handoffs between two workers, `num` of them since the receiver's start.

    `expected` is the transport that the latest mismatch was instead of, `mismatch_s_ago` its age.
    `in_common` are the transports that both workers offer.
    """

    source: str
    target: str
    distance: str
    used: str
    num: int
    expected: str = ""
    mismatch_s_ago: float | None = None
    in_common: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LinkClass:
    """Links of one distance, as workers measured them: the median seconds of a typical transfer."""

    model: str
    distance: Distance
    seconds: float


@dataclass(frozen=True, slots=True)
class StoreCost:
    """What a worker takes for `num_tokens` that it loads from the store, or computes."""

    model: str
    worker: str
    num_tokens: int
    load_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class EndedByTarget:
    """Requests of a model that ended since the gateway's start, and those that missed a target.

    `objective` is `ttft`, `tpot` or `itl`, `target_s` what the operator wants of it.
    """

    model: str
    objective: str
    target_s: float
    num: int
    num_missed: int


@dataclass(frozen=True, slots=True)
class Observations:
    """All of it. Counters are by worker and epoch, since the beginning of that.

    The epoch of a server has those of all ranks that have reported: with another rank it is new.
    `found_tokens`: those of `predicted_tokens` that the workers had.
    """

    links: tuple[LinkTimes, ...] = ()
    segments: tuple[LinkSegments, ...] = ()
    paths: tuple[HandoffPath, ...] = ()
    classes: tuple[LinkClass, ...] = ()
    num_digest_failures: Mapping[str, int] = field(default_factory=dict)
    num_lapsed_leases: Mapping[str, int] = field(default_factory=dict)
    predicted_tokens: float = 0.0
    found_tokens: float = 0.0
    stores: tuple[StoreCost, ...] = ()
    ended: tuple[EndedByTarget, ...] = ()
