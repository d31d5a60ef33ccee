"""Whose heartbeats and renewals arrive at one gateway, and since when they do not. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.gateway.members.lease_table import MIN_INTERVAL_S
from baton.protocol.heartbeats import (
    HEARTBEAT_BYTES,
    HEARTBEAT_INTERVAL_S,
    ID_BYTES,
    MAX_RENEWAL_BYTES,
    HeartbeatGrant,
    HeartbeatReader,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yarl import URL

    from baton.clock import Instant
    from baton.ids import Epoch, WorkerId

MISSED_S: Final = 2 * HEARTBEAT_INTERVAL_S + 0.1
"""Without a heartbeat for so long, at least one is missing."""
SUSPECTED_SHARE: Final = 0.5
"""Of the time after which it is silent, a worker is suspected."""


class HeartbeatResult(StrEnum):
    """What became of a datagram; the label of a metric."""

    TAKEN = "taken"
    RENEWED = "renewed"
    UNKNOWN = "unknown"
    FORGED = "forged"
    REPEATED = "repeated"


class Silence(StrEnum):
    """What is thought of a worker from which nothing is received."""

    NONE = "none"
    SUSPECTED = "suspected"
    SILENT = "silent"


def judge_silence(silent_s: float, silent_after_s: float) -> Silence:
    """Of a worker from which nothing was received for `silent_s` seconds."""
    if silent_s < SUSPECTED_SHARE * silent_after_s:
        return Silence.NONE
    return Silence.SILENT if silent_s >= silent_after_s else Silence.SUSPECTED


@dataclass(slots=True, eq=False)
class Heartbeats:
    """Those of one epoch of a worker, at `origin`.

    `certificate` is what the worker's last post over TLS has proved to be its own. `received_at` is
    None before the first one, and after the end of the lease; `renewal_at` before a renewal.
    """

    worker: WorkerId
    epoch: Epoch
    origin: URL
    certificate: bytes
    grant: HeartbeatGrant
    reader: HeartbeatReader
    sequence: int = 0
    received_at: Instant | None = None
    renewal_at: Instant | None = None


class Renewal(NamedTuple):
    """A sealed announcement that came by a datagram of this worker."""

    sender: Heartbeats
    sealed: bytes


class HeartbeatTable:
    """Of all workers that hold a lease. `secret`: 32 bytes of this gateway's own."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._by_worker: dict[WorkerId, Heartbeats] = {}
        self._by_id: dict[bytes, Heartbeats] = {}

    def __len__(self) -> int:
        return len(self._by_worker)

    def __iter__(self) -> Iterator[Heartbeats]:
        return iter(self._by_worker.values())

    def missing(self, now: Instant) -> list[Heartbeats]:
        """Workers of which a heartbeat is missing, and whose heartbeats did arrive before."""
        latest = now - MISSED_S
        return [
            each
            for each in self._by_worker.values()
            if (at := each.received_at) is not None and at < latest
        ]

    def grant(
        self, worker: WorkerId, epoch: Epoch, origin: URL, certificate: bytes
    ) -> HeartbeatGrant:
        """What this epoch, which holds the name, sends heartbeats with; the same one each time."""
        known = self._by_worker.get(worker)
        if known is None or known.epoch != epoch:
            self.forget(worker)
            grant = HeartbeatGrant.derive(self._secret, worker, epoch)
            known = Heartbeats(worker, epoch, origin, certificate, grant, HeartbeatReader(grant))
            self._by_worker[worker] = self._by_id[grant.id] = known
        known.origin, known.certificate = origin, certificate
        return known.grant

    def forget(self, worker: WorkerId) -> None:
        """It does not hold its name any more."""
        known = self._by_worker.pop(worker, None)
        if known is not None:
            del self._by_id[known.grant.id]
            known.received_at = None

    def take(self, datagram: bytes, now: Instant) -> HeartbeatResult:
        """A heartbeat, or anything else, that arrived."""
        is_heartbeat = len(datagram) == HEARTBEAT_BYTES
        known = self._by_id.get(datagram[:ID_BYTES]) if is_heartbeat else None
        if known is None:
            return HeartbeatResult.UNKNOWN
        sequence = known.reader.read_heartbeat(datagram)
        if sequence is None:
            return HeartbeatResult.FORGED
        if sequence <= known.sequence:
            return HeartbeatResult.REPEATED
        known.sequence, known.received_at = sequence, now
        return HeartbeatResult.TAKEN

    def read_renewal(self, datagram: bytes, now: Instant) -> Renewal | HeartbeatResult:
        """A renewal, or anything else longer than a heartbeat, that arrived.

        That its sender has the key shows no more than that: the announcement is to be read.
        """
        is_bounded = HEARTBEAT_BYTES < len(datagram) <= MAX_RENEWAL_BYTES
        known = self._by_id.get(datagram[:ID_BYTES]) if is_bounded else None
        if known is None:
            return HeartbeatResult.UNKNOWN
        sealed = known.reader.read_renewal(datagram)
        if sealed is None:
            return HeartbeatResult.FORGED
        if known.renewal_at is not None and now - known.renewal_at < MIN_INTERVAL_S:
            return HeartbeatResult.REPEATED
        known.renewal_at = now
        return Renewal(known, sealed)
