"""Takes the heartbeats and renewals that have arrived at a gateway, and acknowledges renewals."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from baton.gateway.members.heartbeat_table import HeartbeatResult, HeartbeatTable, Renewal
from baton.protocol.heartbeats import Acknowledgement, make_acknowledgement

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.clock import Instant
    from baton.gateway.members.announced_metrics import AnnouncementMetrics
    from baton.gateway.members.heartbeat_socket import HeartbeatSocket


class HeartbeatReceiver:
    """Owner: the event loop's thread.

    `renew` offers a renewal's announcement: what to answer, if that renewed its lease.
    """

    def __init__(
        self,
        heartbeat_socket: HeartbeatSocket,
        table: HeartbeatTable,
        metrics: AnnouncementMetrics,
        renew: Callable[[Renewal], Acknowledgement | None],
    ) -> None:
        self._socket, self._table = heartbeat_socket, table
        self._metrics, self._renew = metrics, renew

    def read(self, now: Instant) -> None:
        """All that has arrived. Does not block."""
        arrived, take, num_taken = self._socket.read(), self._table.take, 0
        results: Counter[HeartbeatResult] = Counter()
        for datagram in arrived.short:
            result = take(datagram, now)
            if result is HeartbeatResult.TAKEN:
                num_taken += 1
            else:
                results[result] += 1
        for datagram, sender in arrived.long:
            renewal = self._table.read_renewal(datagram, now)
            if isinstance(renewal, HeartbeatResult):
                results[renewal] += 1
            elif (answer := self._renew(renewal)) is not None:
                results[HeartbeatResult.RENEWED] += 1
                self._socket.send(make_acknowledgement(renewal.sender.grant, answer), sender)
        results[HeartbeatResult.TAKEN] = num_taken
        self._metrics.heartbeats(results)
