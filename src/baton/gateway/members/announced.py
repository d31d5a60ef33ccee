"""The source of workers `announced`: those that announce themselves, here or at another gateway.

worker ──announcement──► receive ─► LeaseTable ─► addresses ─► watch()
other gateway ──relayed──► take_relayed ─┘  ▲
                                  sweep ────┘ lapsed leases; overdue ones are looked at
worker ──heartbeats──► HeartbeatReceiver ─► HeartbeatTable ─► `Liveness`, after each sweep
worker ──renewal──► HeartbeatReceiver ─► `renew` ─► LeaseTable; an acknowledgement
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol

from baton.auth.certificates import IdentityRole
from baton.clock import Clock, Instant
from baton.errors import ConfigError, ProtocolError
from baton.gateway.members.heartbeat_table import HeartbeatTable, Renewal
from baton.gateway.members.lease_table import Lease, LeaseTable, Outcome, Verdict
from baton.gateway.options import WorkerAddress
from baton.gateway.worker_info import read_info
from baton.ids import Epoch, WorkerId
from baton.net.cluster_client import ClusterClient, NoAnswerError
from baton.protocol.announcements import (
    RENEWALS_PER_LEASE,
    AnnouncementError,
    AnnouncementReply,
    RefusalReason,
    decode_unverified,
    read_announcement,
)
from baton.protocol.heartbeats import Acknowledgement, HeartbeatGrant
from baton.protocol.worker_http import INFO_PATH
from baton.telemetry.log_limit import LimitedLog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from yarl import URL

    from baton.auth.credentials import Credentials
    from baton.gateway.members.announced_metrics import AnnouncementMetrics
    from baton.gateway.members.heartbeat_receiver import HeartbeatReceiver
    from baton.gateway.members.interface import SourceStatus
    from baton.net.tls import ClusterTls
    from baton.protocol.announcements import Announcement, Relayed

SWEEP_S: Final = 0.1
STALL_S: Final = 1.0
"""Without a sweep: this process did not run, and announcements wait in its sockets."""
MAX_CHECK_S: Final = 1.0
CLOSING_S: Final = 0.1
NEWS_SHARE: Final = 1.5
"""Of the interval between two renewals: so long each one is asked for a post."""
MAX_CHECKS: Final = 16
"""At once, of addresses whose worker may be gone."""
MAX_INFO_BYTES: Final = 1 << 20
VERIFIED_AT_ONCE: Final = 16
"""Signatures, of 0.1 ms each."""

_REASONS: Final = {
    Outcome.REPEATED: (RefusalReason.REPEATED, "it was taken before, or a later one was"),
    Outcome.TOO_OFTEN: (RefusalReason.RATE, "it comes too soon after the one before"),
    Outcome.FULL: (RefusalReason.FULL, "this gateway knows as many workers as it may"),
    Outcome.LAPSED: (RefusalReason.REPEATED, "its lease is over"),
}

log = logging.getLogger(__name__)


class Liveness(Protocol):
    """Acts on what leases and heartbeats show. From the event loop's thread."""

    def look(self, heartbeats: HeartbeatTable, now: Instant) -> None:
        """All heartbeats that had arrived by `now` were read."""
        ...

    def lost(self, origin: URL, epoch: Epoch, reason: str) -> None:
        """That epoch of the worker at `origin` has not renewed its lease, or is gone."""
        ...


class AnnouncedWorkers:
    """Implements `WorkerSource`. Owner: the event loop's thread.

    `takes_plain`: workers without TLS are taken, too. `list_gateways` is what workers get to know.
    Once they are set: `status` is what the gateway shows of this source, `heartbeat_receiver` takes
    heartbeats and renewals, and `liveness` acts on their absence.
    """

    def __init__(
        self,
        credentials: Credentials,
        tls: ClusterTls,
        clock: Clock,
        metrics: AnnouncementMetrics,
        *,
        takes_plain: bool,
        list_gateways: Callable[[], tuple[str, ...]],
    ) -> None:
        self.table = LeaseTable()
        self.heartbeats = HeartbeatTable(secrets.token_bytes(32))
        self.status: SourceStatus | None = None
        self.liveness: Liveness | None = None
        self.heartbeat_receiver: HeartbeatReceiver | None = None
        self._credentials, self._tls, self._clock = credentials, tls, clock
        self._metrics, self._takes_plain = metrics, takes_plain
        self._list_gateways = list_gateways
        self._log = LimitedLog(log, clock)
        self._last_look, self._stalled_s = clock.now(), 0.0
        self._gateways, self._gateways_changed_at = list_gateways(), self._last_look
        self._watchers: set[asyncio.Event] = set()
        self._checks: dict[tuple[WorkerId, Epoch], asyncio.Task[bool]] = {}
        self._by_sender: dict[bytes, WorkerId] = {}
        self._is_closed = False

    async def watch(self) -> AsyncIterator[frozenset[WorkerAddress]]:
        """See `WorkerSource`."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            shown: frozenset[WorkerAddress] | None = None
            while True:
                changed.clear()
                current = self.addresses()
                if current != shown:
                    shown = current
                    yield current
                else:
                    await changed.wait()
        finally:
            self._watchers.discard(changed)

    def addresses(self) -> frozenset[WorkerAddress]:
        """Of all workers that hold a lease."""
        held = (lease.announcement for lease in self.table)
        return frozenset(WorkerAddress(each.url, each.role) for each in held)

    async def run(self) -> None:
        """End leases that lapse, and look at those that are overdue, until cancelled."""
        try:
            while True:
                try:
                    self._sweep()
                except Exception:
                    log.exception("looking at the leases failed; trying again")
                await asyncio.sleep(SWEEP_S)
        finally:
            self._is_closed = True
            for check in self._checks.values():
                check.cancel()
            await asyncio.gather(*self._checks.values(), return_exceptions=True)

    async def receive(self, sealed: bytes, sender: bytes) -> AnnouncementReply:
        """An announcement of a worker's own; `sender` is the certificate of its connection."""
        try:
            announcement = self._read(sealed, sender)
        except AnnouncementError as exc:
            return self._refuse(exc.reason, str(exc))
        verdict = self._offer(announcement, sealed, 0.0)
        if verdict.outcome in {Outcome.NAME_HELD, Outcome.ADDRESS_HELD}:
            holder = verdict.holder
            if holder is not None and await self._find_gone(holder):
                verdict = self._offer(announcement, sealed, 0.0)
        if verdict.outcome in {Outcome.ACCEPTED, Outcome.KNOWN}:
            self._by_sender[sender] = announcement.worker
        return self._answer(announcement, verdict, sender)

    def renew(self, renewal: Renewal) -> Acknowledgement | None:
        """Offer an announcement that came by a datagram: what to answer, if it renewed its lease.

        Else nothing is answered: the worker posts it, and gets to know the reason by that.
        """
        known = renewal.sender
        try:
            announcement = self._read(renewal.sealed, known.certificate)
        except AnnouncementError as exc:
            self._refuse(exc.reason, str(exc))
            return None
        is_its_own = (announcement.worker, announcement.epoch) == (known.worker, known.epoch)
        if not is_its_own or announcement.is_farewell:
            return None
        verdict = self._offer(announcement, renewal.sealed, 0.0)
        if verdict.outcome not in {Outcome.ACCEPTED, Outcome.KNOWN}:
            return None
        self._metrics.answered("accepted")
        return Acknowledgement(announcement.sequence, self._has_news_for(announcement))

    def _has_news_for(self, announcement: Announcement) -> bool:
        """Whether gateways have come or gone since this worker's renewal before."""
        now, gateways = self.now(), self._list_gateways()
        if gateways != self._gateways:
            self._gateways, self._gateways_changed_at = gateways, now
        interval_s = announcement.lease_s / RENEWALS_PER_LEASE
        return now - self._gateways_changed_at < NEWS_SHARE * interval_s

    def connection_ended(self, sender: bytes) -> None:
        """A worker's connection ended, perhaps since the worker has: that is looked at soon."""
        worker = self._by_sender.pop(sender, None)
        if worker is not None and not self._is_closed:
            # A process that ends closes its sockets one after the other.
            asyncio.get_running_loop().call_later(CLOSING_S, self._look_at, worker)

    async def take_relayed(self, relayed: Iterable[Relayed]) -> int:
        """Announcements that another gateway has received; how many of them were accepted.

        The signature of each that may change something is checked.
        """
        num_accepted = 0
        for number, each in enumerate(relayed, start=1):
            if not number % VERIFIED_AT_ONCE:
                await asyncio.sleep(0)  # requests of clients take their turn
            try:
                outcome = self._take_relayed(each)
            except AnnouncementError as exc:
                self._refuse(exc.reason, str(exc))
                continue
            self._metrics.relayed(outcome)
            num_accepted += outcome is Outcome.ACCEPTED
        return num_accepted

    def _take_relayed(self, relayed: Relayed) -> Outcome:
        if not self.table.is_news(decode_unverified(relayed.sealed)):
            return Outcome.REPEATED
        announcement = self._read(relayed.sealed, None)
        return self._offer(announcement, relayed.sealed, relayed.age_s).outcome

    def _read(self, sealed: bytes, sender: bytes | None) -> Announcement:
        announcement = read_announcement(sealed, self._credentials, sender)
        try:
            WorkerAddress(announcement.url, announcement.role)
        except (ConfigError, ValueError) as exc:  # one such lease would end `watch`
            raise AnnouncementError(
                RefusalReason.ADDRESS, f"{announcement.worker} announces no usable address: {exc}"
            ) from exc
        if not (self._takes_plain or announcement.url.startswith("https:")):
            raise AnnouncementError(
                RefusalReason.ADDRESS,
                f"{announcement.worker} announces {announcement.url}, which has no TLS; set "
                "security.tls alike for workers and gateways",
            )
        return announcement

    def _offer(self, announcement: Announcement, sealed: bytes, age_s: float) -> Verdict:
        now = self._sweep_lapsed()
        before = self.table.find(announcement.worker)
        known = None if before is None else before.announcement
        verdict = self.table.offer(announcement, sealed, now, age_s)
        if verdict.outcome is Outcome.ACCEPTED:
            self._note_accepted(announcement, known)
        return verdict

    def _note_accepted(self, announcement: Announcement, before: Announcement | None) -> None:
        if announcement.is_farewell:
            log.info("%s has ended (epoch %s)", announcement.worker, announcement.epoch)
            if before is not None:  # else its lease had ended already
                self._metrics.left("farewell")
            self.heartbeats.forget(announcement.worker)
        elif before is None:
            log.info(
                "%s announces itself: %s worker at %s, epoch %s",
                *(announcement.worker, announcement.role, announcement.url, announcement.epoch),
            )
        elif (before.url, before.role) == (announcement.url, announcement.role):
            return
        self._wake()

    def _answer(
        self, announcement: Announcement, verdict: Verdict, sender: bytes
    ) -> AnnouncementReply:
        gateways = self._list_gateways()
        match verdict.outcome:
            case Outcome.ACCEPTED | Outcome.KNOWN:
                self._metrics.answered("accepted")
                grant = self._grant(announcement, sender)
                return AnnouncementReply(result="accepted", gateways=gateways, heartbeat=grant)
            case Outcome.SUPERSEDED:
                self._metrics.answered("superseded")
                return AnnouncementReply(
                    result="superseded", owner=verdict.owner or Epoch(""), gateways=gateways
                )
            case Outcome.NAME_HELD | Outcome.ADDRESS_HELD:
                return self._ask_to_wait(announcement, verdict, gateways)
            case outcome:
                reason, text = _REASONS[outcome]
                return self._refuse(reason, f"{announcement.worker}: {text}")

    def _grant(self, announcement: Announcement, sender: bytes) -> HeartbeatGrant | None:
        if self.heartbeat_receiver is None or announcement.is_farewell:
            return None
        origin = WorkerAddress(announcement.url, announcement.role).origin
        return self.heartbeats.grant(announcement.worker, announcement.epoch, origin, sender)

    def _ask_to_wait(
        self, announcement: Announcement, verdict: Verdict, gateways: tuple[str, ...]
    ) -> AnnouncementReply:
        self._metrics.answered("waiting")
        holder = verdict.holder
        owner, wait_s, reason = Epoch(""), 0.0, ""
        if holder is not None:
            held = holder.announcement
            owner, wait_s = held.epoch, max(0.0, holder.lapses_at - self.now())
            what = "name" if verdict.outcome is Outcome.NAME_HELD else "address"
            reason = f"its {what} is that of {held.worker}, epoch {held.epoch}, at {held.url}"
            self._log.warning(
                "waiting", f"{announcement.worker} at {announcement.url} has to wait: {reason}"
            )
        return AnnouncementReply(
            result="waiting", owner=owner, wait_s=wait_s, reason=reason, gateways=gateways
        )

    def _refuse(self, reason: RefusalReason, text: str) -> AnnouncementReply:
        self._metrics.refused(reason)
        self._log.warning(reason, f"refused an announcement: {text}")
        return AnnouncementReply(result="refused", reason=text[:500])

    # Leases that end

    def _sweep(self) -> None:
        now = self._sweep_lapsed()
        if len(self._checks) < MAX_CHECKS:
            for lease in self.table.take_overdue(now)[:MAX_CHECKS]:
                self._check(lease)
        self._metrics.held(len(self.table))
        if self.status is not None:
            self.status.note_read()
        if self.heartbeat_receiver is not None:
            self.heartbeat_receiver.read(now)
        if self.liveness is not None:
            self.liveness.look(self.heartbeats, now)

    def now(self) -> Instant:
        """By the clock of the leases, which stands while this process does not run.

        Leases end later by that, never earlier: workers fence themselves by their own clocks.
        """
        now = self._clock.now()
        gap_s, self._last_look = now - self._last_look, now
        if gap_s > STALL_S:
            log.warning("this gateway did not run for %.1f s; leases last longer by that", gap_s)
            self._stalled_s += gap_s
        return Instant(now - self._stalled_s)

    def _sweep_lapsed(self) -> Instant:
        now = self.now()
        lapsed = self.table.lapse(now)
        for announcement in lapsed:
            log.warning(
                "the lease of %s has lapsed: no announcement for %g s; it is taken out",
                *(announcement.worker, announcement.lease_s),
            )
            self._metrics.left("lapsed")
            self._lost(announcement, f"its lease of {announcement.lease_s:g} s has lapsed")
        if lapsed:
            self._wake()
        return now

    def _look_at(self, worker: WorkerId) -> None:
        lease = self.table.find(worker)
        if lease is not None and not self._is_closed and len(self._checks) < MAX_CHECKS:
            self._check(lease)

    async def _find_gone(self, lease: Lease) -> bool:
        """Whether the epoch that holds a lease is certainly gone; its name is free then."""
        return await asyncio.shield(self._check(lease))

    def _check(self, lease: Lease) -> asyncio.Task[bool]:
        held = lease.announcement
        key = held.worker, held.epoch
        check = self._checks.get(key)
        if check is None:
            check = self._checks[key] = asyncio.create_task(self._look(held))
            check.add_done_callback(lambda _: self._checks.pop(key, None))
        return check

    async def _look(self, held: Announcement) -> bool:
        reason = await find_why_gone(held, self._tls)
        if reason is None or not self.table.end(held.worker, held.epoch):
            return False
        log.warning("%s (epoch %s) is gone: %s; it is taken out", held.worker, held.epoch, reason)
        self._metrics.left("gone")
        self._lost(held, reason)
        self._wake()
        return True

    def _lost(self, held: Announcement, reason: str) -> None:
        self.heartbeats.forget(held.worker)
        if self.liveness is not None:
            self.liveness.lost(WorkerAddress(held.url, held.role).origin, held.epoch, reason)

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()


async def find_why_gone(held: Announcement, tls: ClusterTls) -> str | None:
    """Ask at a worker's address who is there: why that epoch is certainly gone, or None.

    One that does not answer in time may be alive.
    """
    client = ClusterClient(held.url, IdentityRole.WORKER, tls, max_answer_bytes=MAX_INFO_BYTES)
    try:
        # In time for the answer to an announcement that waits for it.
        timeout_s = min(MAX_CHECK_S, held.lease_s / RENEWALS_PER_LEASE / 2)
        status, body = await client.request("GET", INFO_PATH, b"", timeout_s)
        if status != HTTPStatus.OK:
            return None
        info = read_info(body)
    except NoAnswerError as exc:
        return f"{held.url} refuses connections" if exc.is_refused else None
    except ProtocolError:
        return None
    finally:
        client.close()
    if (info.worker, info.epoch) == (held.worker, held.epoch):
        return None
    return f"{info.worker}, epoch {info.epoch}, answers at {held.url}"
