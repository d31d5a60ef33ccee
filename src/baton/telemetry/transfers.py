"""What one worker's handoffs and links took, by peer: the log histograms behind its report.

HandoffInstruments ── handoff(trace) ──► TransferTable ◄── link(outcome) ── LinkInstruments
                                              └──► report()
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, TypeVar

from baton.clock import Instant
from baton.record import Record
from baton.telemetry.drift import DriftDetector, DriftState
from baton.telemetry.log_histogram import LogHistogram
from baton.telemetry.trace import RequestSpan, Stamp, compute_durations
from baton.telemetry.transfer_report import (
    DISTANCES,
    MAX_ENTRIES,
    MAX_IDLE_S,
    MAX_TEXT_CHARS,
    UNKNOWN_DISTANCE,
    HandoffTransfers,
    LinkDrift,
    LinkSegments,
    LinkTransfers,
    SegmentCounts,
    TransferReport,
    TransportMismatch,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.clock import Clock
    from baton.ids import Epoch
    from baton.telemetry.transfer_report import StoreReport

MIB: Final = 1 << 20
OPERATIONS: Final = {"push": "WRITE", "pull": "READ"}
"""Of the two directions in which a worker moves bytes itself."""


Direction: TypeAlias = Literal["push", "pull"]


class Outcome(Record, frozen=True):
    """A period from the first transfer over an idle link to the last one's end.

    `predicted_s` is the sum of what was predicted of each. `refined`: the time is a measurement
    of the link, not of submitting. `distance` is the peer's, empty where no ticket named it.
    """

    peer: str
    distance: str
    transport: str
    direction: Direction
    num_transfers: int
    num_bytes: int
    predicted_s: float
    observed_s: float
    refined: bool


class TransferTime(Record, frozen=True):
    """One transfer. `num_bytes`: its own, and those that were under way before it.

    The link moves all of these until the transfer ends, so that the time shows what it does also
    where transfers wait for each other without end.
    """

    peer: str
    distance: str
    transport: str
    direction: Direction
    num_bytes: int
    seconds: float


class PeerSegments(Record, frozen=True):
    """TCP segments that this worker sent to a peer since the last report of that.

    `distance` is the peer's, empty where no ticket named it.
    """

    peer: str
    distance: str
    counts: SegmentCounts


def name_distance(distance: str | None) -> str:
    """The label of a distance that a ticket named, if it named a known one."""
    return distance if distance in DISTANCES else UNKNOWN_DISTANCE


@dataclass(frozen=True, slots=True)
class LandedHandoff:
    """The figures of one handoff whose KV is here; None where an instant was not recorded."""

    transfer_s: float | None
    s_per_mib: float | None
    exposed_s: float | None
    exposed_share: float | None

    @classmethod
    def of(cls, trace: RequestSpan) -> LandedHandoff | None:
        """Of a decode worker's trace; None if its KV has not landed."""
        if trace.role != "decode" or Stamp.LAST_LAYER_LANDED not in trace.stamps:
            return None
        durations = compute_durations(trace)
        transfer_s, exposed_s = durations.transfer_s, durations.exposed_transfer_s
        # Instants of two hosts: an error of the clock offset is not a time.
        transfer_s = None if transfer_s is None else max(0.0, transfer_s)
        exposed_s = None if exposed_s is None else max(0.0, exposed_s)
        share = None
        if transfer_s and exposed_s is not None:
            share = min(1.0, exposed_s / transfer_s)
        has_rate = transfer_s is not None and trace.num_bytes
        s_per_mib = transfer_s * MIB / trace.num_bytes if has_rate and transfer_s else None
        return cls(transfer_s, s_per_mib, exposed_s, share)


@dataclass(slots=True)
class _Handoffs:
    num: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0
    transfer_s: LogHistogram = field(default_factory=LogHistogram)
    s_per_mib: LogHistogram = field(default_factory=LogHistogram)
    exposed_share: LogHistogram = field(default_factory=LogHistogram)
    num_mismatches: int = 0
    mismatch: tuple[str, str, float, str] | None = None


@dataclass(slots=True)
class _Link:
    drift: DriftDetector
    used_at: Instant
    num: int = 0
    num_bytes: int = 0
    predicted_s: float = 0.0
    observed_s: float = 0.0
    transfer_s: LogHistogram = field(default_factory=LogHistogram)
    s_per_mib: LogHistogram = field(default_factory=LogHistogram)
    observed_ratio: LogHistogram = field(default_factory=LogHistogram)

    def is_idle(self, now: Instant) -> bool:
        """Whether its latest transfers are too old to show how it is now."""
        return now - self.used_at >= MAX_IDLE_S

    def is_drifted(self, now: Instant) -> bool:
        """Whether it is in use, and slower than it was at first.

        The detector itself sees transfers alone: it is as before when the link is used again.
        """
        return self.drift.state is DriftState.DRIFTED and not self.is_idle(now)

    def report_drift(self, now: Instant) -> LinkDrift:
        """As the gateway is to see it."""
        state, since = self.drift.state, self.drift.since
        if state is DriftState.DRIFTED and not self.is_drifted(now):
            state, since = DriftState.STEADY, Instant(self.used_at + MAX_IDLE_S)
        ratio = None if self.is_idle(now) else self.drift.ratio
        return LinkDrift(state=state.value, ratio=ratio, since_s=max(0.0, now - since))


@dataclass(slots=True)
class _Segments:
    distance: str = UNKNOWN_DISTANCE
    sent: SegmentCounts = field(default_factory=SegmentCounts)


class HandoffLabels(NamedTuple):
    """What a handoff is counted by, beside its peer: few values each, none of a client's text."""

    distance: str
    transport: str
    mode: str
    operation: str


class LinkLabels(NamedTuple):
    """What a transfer is counted by, beside its peer."""

    distance: str
    transport: str
    operation: str


Key = TypeVar("Key")
Entry = TypeVar("Entry", _Handoffs, _Link, _Segments)


class TransferTable:
    """At most `MAX_ENTRIES` of each kind: those idle for longest are dropped. Thread-safe.

    `count_lapsed_leases` gives the leases that lapsed since the worker's start, `report_store` what
    its store does; both from the thread that calls `report`.
    """

    def __init__(
        self,
        epoch: Epoch,
        clock: Clock,
        count_lapsed_leases: Callable[[], int] = int,
        report_store: Callable[[], StoreReport | None] = lambda: None,
    ) -> None:
        self._epoch, self._clock = epoch, clock
        self._count_lapsed_leases, self._report_store = count_lapsed_leases, report_store
        self._lock = threading.Lock()
        self._handoffs: OrderedDict[tuple[str, HandoffLabels], _Handoffs] = OrderedDict()
        self._links: OrderedDict[tuple[str, LinkLabels], _Link] = OrderedDict()
        self._segments: OrderedDict[tuple[str, str], _Segments] = OrderedDict()
        self._num_forgotten = self._num_digest_failures = 0

    def handoff(self, trace: RequestSpan, labels: HandoffLabels, landed: LandedHandoff) -> None:
        """Count a handoff into this worker."""
        with self._lock:
            entry = self._find(self._handoffs, (_clip(trace.peer), labels), _Handoffs)
            entry.num += 1
            entry.num_bytes += trace.num_bytes
            if landed.transfer_s is not None:
                entry.seconds += landed.transfer_s
                entry.transfer_s.add(landed.transfer_s)
            if landed.s_per_mib is not None:
                entry.s_per_mib.add(landed.s_per_mib)
            if landed.exposed_s is not None:
                entry.exposed_s += landed.exposed_s
            if landed.exposed_share is not None:
                entry.exposed_share.add(landed.exposed_share)
            if trace.expected_transport != trace.transport:
                entry.num_mismatches += 1
                expected, now = _clip(trace.expected_transport), self._clock.now()
                entry.mismatch = expected, labels.transport, now, _clip(trace.request_id)

    def digest_failures(self, num: int) -> None:
        """So many transfers of one handoff into this worker were not what their sender had."""
        with self._lock:
            self._num_digest_failures += num

    def count_drifted(self, transport: str, operation: str) -> int:
        """Links that take longer than they did at first, of those used within `MAX_IDLE_S`."""
        now = self._clock.now()
        with self._lock:
            return sum(
                (labels.transport, labels.operation) == (transport, operation)
                and entry.is_drifted(now)
                for (_, labels), entry in self._links.items()
            )

    def transfer(self, transfer: TransferTime, labels: LinkLabels) -> None:
        """Compare a transfer's time with what it took when the link was new."""
        with self._lock:
            now = self._clock.now()
            entry = self._find_link(transfer.peer, labels, now)
            entry.drift.observe(transfer.num_bytes, transfer.seconds, now)

    def link(self, outcome: Outcome, labels: LinkLabels) -> None:
        """Count a period in which a link was in use."""
        with self._lock:
            entry = self._find_link(outcome.peer, labels, self._clock.now())
            entry.num += 1
            entry.num_bytes += outcome.num_bytes
            entry.predicted_s += outcome.predicted_s
            entry.observed_s += outcome.observed_s
            entry.transfer_s.add(outcome.observed_s)
            if outcome.num_bytes:
                entry.s_per_mib.add(outcome.observed_s * MIB / outcome.num_bytes)
            if outcome.refined and outcome.predicted_s > 0:
                entry.observed_ratio.add(outcome.observed_s / outcome.predicted_s)

    def segments(self, peer: str, distance: str, transport: str, sent: SegmentCounts) -> None:
        """Count what the kernel sent to a peer; the latest distance is that of all of it."""
        with self._lock:
            entry = self._find(self._segments, (_clip(peer), transport), _Segments)
            entry.distance, entry.sent = distance, entry.sent.plus(sent)

    def report(self) -> TransferReport:
        """All of it, those used last at the end.

        The lock is held for one entry at a time: no thread that counts waits for the whole report.
        """
        now = self._clock.now()
        with self._lock:
            handoffs, links = tuple(self._handoffs.items()), tuple(self._links.items())
        reported_handoffs: list[HandoffTransfers] = []
        for key, entry in handoffs:
            with self._lock:
                reported_handoffs.append(_report_handoffs(*key, entry, now))
        reported_links: list[LinkTransfers] = []
        for (peer, labels), link in links:
            with self._lock:
                reported_links.append(_report_link(peer, labels, link, now))
        return TransferReport(
            epoch=self._epoch,
            handoffs=tuple(reported_handoffs),
            links=tuple(reported_links),
            segments=self._report_segments(),
            num_forgotten=self._num_forgotten,
            num_digest_failures=self._num_digest_failures,
            num_lapsed_leases=self._count_lapsed_leases(),
            store=self._report_store(),
        )

    def _report_segments(self) -> tuple[LinkSegments, ...]:
        with self._lock:
            return tuple(
                LinkSegments(peer=peer, distance=each.distance, transport=transport, sent=each.sent)
                for (peer, transport), each in self._segments.items()
            )

    def _find_link(self, peer: str, labels: LinkLabels, now: Instant) -> _Link:
        entry = self._find(
            self._links, (_clip(peer), labels), lambda: _Link(DriftDetector(now), now)
        )
        entry.used_at = now
        return entry

    def _find(self, entries: OrderedDict[Key, Entry], key: Key, make: Callable[[], Entry]) -> Entry:
        entry = entries.get(key)
        if entry is None:
            entry = entries[key] = make()
            if len(entries) > MAX_ENTRIES:
                entries.popitem(last=False)
                self._num_forgotten += 1
        else:
            entries.move_to_end(key)
        return entry


def _clip(text: str | None) -> str:
    return (text or "")[:MAX_TEXT_CHARS]


def _report_handoffs(
    peer: str, labels: HandoffLabels, entry: _Handoffs, now: float
) -> HandoffTransfers:
    last = None
    if entry.mismatch is not None:
        expected, used, at, request_id = entry.mismatch
        last = TransportMismatch(expected, used, max(0.0, now - at), request_id)
    return HandoffTransfers(
        peer=peer,
        **labels._asdict(),
        num=entry.num,
        num_bytes=entry.num_bytes,
        seconds=entry.seconds,
        exposed_s=entry.exposed_s,
        transfer_s=entry.transfer_s.counts(),
        s_per_mib=entry.s_per_mib.counts(),
        exposed_share=entry.exposed_share.counts(),
        num_mismatches=entry.num_mismatches,
        last_mismatch=last,
    )


def _report_link(peer: str, labels: LinkLabels, entry: _Link, now: Instant) -> LinkTransfers:
    return LinkTransfers(
        peer=peer,
        **labels._asdict(),
        num=entry.num,
        num_bytes=entry.num_bytes,
        predicted_s=entry.predicted_s,
        observed_s=entry.observed_s,
        transfer_s=entry.transfer_s.counts(),
        s_per_mib=entry.s_per_mib.counts(),
        observed_ratio=entry.observed_ratio.counts(),
        drift=entry.report_drift(now),
    )
